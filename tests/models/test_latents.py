"""Figures of the latents: what they are for even, dead and equal latents, and in the metrics of a run."""

import math

import pytest
import torch

from latte.models import LatteForCausalLM, LatteForSequenceClassification, preset
from latte.models.latents import latent_metrics, layer_latents

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 31}


def test_even_latents_that_read_different_tokens():
    keys = 50 * torch.eye(4).double()[None, :, None, :]  # token s belongs to latent s
    figures = layer_latents(torch.full((1, 4), 0.2).double(), keys)
    assert figures.entropy == pytest.approx(1)
    assert figures.dead == 0
    assert figures.overlap == pytest.approx(0, abs=1e-9)


def test_one_latent_does_everything_and_all_read_alike():
    figures = layer_latents(
        torch.tensor([[1.0, 0, 0, 0]]).double(), torch.randn(2, 5, 1, 1).expand(2, 5, 1, 4).double()
    )
    assert figures.entropy == pytest.approx(0)
    assert figures.dead == 0.75
    assert figures.overlap == pytest.approx(1)


def test_half_of_the_latents_are_used():
    figures = layer_latents(torch.tensor([[0.5, 0.5, 0, 0]]).double(), torch.zeros(1, 3, 1, 4).double())
    assert figures.entropy == pytest.approx(math.log(2) / math.log(4))
    assert figures.dead == 0.5


@pytest.mark.parametrize("variant", ["latte", "latte-r-swa++"])
def test_every_layer_has_figures_and_padding_changes_nothing(variant):
    torch.manual_seed(0)
    options = {"num_latents": 4, "max_position_embeddings": 16, **({"window": 3} if "swa" in variant else {})}
    model = LatteForSequenceClassification(preset(variant, "tiny", **SMALL, **options, bidirectional=True)).eval()
    ids = torch.randint(0, 31, (1, 9))
    alone = latent_metrics(model, {"input_ids": ids, "labels": torch.tensor([1])})
    assert {*alone} == {f"latents_{name}_{layer}" for name in ("entropy", "dead", "overlap") for layer in (0, 1)}
    assert all(0 <= value <= 1 + 1e-9 for value in alone.values())
    padded = torch.nn.functional.pad(ids, (0, 4))
    mask = torch.nn.functional.pad(torch.ones_like(ids), (0, 4))
    assert latent_metrics(model, {"input_ids": padded, "attention_mask": mask}) == pytest.approx(alone, abs=1e-5)


def test_models_without_latents_have_none():
    model = LatteForCausalLM(preset("transformer++", "tiny", **SMALL))
    assert latent_metrics(model, {"input_ids": torch.zeros(1, 4, dtype=torch.long)}) == {}
