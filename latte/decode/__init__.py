"""Decoding: one token of a whole model in one native call. Importing this makes it serve the models.

Models and mixers are plain code; they reach this room by two hooks: ``latte.models.engine.use_engine`` and
``latte.mixers.base.TOKEN_STEPS``.
"""

from latte.decode.layer_step import latte_step
from latte.decode.session import TokenEngine
from latte.mixers.base import TOKEN_STEPS
from latte.mixers.latte import LatteMixer
from latte.models.engine import use_engine

TOKEN_STEPS[LatteMixer] = latte_step
use_engine(TokenEngine)

__all__ = ["TokenEngine", "latte_step"]
