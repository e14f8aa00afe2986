"""Weights of few bits: blocks against the gguf package, and models of them through the engine and through modules."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
import torch

from latte.errors import UserError
from latte.extend import convert
from latte.layers.quantized import Quantized, QuantizedEmbedding, QuantizedLinear
from latte.loading import load_any
from latte.models import LatteCache, LatteForCausalLM
from latte.ops import native
from latte.ops.blocks import FORMATS, block_linear, pack, unpack
from tests.decode.test_engine import SERVED
from tests.extend.families import FAMILIES, small_model
from tests.extend.test_convert import WAYS, opened
from tests.models.support import both_ways, decode, tiny_model, token_ids

gguf = pytest.importorskip("gguf")
needs_kernels = pytest.mark.skipif(not native.available(), reason=native.describe())
#: Where the halves are in a block of random bytes, which must be numbers.
HALVES = {"Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q4_K": (0, 2), "Q6_K": (208,)}


@pytest.mark.parametrize("kind", FORMATS)
def test_blocks_are_those_of_gguf(kind, each_backend):
    known, random = FORMATS[kind], np.random.default_rng(0)
    raw = random.integers(0, 256, (7, 3 * known.bytes), dtype=np.uint8)
    parts = raw.reshape(-1, known.bytes)
    for place in HALVES[kind]:
        parts[:, place : place + 2] = random.normal(size=(len(parts), 1)).astype(np.float16).view(np.uint8)
    wanted = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])
    got = unpack(torch.from_numpy(raw), kind, 3 * known.numbers)
    # A product and a sum, or one fused operation.
    np.testing.assert_allclose(got.numpy(), wanted, rtol=1e-6, atol=1e-6 * np.abs(wanted).max())


@torch.no_grad()
@pytest.mark.parametrize("kind", FORMATS)
def test_products_of_few_and_many_rows(kind, each_backend):
    """What the blocks' floats give, whatever the number of rows; a row gives the same bits among others."""
    known = FORMATS[kind]
    raw = np.random.default_rng(0).integers(0, 256, (45, 2 * known.bytes), dtype=np.uint8)
    parts = raw.reshape(-1, known.bytes)
    for place in HALVES[kind]:
        parts[:, place : place + 2] = np.float16(0.01).reshape(1).view(np.uint8)
    blocks, bias, x = torch.from_numpy(raw), torch.randn(45), torch.randn(2, 20, 2 * known.numbers)
    floats = unpack(blocks, kind, 2 * known.numbers)
    for some in (x, x[:1, :1], x[:1, :5]):
        wanted = torch.nn.functional.linear(some.double(), floats.double(), bias.double())
        got = block_linear(some, blocks, kind, bias)
        torch.testing.assert_close(got, wanted.float(), atol=1e-5 * float(wanted.abs().max()), rtol=0)
    if each_backend == "native":
        assert torch.equal(block_linear(x[:1, :7], blocks, kind), block_linear(x, blocks, kind)[:1, :7])


@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 6, 12])  # of the matrix: read alone, and four side by side
@pytest.mark.parametrize("kind", FORMATS)
def test_products_with_wide_rows(kind, rows, each_backend):
    """Rows whose scales do not fit in the kernel's memory at once; a row of x gives the same bits among others."""
    known = FORMATS[kind]
    count = 9000 // known.numbers
    raw = np.random.default_rng(0).integers(0, 256, (rows, count * known.bytes), dtype=np.uint8)
    parts = raw.reshape(-1, known.bytes)
    for place in HALVES[kind]:  # another scale for each block
        parts[:, place : place + 2] = np.linspace(0.01, 0.1, len(parts), dtype=np.float16)[:, None].view(np.uint8)
    blocks, x = torch.from_numpy(raw), torch.randn(3, count * known.numbers)
    wanted = x.double() @ unpack(blocks, kind, x.shape[1]).double().T
    got = block_linear(x, blocks, kind)
    torch.testing.assert_close(got, wanted.float(), atol=1e-5 * float(wanted.abs().max()), rtol=0)
    if each_backend == "native":
        for row in range(3):
            assert torch.equal(block_linear(x[row : row + 1], blocks, kind), got[row : row + 1])


