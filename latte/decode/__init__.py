"""Decoding: one token of a whole model in one native call. Importing this makes it serve the models.

A model's program is a list of stages; a session, owned by a cache, runs it on states in memory of its own. Models reach
this room by one hook, ``latte.models.engine.use_engine``.
"""

from latte.decode.engine import DecodeEngine
from latte.decode.session import DecodeSession
from latte.models.engine import use_engine

use_engine(DecodeEngine)

__all__ = ["DecodeEngine", "DecodeSession"]
