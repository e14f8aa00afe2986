"""The inspection's numbers are the model's, and survive the way into a page."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from latte.cli.main import main
from latte.errors import UserError
from latte.extend import convert
from latte.mixers.gla import GLAMixer
from latte.models import LatteConfig, LatteForCausalLM, LatteForSequenceClassification
from latte.report import inspect_text, render_inspection
from latte.report.encode import PARTS, encode_inspection, pack, shares, unpack
from latte.report.inspection import Inspection
from tests.extend.families import small_model
from tests.report.support import TEXT, config, model, saved, tokenizer

VARIANTS = ("latte", "latte++", "latte-conv-swa++", "latte-r-swa++", "r-swa++", "transformer++")


def mixer_input(network: Any, ids: list[int], layer: int) -> torch.Tensor:
    hidden = network.model(torch.tensor([ids]), output_hidden_states=True, use_cache=False).hidden_states[layer]
    return network.model.layers[layer].mixer_norm(hidden)


@pytest.mark.parametrize("variant", VARIANTS)
def test_weights_are_the_models_own(variant: str) -> None:
    network, words = model(variant), tokenizer()
    inspection = inspect_text(network, words, TEXT)
    ids = [words.bos_token_id, *words(TEXT)["input_ids"]]
    assert len(inspection.tokens) == len(ids)
    assert "".join(inspection.tokens[1:]).replace("�", "") == TEXT.replace("ï", "")
    with torch.no_grad():
        for index, layer in enumerate(inspection.layers):
            expected = network.model.layers[index].mixer.look(mixer_input(network, ids, index))
            assert layer.weights_HTS is not None
            np.testing.assert_array_equal(layer.weights_HTS, expected["weights"].values[0].numpy())
            np.testing.assert_allclose(layer.weights_HTS.sum(-1), 1, atol=1e-5)
            if "latents" in expected:
                np.testing.assert_array_equal(layer.slots_THM, expected["latents"].values[0].numpy())
            else:
                assert layer.slots_THM is None


@pytest.mark.parametrize("variant", ["latte++", "latte-conv-swa++", "latte-r-swa++"])
def test_window_and_latents_add_up(variant: str) -> None:
    inspection = inspect_text(model(variant), tokenizer(), TEXT)
    T = len(inspection.tokens)
    for layer in inspection.layers:
        assert layer.slots_THM is not None
        assert layer.weights_HTS is not None
        first = 0 if layer.window_HTS is None else 1
        for head in range(layer.heads):
            for t in (0, 1, T // 2, T - 1):
                p_M = layer.slots_THM[t, head]
                total = sum(p_M[first + l] * layer.reads(head, l, t) for l in range(len(p_M) - first))
                if layer.window_HTS is not None:
                    total = total + p_M[0] * layer.window_HTS[head, t]
                np.testing.assert_allclose(total, layer.weights_HTS[head, t], atol=2e-6)


def test_surprise_is_the_loss_of_each_token() -> None:
    network, words = model(), tokenizer()
    inspection = inspect_text(network, words, TEXT)
    ids = torch.tensor([[words.bos_token_id, *words(TEXT)["input_ids"]]])
    with torch.no_grad():
        loss = network(ids, labels=ids).loss
    assert inspection.surprise is not None
    assert inspection.surprise[1:].mean() * np.log(2) == pytest.approx(float(loss), rel=1e-5)


def test_bidirectional_layers_see_the_future() -> None:
    torch.manual_seed(0)
    network = LatteForSequenceClassification(config(bidirectional=True, num_labels=2))
    inspection = inspect_text(network, tokenizer(), TEXT)
    layer = inspection.layers[0]
    assert inspection.surprise is None
    assert layer.weights_HTS is not None
    assert layer.slots_THM is not None
    assert layer.window_HTS is not None
    assert layer.weights_HTS[0, 0, -1] > 0
    total = sum(layer.slots_THM[3, 0, l + 1] * layer.reads(0, l, 3) for l in range(4))
    np.testing.assert_allclose(
        total + layer.slots_THM[3, 0, 0] * layer.window_HTS[0, 3], layer.weights_HTS[0, 3], atol=2e-6
    )


def test_long_texts_are_cut_and_it_is_said() -> None:
    inspection = inspect_text(model(), tokenizer(), TEXT * 20, max_tokens=40)
    assert len(inspection.tokens) == 40
    assert inspection.dropped > 100
    assert f"{inspection.dropped} more tokens are not shown" in render_inspection(inspection)


def opaque(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ``gla`` a mechanism that shows nothing."""
    monkeypatch.setattr(GLAMixer, "look", lambda *given: {})


def test_mixers_without_weights_say_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    opaque(monkeypatch)
    small = LatteConfig(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, mixer="gla"
    )
    network, words = LatteForCausalLM(small), tokenizer()
    inspection = inspect_text(network, words, TEXT)
    assert inspection.reason is not None
    assert "gla are not weighted sums of values" in inspection.reason
    network.save_pretrained(tmp_path / "gla")
    words.save_pretrained(tmp_path / "gla")
    assert main(["inspect", str(tmp_path / "gla"), "--text", "def f", "--out", str(tmp_path / "page.html")]) != 0
    assert "no weights to show" in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()


def test_hybrids_show_the_layers_that_have_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    opaque(monkeypatch)
    mixers = [{"mixer": "gla"}, {"mixer": "linear"}]
    inspection = inspect_text(model("transformer++", layer_mixers=mixers), tokenizer(), TEXT)
    assert inspection.reason is None
    assert [layer.heads for layer in inspection.layers] == [0, 4]