def test_packing_is_as_exact_as_that_of_gguf():
    torch.manual_seed(0)
    weight = torch.randn(33, 96) * torch.rand(33, 1)
    weight[3] = 0
    for kind in ("Q8_0", "Q4_1"):
        other = gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType[kind])
        theirs = unpack(torch.from_numpy(other), kind, 96)
        ours = unpack(pack(weight, kind), kind, 96)
        assert (ours - weight).square().sum() <= 1.0001 * (theirs - weight).square().sum()
        assert not ours[3].any()


@pytest.mark.parametrize(
    ("weight", "kind", "message"),
    [
        (torch.zeros(2, 33), "Q8_0", "33 columns, expected a multiple of 32"),
        (torch.zeros(2, 256), "Q4_K", "can't be written as Q4_K"),
        (torch.full((2, 32), float("nan")), "Q4_1", "NaN or infinite"),
    ],
)
def test_what_can_not_be_packed(weight, kind, message):
    with pytest.raises(ValueError, match=message):
        pack(weight, kind)


def quantized(variant: str, weights: str = "int4", **overrides) -> LatteForCausalLM:
    return tiny_model(variant, intermediate_size=96, **overrides).quantize(weights)


@needs_kernels
@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("variant", ["latte-r-swa++", "latte-conv++", "transformer++", "latte"])
def test_the_engine_reads_blocks_as_modules_do(variant, weights, monkeypatch, calls):
    model = quantized(variant, weights, max_position_embeddings=300)
    assert model.decode_refusal() is None
    with torch.no_grad():
        cache = model(token_ids(3, 9)).past_key_values
    got, wanted, *_ = both_ways(model, token_ids(3, 200, seed=4), cache, monkeypatch)
    assert len(calls) == 200
    torch.testing.assert_close(got, wanted, atol=1e-5 * float(wanted.abs().max()), rtol=0)


@needs_kernels
@pytest.mark.parametrize("variant", SERVED)
def test_every_mixer_reads_blocks(variant, monkeypatch, calls):
    """Against modules in float64: those in float32 are as far from it as the engine, or further."""
    model = quantized(variant, "int8", max_position_embeddings=60)
    assert model.decode_refusal() is None
    exact = tiny_model(variant, intermediate_size=96, max_position_embeddings=60)
    with torch.no_grad():
        for name, part in model.named_modules():
            if isinstance(part, Quantized):
                exact.get_submodule(name).weight.copy_(part.weight)
        exact.double()
        cache, expected = (each(token_ids(2, 9)).past_key_values for each in (model, exact))
    got = decode(model, token_ids(2, 20, seed=4), cache)
    assert len(calls) == 20
    monkeypatch.setenv("LATTE_BACKEND", "torch")
    wanted = decode(exact, token_ids(2, 20, seed=4), expected)
    torch.testing.assert_close(got.double(), wanted, atol=1e-5 * float(wanted.abs().max()), rtol=0)


@needs_kernels
@torch.no_grad()
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_row_gives_the_same_bits_whatever_the_batch(weights, calls):
    model, ids = quantized("latte-r-swa++", weights), token_ids(5, 9, seed=4)
    cache = model(token_ids(5, 8)).past_key_values
    alone = [cache.select(torch.tensor([row])) for row in range(5)]
    together = decode(model, ids, cache.fork())
    assert torch.equal(model.decode_each(ids, LatteCache(cache.state, 8)), together)
    for row in range(5):
        assert torch.equal(decode(model, ids[row : row + 1], alone[row]), together[row : row + 1])


@needs_kernels
@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_extended_families(family, monkeypatch, calls):
    model = opened(convert(small_model(family, intermediate_size=64), WAYS[0])).eval()
    before = copy.deepcopy(model)
    model.quantize("int8")
    ids = torch.randint(3, 61, (1, 20))
    near, plain = model(ids).logits, before(ids).logits
    assert (near - plain).norm() < 0.1 * plain.norm()
    got = model.generate(ids, max_new_tokens=20, do_sample=False, eos_token_id=None)
    assert (model.decode_refusal() is None) == (model.family.shape is not None)
    assert len(calls) == (0 if model.family.shape is None else 19)
    monkeypatch.setenv("LATTE_BACKEND", "torch")
    assert torch.equal(model.generate(ids, max_new_tokens=20, do_sample=False, eos_token_id=None), got)


