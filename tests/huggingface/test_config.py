"""Configurations: options where a user writes them, no limit where there is none, nothing misspelt."""

from __future__ import annotations

import pytest
from transformers import AutoConfig

from latte.extend import LatteExtendedConfig
from latte.models import LatteConfig, preset
from tests.extend.families import SMALL


def test_options_of_the_mixer_may_stand_among_the_fields():
    config = LatteConfig(window=8, feed="rglru", num_latents=16)
    assert config.mixer_options == {"window": 8, "feed": "rglru", "num_latents": 16}
    assert not hasattr(config, "num_latents")
    assert config.sublayers(0)[0].config.options["window"] == 8


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"mixer": "gla", "num_latents": 16}, "'num_latents' is an option of mixer 'latte', but the mixer is 'gla'"),
        ({"window": 8, "mixer_options": {"window": 4}}, "window is 8, but mixer_options has 4"),
        ({"hiden_size": 64}, "no field 'hiden_size' .did you mean 'hidden_size'"),
        ({"window": "eight"}, "option window is 'eight', expected int"),
    ],
)
def test_options_that_can_not_be_honoured_are_refused(given, sentence):
    with pytest.raises(ValueError, match=sentence):
        LatteConfig(**given)


def test_mixers_of_layers_may_be_names():
    config = LatteConfig(num_hidden_layers=2, layer_mixers=["latte", {"mixer": "gla"}])
    assert config.mixer_names() == ["latte", "gla"]
    assert LatteConfig.from_dict(config.to_dict()).mixer_names() == ["latte", "gla"]


def test_what_is_unknown_to_us_is_kept_as_transformers_does():
    assert LatteConfig(my_own_note="kept").my_own_note == "kept"


def test_a_model_without_learned_positions_has_no_limit(tmp_path):
    """As lm-eval asks: the first of these attributes that is there, cut to its number."""
    config = preset("latte-r-swa++", "tiny", max_position_embeddings=256)
    config.save_pretrained(tmp_path)
    original = {"model_type": "llama", **SMALL}
    extended = LatteExtendedConfig(original=original, options={"window": 4, "num_latents": 2})
    for unlimited in (config, AutoConfig.from_pretrained(tmp_path), extended):
        found = [getattr(unlimited, name, None) for name in ("n_positions", "max_position_embeddings", "n_ctx")]
        assert min(length for length in found if length is not None) >= 1 << 30
    assert preset("latte", "tiny").max_position_embeddings == 1024
    assert preset("latte", "tiny", max_position_embeddings=256).max_position_embeddings == 256
