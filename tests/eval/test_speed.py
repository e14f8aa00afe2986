"""Timing: the weights stay, rounds take turns, and decoding by modules gives the engine's numbers without it."""

import pytest
import torch

from latte import LatteForCausalLM, preset
from latte.data.tokenizer import byte_tokenizer
from latte.decode.off import modules_only
from latte.eval import speed as module
from latte.eval.decode_timing import engine_of
from latte.eval.speed import time_models
from latte.ops.native.library import available
from latte.recipe import TrainRecipe

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
SMALL |= {"vocab_size": 257}


def test_modules_only():
    torch.manual_seed(0)
    model = LatteForCausalLM(preset("latte-r-swa++", num_latents=4, window=4, **SMALL)).eval()
    ids = torch.arange(9)[None]
    with torch.no_grad():
        cache = model(ids[:, :8]).past_key_values
        with modules_only(model):
            output = model(ids[:, 8:], past_key_values=cache)
            assert engine_of(output.past_key_values) == "modules"
        whole = model(ids)
        torch.testing.assert_close(output.logits[:, -1], whole.logits[:, -1], rtol=1e-5, atol=1e-5)
        cache = model(ids[:, :8]).past_key_values
        after = model(ids[:, 8:], past_key_values=cache).past_key_values
        assert engine_of(after) == ("kernel" if available() else "modules")


@pytest.mark.parametrize("micro", [None, 1])
def test_rounds(tmp_path, monkeypatch, micro):
    folders = {}
    for name, positions in (("transformer++", {}), ("latte++", {"num_latents": 4, "max_position_embeddings": 12})):
        torch.manual_seed(0)
        folders[name] = tmp_path / name / "model"
        LatteForCausalLM(preset(name, **SMALL, **positions)).save_pretrained(folders[name])
        byte_tokenizer().save_pretrained(folders[name])
    ids = torch.arange(24).view(2, 12)
    reset = torch.zeros(2, 12, dtype=torch.bool)
    reset[:, 0] = True
    batch = {"input_ids": ids, "labels": ids.masked_fill(reset, -100), "reset": reset}
    turns: list[tuple[str, str]] = []
    for kind in ("step", "write", "write_by_modules"):
        original = getattr(module._Timed, kind)

        def watched(self, *args, kind=kind, original=original):
            turns.append((kind, self.model.config.mixer))
            before = {name: value.clone() for name, value in self.model.state_dict().items()}
            seconds = original(self, *args)
            assert all(torch.equal(value, before[name]) for name, value in self.model.state_dict().items())
            assert all(parameter.grad is None for parameter in self.model.parameters())
            return seconds

        monkeypatch.setattr(module._Timed, kind, watched)
    settings = TrainRecipe(batch_size=2, micro_batch_size=micro)
    speeds = time_models(folders, batch, settings, context=20, tokens=3, rounds=2)
    assert turns == [
        (kind, name) for kind in ("step", "write", "write_by_modules") for name in ("softmax", "latte") * 3
    ]
    assert list(speeds) == list(folders)
    for speed in speeds.values():
        assert min(speed.train_tokens_per_second, speed.decode_tokens_per_second, speed.module_tokens_per_second) > 0
        assert speed.decode_engine in ("kernel", "modules")
