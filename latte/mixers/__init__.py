"""Mechanisms, one file each: ``names()`` lists them, ``build()`` makes one, ``register()`` adds yours."""

from latte.layers.config import MixerConfig
from latte.mixers.base import Mixer, Size, View
from latte.mixers.heads import HeadMixer
from latte.mixers.registry import build, discover, mixer_class, names, register

discover(__name__, __path__)

__all__ = ["HeadMixer", "Mixer", "MixerConfig", "Size", "View", "build", "mixer_class", "names", "register"]
