"""Names, options and sizes that make no sense are refused with what was given and what is expected."""

import re

import pytest
import torch

from latte.mixers import Mixer, MixerConfig, build, mixer_class, names, register


def config(**fields):
    options = fields.pop("options", {})
    return MixerConfig(**{"hidden_size": 8, "num_heads": 2, **fields}, options=options)


def refused(*parts):
    return pytest.raises(ValueError, match=".*".join(re.escape(part) for part in parts))


def test_the_six_mechanisms_are_registered():
    assert {"gla", "latte", "linear", "r-swa", "retnet", "softmax"} <= set(names())
    assert all(mixer_class(name).name == name for name in names())


def test_an_unknown_mixer_is_refused_with_the_nearest_name():
    with refused("unknown mixer 'late' (did you mean 'latte'?)", "expected one of", "gla", "softmax"):
        build("late", config())
    with refused("unknown mixer 'xyz', expected one of"):
        build("xyz", config())


def test_a_name_is_registered_once():
    with refused("mixer 'latte' is registered already, by latte.mixers.latte.LatteMixer"):
        register("latte")(type("Other", (Mixer,), {}))
    assert mixer_class("latte").__name__ == "LatteMixer"


def test_an_unknown_option_is_refused_with_the_nearest_name():
    with refused("mixer 'latte' has no option 'windows' (did you mean 'window'?)", "expected one of", "num_latents"):
        build("latte", config(options={"windows": 3}))
    with refused("mixer 'gla' has no option 'zzz', expected one of gate_rank"):
        build("gla", config(options={"zzz": 1}))


@pytest.mark.parametrize(
    ("name", "option", "value", "expected"),
    [
        ("latte", "num_latents", "8", "expected int"),
        ("latte", "num_latents", 8.0, "expected int"),
        ("latte", "num_latents", True, "expected int"),
        ("latte", "num_latents", None, "expected int"),
        ("latte", "feed", "lstm", "expected one of 'x', 'conv', 'rglru'"),
        ("latte", "window", 2.5, "expected int or None"),
        ("latte", "softcap", "2", "expected float or None"),
        ("latte", "rope", 1, "expected bool"),
        ("linear", "floor", True, "expected float"),
        ("r-swa", "radius", "wide", "expected one of 'base', 'power'"),
    ],
)
def test_an_option_of_another_type_is_refused(name, option, value, expected):
    with refused(f"mixer {name!r}: option {option} is {value!r}, {expected}"):
        build(name, config(options={option: value}))


def test_whole_numbers_serve_as_floats():
    assert build("latte", config(options={"num_latents": 4, "window": 2, "softcap": 3})).options.softcap == 3


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": 9}, "hidden_size is 9, expected a positive multiple of num_heads (2)"),
        ({"hidden_size": 0}, "hidden_size is 0, expected at least 1"),
        ({"num_heads": 0}, "num_heads is 0, expected at least 1"),
        ({"num_layers": 0}, "num_layers is 0, expected at least 1"),
        ({"num_key_value_heads": 3}, "num_heads is 2, expected a positive multiple of num_key_value_heads (3)"),
        ({"num_key_value_heads": 0}, "num_heads is 2, expected a positive multiple of num_key_value_heads (0)"),
    ],
)
def test_widths_that_do_not_divide_are_refused(fields, message):
    with refused(message):
        config(**fields)


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("latte", {"options": {"num_latents": 5}}, "num_latents is 5, expected a positive multiple of num_heads (2)"),
        ("latte", {"options": {"num_latents": 0}}, "num_latents is 0, expected a positive multiple of num_heads (2)"),
        ("latte", {"options": {"num_latents": 4, "window": -1}}, "window is -1"),
        ("latte", {"options": {"num_latents": 4, "window": 2, "sinks": -1}}, "sinks is -1"),
        ("latte", {"bidirectional": True, "options": {"num_latents": 4, "window": 2, "sinks": 1}}, "sinks is 1"),
        ("latte", {"options": {"num_latents": 4, "feed": "conv", "conv_size": 0}}, "conv_size is 0"),
        ("latte", {"hidden_size": 6, "options": {"num_latents": 4, "window": 2}}, "head width is 3"),
        ("softmax", {"hidden_size": 6}, "head width is 3, expected a positive multiple of channels in a pair (2)"),
        ("retnet", {"hidden_size": 6}, "head width is 3, expected a positive multiple of channels in a pair (2)"),
        ("gla", {"options": {"key_fraction": 0.6}}, "key width"),
        ("gla", {"hidden_size": 6}, "key width is 3, expected a positive multiple of num_heads (2)"),
        ("linear", {"options": {"floor": 0.0}}, "floor is 0.0, expected a positive number"),
        ("gla", {"bidirectional": True}, "mixer 'gla' is causal only, but bidirectional was asked for"),
        ("retnet", {"bidirectional": True}, "mixer 'retnet' is causal only, but bidirectional was asked for"),
    ],
)
def test_sizes_that_do_not_fit_the_mechanism_are_refused(name, fields, message):
    if name == "gla" and "options" in fields:
        fields = {**fields, "hidden_size": 10, "num_heads": 5}  # 0.6 of 10 is 6, over 5 heads
    with refused(message):
        build(name, config(**fields))


def test_a_mechanism_without_weights_shows_none():
    class Opaque(Mixer):
        name = "opaque"

    assert Opaque(config()).look(torch.zeros(1, 2, 8)) == {}
