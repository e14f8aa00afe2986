"""Generation: batches of prompts, beams, caches that are saved, and a state that does not grow."""

from __future__ import annotations

import pytest
import torch

from latte.models import LatteCache
from tests.models.support import VARIANTS, tiny_model, token_ids

PROMPT_LENGTHS = (3, 11, 1, 7)


def left_padded(prompts: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = prompt
        mask[row, longest - len(prompt) :] = 1
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("variant", VARIANTS)
def test_left_padded_prompts_together_give_what_each_gives_alone(variant, beams):
    model = tiny_model(variant)
    prompts = [token_ids(1, length, seed=length)[0] for length in PROMPT_LENGTHS]
    settings = {"max_new_tokens": 20, "num_beams": beams, "do_sample": False, "pad_token_id": 0}
    together = model.generate(**left_padded(prompts), **settings)
    for row, prompt in enumerate(prompts):
        alone = model.generate(input_ids=prompt[None], attention_mask=torch.ones(1, len(prompt)), **settings)
        assert together[row, max(PROMPT_LENGTHS) :].tolist() == alone[0, len(prompt) :].tolist()


def test_greedy_with_a_cache_is_greedy_without():
    model, ids = tiny_model("latte-r-swa++"), token_ids(2, 6)
    found = model.generate(ids, max_new_tokens=15, do_sample=False, pad_token_id=0)
    for _ in range(15):
        ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(found, ids)


def test_sampling_is_decided_by_the_seed():
    model, ids = tiny_model("latte-r-swa++"), token_ids(1, 6)
    texts = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        texts.append(model.generate(ids, max_new_tokens=20, do_sample=True, pad_token_id=0).tolist())
    assert texts[0] == texts[1] != texts[2]


def of_one_size(variant: str) -> bool:
    """Whether a model reads on for ever in a state of one size: learned positions end, and some states grow."""
    model = tiny_model(variant).model
    mixers = [mixer for block in model.layers for mixer in block.mixers]
    return model.embed_positions is None and all(mixer.growth == "constant" for mixer in mixers)


OF_ONE_SIZE = [variant for variant in VARIANTS if of_one_size(variant)]


def test_models_with_learned_positions_or_growing_states_are_known():
    grow = set(VARIANTS) - set(OF_ONE_SIZE)
    assert {"latte", "latte++", "transformer++", "log-linear-mamba2", "mega"} <= grow
    assert {"latte-r-swa++", "gla", "mamba", "deltanet", "mega-chunk"} <= set(OF_ONE_SIZE)


@pytest.mark.parametrize("variant", OF_ONE_SIZE)
def test_state_is_no_larger_after_100000_tokens_than_after_10(variant):
    model = tiny_model(variant)
    cache = LatteCache()
    with torch.no_grad():
        model(token_ids(1, 10), past_key_values=cache, logits_to_keep=1)
        small = cache.nbytes
        for part in token_ids(1, 99_990).split(8192, dim=1):
            logits = model(part, past_key_values=cache, logits_to_keep=1).logits
    assert cache.get_seq_length() == 100_000
    assert cache.nbytes == small
    assert logits.isfinite().all()


def test_cache_saved_forked_selected_and_rolled_back(tmp_path):
    model, ids = tiny_model("latte-r-swa++"), token_ids(3, 12)
    cache = model(ids).past_key_values
    following = token_ids(3, 4, seed=5)
    wanted = model(following, past_key_values=cache.fork()).logits

    cache.save(tmp_path / "state.safetensors")
    loaded = LatteCache.load(tmp_path / "state.safetensors")
    assert torch.equal(model(following, past_key_values=loaded).logits, wanted)

    order = torch.tensor([2, 0, 0])
    chosen = model(following[order], past_key_values=cache.select(order)).logits
    torch.testing.assert_close(chosen, wanted[order])

    before = cache.snapshot()
    model(token_ids(3, 7, seed=6), past_key_values=cache)
    cache.rollback(before)
    assert torch.equal(model(following, past_key_values=cache).logits, wanted)


def test_generation_goes_on_from_a_saved_state(tmp_path):
    model, ids = tiny_model("latte-r-swa++"), token_ids(1, 30)
    wanted = model.generate(ids, max_new_tokens=10, do_sample=False, pad_token_id=0)[0, 30:]
    cache = model(ids[:, :-1]).past_key_values
    cache.save(tmp_path / "state")
    cache = LatteCache.load(tmp_path / "state")
    found = model.generate(ids, past_key_values=cache, max_new_tokens=10, do_sample=False, pad_token_id=0)[0, 30:]
    assert found.tolist() == wanted.tolist()


def test_unread_cache_and_foreign_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match="nothing to save"):
        LatteCache().save(tmp_path / "state")
    (tmp_path / "text").write_text("not a state")
    with pytest.raises(ValueError, match="not a readable safetensors file"):
        LatteCache.load(tmp_path / "text")
    with pytest.raises(FileNotFoundError, match="no state file"):
        LatteCache.load(tmp_path / "nothing")
    layer = tiny_model("latte++")(token_ids(1, 3)).past_key_values.state.layers[0][0]
    layer.save(tmp_path / "layer")
    with pytest.raises(ValueError, match="holds a LatteMixerState, expected a ModelState"):
        LatteCache.load(tmp_path / "layer")
    with pytest.raises(ValueError, match="crop takes back 3 tokens, expected a negative number"):
        LatteCache().crop(3)
    with pytest.raises(ValueError, match="rollback"):
        LatteCache().crop(-3)