@torch.no_grad()
@pytest.mark.parametrize("tied", [True, False])
def test_saved_and_loaded(tied, tmp_path):
    model, ids = quantized("latte-r-swa++", tie_word_embeddings=tied), token_ids(2, 9)
    model.save_pretrained(tmp_path)
    again = LatteForCausalLM.from_pretrained(tmp_path).eval()
    assert isinstance(again.lm_head, QuantizedLinear)
    assert isinstance(again.model.embed_tokens, QuantizedEmbedding)
    assert (again.lm_head.blocks is again.model.embed_tokens.blocks) == tied
    assert torch.equal(again(ids).logits, model(ids).logits)
    twin = copy.deepcopy(again)
    assert torch.equal(
        decode(twin, ids[:, :3], twin(ids).past_key_values), decode(again, ids[:, :3], again(ids).past_key_values)
    )
    assert (tmp_path / "model.safetensors").stat().st_size < 0.4 * sum(
        4 * p.numel() for p in tiny_model("latte-r-swa++").parameters()
    )


@torch.no_grad()
def test_extended_models_are_saved_and_loaded(tmp_path):
    from latte.extend import LatteExtendedForCausalLM

    model = opened(convert(small_model("gemma2", intermediate_size=64), WAYS[0])).eval().quantize("int8")
    model.save_pretrained(tmp_path)
    again = LatteExtendedForCausalLM.from_pretrained(tmp_path).eval()
    ids = torch.randint(3, 61, (1, 20))
    assert torch.equal(again(ids).logits, model(ids).logits)


def test_mistakes(tmp_path):
    model = tiny_model("latte-r-swa++")
    with pytest.raises(ValueError, match="weights is 'int3', expected one of int8, int4"):
        model.quantize("int3")
    model.quantize("int8")
    with pytest.raises(ValueError, match="quantised already"):
        model.quantize("int4")
    with pytest.raises(ValueError, match=r"'model\.layers\.0\.nothing' of 'Q8_0', expected modules"):
        LatteForCausalLM(
            type(model.config)(**{**model.config.to_dict(), "quantized": {"model.layers.0.nothing": "Q8_0"}})
        )
    with pytest.raises(ValueError, match="expected \\(4, 34\\) of bytes"):
        QuantizedLinear(32, 4, "Q8_0", torch.zeros(4, 33, dtype=torch.uint8))
    with pytest.raises(ValueError, match="weights in blocks of Q8_0 can't be set, expected new blocks"):
        model.lm_head.weight = torch.nn.Parameter(torch.zeros(64, 32))
    with pytest.raises(RuntimeError, match="blocks"):
        model.load_state_dict(tiny_model("latte-r-swa++").state_dict())


@needs_kernels
@torch.no_grad()
def test_other_blocks_count_at_the_next_token(monkeypatch, calls):
    model, ids = quantized("latte-r-swa++"), token_ids(1, 3)
    cache = model(ids).past_key_values
    before = decode(model, ids, cache.fork())
    layer = model.model.layers[1].mlp.up_proj
    layer.blocks = layer.blocks.flip(0).contiguous()
    got, wanted, *_ = both_ways(model, ids, cache, monkeypatch)
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(got, before, atol=1e-3)
    assert model.double().decode_refusal() is not None


def test_a_folder_is_quantised_as_it_is_loaded(tmp_path):
    from latte.data.tokenizer import byte_tokenizer

    tiny_model("latte-r-swa++", vocab_size=257).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    model, _ = load_any(str(tmp_path / "model"), weights="int8")
    assert isinstance(model.lm_head, QuantizedLinear)
    model.save_pretrained(tmp_path / "packed")
    byte_tokenizer().save_pretrained(tmp_path / "packed")
    again, _ = load_any(str(tmp_path / "packed"))
    assert torch.equal(again.lm_head.blocks, model.lm_head.blocks)
    with pytest.raises(UserError, match="quantised already"):
        load_any(str(tmp_path / "packed"), weights="int4")
    # As code reads it that knows nothing of blocks.
    config = json.loads((tmp_path / "packed" / "config.json").read_text())
    del config["quantized"]
    (tmp_path / "packed" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"lacks \d+ of the weights of LatteForCausalLM, .* it is cut off"):
        load_any(str(tmp_path / "packed"))
