"""States after tokens written in one native call: a session keeps them in memory of its own, and gives copies."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from latte.decode.memory import SessionMemory
from latte.decode.program import SPARE
from latte.models import LatteCache
from latte.ops import native
from tests.models.support import decode, tiny_model, token_ids

pytestmark = pytest.mark.skipif(not native.available(), reason=native.describe())


@torch.no_grad()
def test_a_written_state_is_a_state_like_any_other(tmp_path, calls):
    model, ids = tiny_model("latte-r-swa++", sinks=1), token_ids(2, 4)
    cache = model(ids).past_key_values
    seen = {name: tensor.clone() for name, tensor in cache.state.tensors()}
    first = cache.snapshot()
    decode(model, ids, cache)
    assert len(calls) == 4
    assert cache.session is not None
    for (name, tensor), (other, kept) in zip(first[0].tensors(), seen.items(), strict=True):
        assert name == other
        assert torch.equal(tensor, kept), name
    state = cache.state
    cache.save(tmp_path / "state.safetensors")
    torch.save(dict(state.tensors()), tmp_path / "tensors.pt")
    assert (tmp_path / "tensors.pt").stat().st_size < 3 * state.nbytes + 50_000  # each tensor alone, not all its block
    twins = [copy.deepcopy(state), copy.copy(state), pickle.loads(pickle.dumps(state)), state.fork()]
    twins += [LatteCache.load(tmp_path / "state.safetensors").state, state.map(torch.clone)]
    leaves, spec = torch.utils._pytree.tree_flatten(state)
    twins.append(torch.utils._pytree.tree_unflatten(leaves, spec))
    wanted = decode(model, ids, cache)
    for twin in twins:
        assert torch.equal(decode(model, ids, LatteCache(twin, 8)), wanted)
    # What was written since has left it as it was.
    assert torch.equal(decode(model, ids, LatteCache(state, 8)), wanted)


def test_a_state_with_a_history_keeps_it(calls):
    model, ids = tiny_model("latte-r-swa++"), token_ids(1, 3)
    cache = model(ids).past_key_values
    state = cache.state
    plain = decode(model, ids, cache)
    assert len(calls) == 3
    loss = model(ids, past_key_values=LatteCache(state, 3)).logits.square().sum()
    assert torch.autograd.grad(loss, state.layers[0][0].latents.mean_BHMV)[0].abs().max() > 0
    assert torch.equal(decode(model, ids, LatteCache(state.detach(), 3)), plain)


@torch.no_grad()
@pytest.mark.parametrize("read", [2, 30])
def test_earlier_states_stay_as_they_are(read, calls):
    """Any earlier state can be gone on from, in any order, whatever was written since."""
    model, ids = tiny_model("latte-r-swa++", window=5, sinks=1), token_ids(2, 3 * SPARE, seed=6)
    cache = model(token_ids(2, read)).past_key_values
    plain = cache.fork()
    wanted = decode(model, ids, plain)
    moments = []
    for index, part in enumerate(ids.split(1, dim=1)):
        moments.append(cache.snapshot())
        assert torch.equal(model(part, past_key_values=cache).logits, wanted[:, index : index + 1])
    for index in (0, len(moments) - 1, SPARE, 7, SPARE - 1, SPARE + 1):
        cache.rollback(moments[index])
        other = decode(model, ids[:, :5].flip(1), cache)  # another branch
        cache.rollback(moments[index])
        assert torch.equal(decode(model, ids[:, index:], cache), wanted[:, index:])
        cache.rollback(moments[index])
        assert torch.equal(decode(model, ids[:, :5].flip(1), cache), other)


@torch.no_grad()
def test_a_branch_beside_one_written_token(calls):
    model, ids = tiny_model("latte-r-swa++", window=5), token_ids(1, 4)
    cache = model(ids).past_key_values
    start = cache.snapshot()
    decode(model, ids[:, :1], cache)
    ahead = cache.snapshot()
    wanted = decode(model, ids[:, 1:], cache.fork())
    cache.rollback(start)
    decode(model, ids.flip(1), cache)
    cache.rollback(ahead)
    assert torch.equal(decode(model, ids[:, 1:], cache), wanted)


@torch.no_grad()
def test_one_session_reads_all_tokens_and_a_state_is_copied_when_asked_for(monkeypatch, calls):
    model, ids = tiny_model("latte-r-swa++", window=5), token_ids(1, 2 * SPARE)
    cache = model(ids).past_key_values
    copies, state = [], SessionMemory.state
    monkeypatch.setattr(SessionMemory, "state", lambda memory: copies.append(1) or state(memory))
    sessions = {id(cache.session) for part in ids.split(1, dim=1) if model(part, past_key_values=cache) is not None}
    assert len(sessions - {id(None)}) == 1
    assert not copies
    moment = cache.snapshot()
    assert cache.state is moment[0]
    assert len(copies) == 1
    decode(model, ids, cache)
    assert len(copies) == 1
    cache.rollback(moment)
    assert cache.session is None


@torch.no_grad()
@pytest.mark.parametrize("history", [1, 3, SPARE])
def test_tokens_are_taken_back_one_by_one(history, calls):
    model, ids = tiny_model("latte-r-swa++", window=5, sinks=1), token_ids(2, 3 * SPARE, seed=6)
    cache = model(token_ids(2, 9)).past_key_values
    cache.history = history
    wanted = decode(model, ids, cache.fork())
    decode(model, ids, cache)
    assert not cache.take_back(history + 1)
    for back in (1, history, history, 1):
        assert cache.take_back(back)
        assert cache.length == 9 + ids.shape[1] - back
        assert cache.state.count_B.tolist() == [cache.length] * 2
        assert torch.equal(decode(model, ids[:, -back:], cache), wanted[:, -back:])
    assert cache.take_back(0)
    assert LatteCache().take_back(0)
    assert not LatteCache().take_back(1)


@torch.no_grad()
def test_a_state_does_not_keep_the_model(calls):
    model, ids = tiny_model("latte-r-swa++"), token_ids(1, 3)
    cache = model(ids).past_key_values
    decode(model, ids, cache)
    wanted, gone = decode(model, ids, cache.fork()), weakref.ref(model.lm_head)
    twin = copy.deepcopy(model)
    del model
    gc.collect()
    assert gone() is None
    assert torch.equal(decode(twin, ids, cache), wanted)


def test_decoding_in_inference_mode_leaves_earlier_states_as_they_are(calls):
    model, ids = tiny_model("latte-r-swa++"), token_ids(1, 3)
    with torch.no_grad():
        cache = model(ids).past_key_values
    read = cache.state
    with torch.inference_mode():
        model(ids[:, :1], past_key_values=cache)
        wanted = model(ids[:, :1], past_key_values=cache).logits
    with torch.no_grad():
        written = LatteCache(read, 3)
        decode(model, ids[:, :1], written)
    with torch.inference_mode():
        assert written.nbytes == LatteCache(read, 3).nbytes
    torch.testing.assert_close(decode(model, ids[:, :1], LatteCache(written.state, 4)), wanted)
    for state in (read, written.state):
        model(ids, past_key_values=LatteCache(state, 3)).logits.sum().backward()
    assert len(calls) == 4


def test_two_threads_write_from_one_state(calls):
    model, ids = tiny_model("latte-r-swa++"), token_ids(1, 30)
    with torch.no_grad():
        cache = model(ids).past_key_values
    wanted = decode(model, ids, cache.fork())
    moment = cache.snapshot()

    def written(_: int) -> Tensor:
        own = LatteCache()
        own.rollback(moment)
        return decode(model, ids, own)

    with ThreadPoolExecutor(4) as pool:
        for got in pool.map(written, range(8)):
            assert torch.equal(got, wanted)


def test_a_state_may_have_any_strides(calls):
    model, ids = tiny_model("latte-r-swa++"), token_ids(2, 3)
    with torch.no_grad():
        cache = model(ids).past_key_values
    spread = LatteCache(cache.state.map(lambda tensor: torch.stack([tensor, tensor], -1)[..., 0]), cache.length)
    assert torch.equal(decode(model, ids, spread), decode(model, ids, cache))
    assert len(calls) == 6
