"""Mixers: one file per mechanism, registered by name, built by :func:`build`."""

from latte.mixers import gla, latte, linear, recurrent_window, retnet, softmax  # noqa: F401  (each registers itself)
from latte.mixers.base import Mixer, MixerConfig, Weights, build, mixer_class, names, register

__all__ = ["Mixer", "MixerConfig", "Weights", "build", "mixer_class", "names", "register"]
