"""Presets: the paper's sizes, and mistakes in names."""

from __future__ import annotations

import pytest
import torch

from latte.models import SIZES, LatteForCausalLM, LatteForSequenceClassification, preset, variants
from latte.models.presets import published, shared_overrides

#: Variants whose parameters the text determines; the recurrent ones it does not (see docs/maths.md).
DETERMINED = ("latte", "latte++", "latte-conv++", "latte-conv-swa++", "transformer++")


def parameters(variant: str, size: str) -> int:
    """Without the table of learned positions, whose length the paper's counts leave out."""
    config = preset(variant, size)
    with torch.device("meta"):
        model = (LatteForSequenceClassification if config.bidirectional else LatteForCausalLM)(config)
    table = model.model.embed_positions
    return model.num_parameters() - (0 if table is None else table.weight.numel())


@pytest.mark.parametrize("variant", DETERMINED)
def test_parameters_are_within_one_percent_of_the_paper(variant):
    assert parameters(variant, "paper-150m") / 1e6 == pytest.approx(published()[variant][1], rel=0.01)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("variant", variants())
def test_every_variant_builds_at_every_size(variant, size):
    assert parameters(variant, size) > 0


def test_a_mechanism_without_a_causal_form_gives_a_bidirectional_model():
    assert preset("efficient").bidirectional
    assert not preset("efficient", bidirectional=False).bidirectional
    assert not preset("s5").bidirectional


@pytest.mark.parametrize("variant", ["efficient", "linformer", "lotformer"])
def test_a_mechanism_that_knows_no_places_of_queries_has_learned_ones(variant):
    assert preset(variant).position_embedding == "learned"


def test_window_and_latents_follow_the_size():
    options = preset("latte-r-swa++", "paper-150m").mixer_options
    assert options == {"feed": "rglru", "window": 128, "num_latents": 128}
    assert preset("latte-r-swa++", "tiny", window=7, hidden_size=64).mixer_options["window"] == 7


def test_settings_for_all_leave_out_what_a_variant_does_not_use():
    """A window of another size gives none to a variant without one."""
    settings = {"window": 9, "num_latents": 16, "hidden_size": 64}
    assert shared_overrides("latte-r-swa++", "tiny", settings) == settings
    assert shared_overrides("latte-r++", "tiny", settings) == {"num_latents": 16, "hidden_size": 64}
    assert shared_overrides("transformer++", "tiny", settings) == {"hidden_size": 64}
    assert shared_overrides("gla", "tiny", {**settings, "gate_rank": 4}) == {"hidden_size": 64, "gate_rank": 4}


def test_mistakes_are_named():
    with pytest.raises(ValueError, match=r"unknown variant 'latte-rswa\+\+' \(did you mean 'latte-r-swa\+\+'"):
        preset("latte-rswa++")
    with pytest.raises(ValueError, match="unknown size 'medium'"):
        preset("latte", "medium")
    with pytest.raises(ValueError, match="unknown override 'hiden_size' \\(did you mean 'hidden_size'"):
        preset("latte", hiden_size=3)