def test_weights_of_any_sign_are_shown_by_their_size() -> None:
    """GLA is linear in the values but not normalised: the page shows each token's share of the absolute weights."""
    inspection = inspect_text(model("gla"), tokenizer(), TEXT)
    assert inspection.reason is None
    encoded = encode_inspection(inspection)
    for layer, shown in zip(inspection.layers, encoded["layers"], strict=True):
        assert layer.weights_HTS is not None
        assert not layer.normalised
        assert (layer.weights_HTS < 0).any()
        size = np.abs(layer.weights_HTS)
        np.testing.assert_allclose(unpack(shown["weights"]) / PARTS, size / size.sum(-1, keepdims=True), atol=1e-4)
        assert shown["signed"]


def test_extended_models_are_inspected_like_our_own() -> None:
    words = tokenizer()
    pretrained = small_model("llama")
    pretrained.resize_token_embeddings(len(words), mean_resizing=False)
    network = convert(pretrained, {"window": 8, "sinks": 2, "num_latents": 4})
    inspection = inspect_text(network, words, TEXT)
    assert inspection.reason is None
    assert inspection.surprise is not None
    assert len(inspection.layers) == len(network.mixers)
    for layer in inspection.layers:
        assert layer.weights_HTS is not None
        assert layer.window_HTS is not None
        assert layer.slots_THM is not None
        np.testing.assert_allclose(layer.weights_HTS.sum(-1), 1, atol=1e-5)
    assert "extended" in render_inspection(inspection)


def test_shares_keep_their_sum_and_their_values() -> None:
    generator = np.random.default_rng(0)
    rows = generator.dirichlet(np.full(300, 0.05), size=(3, 40))
    counts = shares(rows)
    assert (counts.astype(np.int64).sum(-1) == PARTS).all()
    assert np.abs(counts / PARTS - rows).max() < 1.01 / PARTS
    np.testing.assert_array_equal(unpack(pack(counts)), counts)


def page_weights(layer: dict[str, Any], head: int, t: int) -> np.ndarray:
    """What the page computes from the numbers it carries."""
    if "weights" in layer:
        return unpack(layer["weights"])[head, t] / PARTS
    slots, keys = unpack(layer["slots"])[head, t] / PARTS, unpack(layer["keys"])[head].astype(float)
    first = 1 if "window" in layer else 0
    total = slots[0] * unpack(layer["window"])[head, t] / PARTS if first else np.zeros(keys.shape[-1])
    for latent, step in enumerate(layer["steps"][head]):
        logits = keys[latent, : t + 1] * step
        reads = np.exp(logits - logits.max())
        total[: t + 1] += slots[latent + first] * reads / reads.sum()
    return total


@pytest.mark.parametrize("variant", ["latte++", "latte-r-swa++", "transformer++"])
def test_a_page_carries_the_models_numbers(variant: str) -> None:
    inspection = inspect_text(model(variant), tokenizer(), TEXT, title="</script><b>")
    page = render_inspection(inspection)
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    data = json.loads(found[1])
    assert data["tokens"] == list(inspection.tokens)
    assert data == json.loads(json.dumps(encode_inspection(inspection)))
    for index, layer in enumerate(inspection.layers):
        assert layer.weights_HTS is not None
        for head in range(layer.heads):
            for t in (0, 7, len(inspection.tokens) - 1):
                shown = page_weights(data["layers"][index], head, t)
                assert shown.sum() == pytest.approx(1, abs=1e-9)
                np.testing.assert_allclose(shown, layer.weights_HTS[head, t], atol=1e-3)


def test_a_page_stands_alone() -> None:
    page = render_inspection(inspect_text(model(), tokenizer(), TEXT))
    assert "http://" not in page
    assert "https://" not in page
    assert re.findall(r'(?:src|href)="([^"]*)"', page) == ["data:,"]
    assert not re.search(r"@import|url\((?!#)", page)
    assert "{{" not in page


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--text or --file"),
        (["--text", "a", "--file", "b"], "--text or --file"),
        (["--text", ""], "the text is empty"),
        (["--file", "nowhere.txt"], "nowhere.txt can't be read: No such file"),
        (["--text", "a", "--tokens", "1"], "expected 2 to 1024"),
    ],
)
def test_wrong_calls_are_told_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    saved(tmp_path / "m")
    capsys.readouterr()  # the progress bar of saving
    assert main(["inspect", str(tmp_path / "m"), *arguments, "--out", str(tmp_path / "page.html")]) != 0
    told = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == 1


def test_folders_without_a_model_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tmp_path / "none"), "--text", "a"]) != 0
    assert "there is no folder" in capsys.readouterr().err
    assert main(["inspect", str(tmp_path), "--text", "a"]) != 0
    assert "there is no model in" in capsys.readouterr().err
    folder = saved(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    assert main(["inspect", str(folder), "--text", "a"]) != 0
    assert "has no weights" in capsys.readouterr().err


def test_the_command_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path / "run" / "model")
    (tmp_path / "text.py").write_text(TEXT)
    out = tmp_path / "pages" / "page.html"
    assert main(["inspect", str(tmp_path / "run"), "--file", str(tmp_path / "text.py"), "--out", str(out)]) == 0
    assert "wrote" in capsys.readouterr().out
    assert out.read_text().startswith("<!doctype html>")


def test_other_models_are_told_apart() -> None:
    class Other(torch.nn.Module):
        pass

    with pytest.raises(UserError, match="not made of mixers"):
        inspect_text(Other(), tokenizer(), TEXT)
    assert Inspection((), (), None).reason is not None
