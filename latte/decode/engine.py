"""The decode engine of one model: which program serves it, or why none does."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from latte.decode.compile import compile_model
from latte.decode.program import SPARE, Program
from latte.decode.session import DecodeSession
from latte.layers.hooks import globally_hooked
from latte.models.cache import LatteCache
from latte.models.engine import Anatomy, Unfit
from latte.modes import values_hidden
from latte.ops.registry import kernels_serve

#: Rows times tokens of one call: for more, products that pack the weights first are faster.
MOST_ROWS = 256
logger = logging.getLogger("latte.decode")


class DecodeEngine:
    """A model for inputs of one token a row: its layers and last norm, or all of it with embedding and head."""

    def __init__(self, anatomy: Anatomy) -> None:
        self._anatomy = anatomy
        self._programs: dict[bool, Program] = {}  # with a head and without
        self._refused: dict[bool, tuple[str, Callable[[], bool]]] = {}  # why, and whether it is still so
        self._said: set[str] = set()

    def __getstate__(self) -> dict[str, Any]:
        # A copy has weights of its own.
        return DecodeEngine(self._anatomy).__dict__

    def hidden(self, body: nn.Module, x_B1D: Tensor, cache: LatteCache) -> Tensor | None:
        """Embedded tokens through ``body.layers`` and ``body.norm``, the cache one token further.

        None where the modules have to be called.

        Raises:
            ValueError: a cache of another model or batch.
        """
        if x_B1D.shape[1] != 1 or not _serves(x_B1D, cache):
            return None
        program = self._program(body, None)
        if program is None or program.layout.dtype != x_B1D.dtype or program.layout.width != x_B1D.shape[2]:
            return None
        return self._read(program, x_B1D, cache)

    def logits(self, body: nn.Module, head: nn.Module, ids_BT: Tensor, cache: LatteCache) -> Tensor | None:
        """From ids to the logits behind each of a few tokens (B, T, words), the cache advanced.

        ``cache.take_back`` can take back the tokens of the last call.
        """
        if ids_BT.dtype != torch.long or ids_BT.shape[1] > SPARE or not _serves(ids_BT, cache):
            return None
        program = self._program(body, head)
        if program is None:
            return None
        low, high = ids_BT.aminmax()
        if int(low) < 0 or int(high) >= program.vocabulary:
            return None  # the embedding itself says so best
        return self._read(program, ids_BT, cache)

    def refusal(self, body: nn.Module, head: nn.Module) -> str | None:
        """Why modules have to be called for this model; None if the engine serves it."""
        if not kernels_serve(next(body.parameters())):
            return "the native kernels do not serve it"
        if self._program(body, head) is not None:
            return None
        return self._refused[True][0] if True in self._refused else "something was changed in its modules"

    def _read(self, program: Program, x: Tensor, cache: LatteCache) -> Tensor | None:
        session = cache.session
        if not isinstance(session, DecodeSession) or not session.serves(program) or session.batch != x.shape[0]:
            like = x.new_empty(x.shape[0], 1, program.layout.width, dtype=program.layout.dtype)
            cache.states_for(like, len(program.layout.layers))  # raises for another model or batch
            assert cache.state is not None
            session = DecodeSession(program, cache.state)
        if program.places is not None and session.longest + x.shape[1] > program.places:
            return None  # the modules say so
        y = session.read(program, x, cache.history)
        cache.read_by(session, x.shape[1])
        return y

    def _program(self, body: nn.Module, head: nn.Module | None) -> Program | None:
        """The last program if it still holds, or a new one, or None if there can be none."""
        whole = head is not None
        program, refused = self._programs.get(whole), self._refused.get(whole)
        if program is not None and program.body() is body and program.head is head and program.guard.holds():
            return program if kernels_serve(program.like) else None
        if refused is not None and refused[1]():
            return None
        self._programs.pop(whole, None)  # or it would keep weights that were replaced
        self._refused.pop(whole, None)
        if not kernels_serve(next(body.parameters())):
            return None
        try:
            program = compile_model(self._anatomy, body, head)
        except Unfit as unfit:
            self._refused[whole] = unfit.why, unfit.still or (lambda: True)
            if whole and unfit.why not in self._said:  # once for each reason
                self._said.add(unfit.why)
                logger.info("tokens are read by torch's modules, layer by layer: %s", unfit.why)
            return None
        if not program.guard.holds():
            return None
        self._programs[whole] = program
        return program


def _serves(x: Tensor, cache: LatteCache) -> bool:
    if not cache.is_initialized or type(x) is not Tensor or x.device.type != "cpu":
        return False
    if not 1 <= x.shape[0] * x.shape[1] <= MOST_ROWS:
        return False
    if values_hidden(x) or torch.is_grad_enabled() or globally_hooked():
        return False
    return not torch.is_autocast_enabled("cpu")
