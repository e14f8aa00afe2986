"""One token through a whole model in one native call, where calling its modules would do nothing more.

Decoding reads every weight once a token. Everything else, module calls and small operations, took longer than that.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from latte.decode.plan import Plan, PlanMaker
from latte.layers.hooks import globally_hooked
from latte.mixers.latte import LatteMixerState
from latte.models.cache import LatteCache, ModelState
from latte.models.engine import Anatomy, Unfit
from latte.modes import values_hidden
from latte.ops import ConvState, LatteState, ScanState, WindowState, native
from latte.ops.registry import kernels_serve
from latte.state import State, require_state

#: Rows times tokens of one call: for more, products that pack the weights first are faster.
MOST_ROWS = 256


class _Layout:
    """Where the kernel finds the states of so many rows of a batch."""

    def __init__(self, plan: Plan, states: Sequence[native.LayerState], batch: int) -> None:
        self._plan, self._batch = weakref.ref(plan), batch  # a state does not keep the model
        self.layout = native.StateLayout(states)
        self.table = plan.arguments.table(self.layout)

    def serve(self, plan: Plan, batch: int) -> bool:
        return self._plan() is plan and self._batch == batch


class _Rings:
    """Keys and values of all windows, which states that follow each other share. Knows which of them are alive.

    The next token may be written here if no state that is alive would see it: none ahead of the one it follows, and
    none so far behind that the token would take the place of one it still looks at.
    """

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self._states: list[weakref.ref[_Memory]] = []
        self._lock = threading.Lock()

    def join(self, blocks: Sequence[_Memory], follows: _Memory | None) -> bool:
        """Let the states after ``follows`` have their tokens here too; False where that would change another."""
        with self._lock:
            alive = [state for state in (ref() for ref in self._states) if state is not None]
            if follows is not None:
                behind = [follows.tokens - state.tokens for state in alive]
                if not all(0 <= distance <= native.SPARE - len(blocks) for distance in behind):
                    return False
            self._states = [weakref.ref(state) for state in (*alive, *blocks)]
            return True


class _Memory:
    """The states of all layers in blocks of memory, as the kernel writes them and reads them at the next token."""

    def __init__(self, rows: _Layout, memory: Tensor, start_B: Tensor, tokens: int) -> None:
        self.rows, self.memory = rows, memory
        self.tokens, self._start_B = tokens, start_B  # read since the counts were `start_B`
        self.rings: _Rings

    @classmethod
    def first(cls, rows: _Layout, states: Sequence[native.LayerState], count_B: Tensor) -> _Memory:
        memory, rings = rows.layout.pack(states)
        block = cls(rows, memory, count_B, 0)
        block.rings = _Rings(rings)
        block.rings.join([block], None)
        return block

    def next(self, tokens: int) -> tuple[Tensor, list[_Memory]]:
        """Room for the states after each of so many tokens: in one tensor, and one by one."""
        memory, rings = self.rows.layout.make(tokens), self.rings
        read = range(1, tokens + 1)
        blocks = [_Memory(self.rows, memory[n - 1], self._start_B, self.tokens + n) for n in read]
        if not rings.join(blocks, self):
            rings = _Rings(rings.memory.clone())
            rings.join(blocks, None)
        for block in blocks:
            block.rings = rings
        return memory, blocks

    # Tensors made in inference mode could not be used for training afterwards.
    @torch.inference_mode(False)
    def layers(self) -> tuple[tuple[State, ...], ...]:
        return tuple((_state(tensors),) for tensors in self.rows.layout.unpack(self.memory, self.rings.memory))

    @torch.inference_mode(False)
    def counts(self) -> Tensor:
        return self._start_B + self.tokens


class TokenEngine:
    """A model for inputs of one token a row: its layers and last norm, or all of it with embedding and head."""

    def __init__(self, anatomy: Anatomy) -> None:
        self._anatomy = anatomy
        self._plans: dict[bool, Plan] = {}  # with a head and without

    def __getstate__(self) -> dict[str, Any]:
        # A copy has weights of its own.
        return TokenEngine(self._anatomy).__dict__

    def hidden(self, body: nn.Module, x_B1D: Tensor, cache: LatteCache) -> Tensor | None:
        """Embedded tokens through ``body.layers`` and ``body.norm``, the cache one token further.

        None where the modules have to be called.

        Raises:
            ValueError: a cache of another model or batch.
        """
        if x_B1D.shape[1] != 1 or not _serves(x_B1D, cache):
            return None
        plan = self._plan_for(body, None)
        if plan is None or plan.dtype != x_B1D.dtype or plan.arguments.sizes.width != x_B1D.shape[2]:
            return None
        y_B1D, (state,) = self._read(plan, x_B1D, cache)
        cache.replace(state, 1)
        return y_B1D

    def logits(self, body: nn.Module, head: nn.Module, ids_B1: Tensor, cache: LatteCache) -> Tensor | None:
        """The same from ids to logits, ``body.embed_tokens`` and ``head`` included."""
        read = self.logits_of_each(body, head, ids_B1, cache)
        if read is None:
            return None
        logits_B1W, (state,) = read
        cache.replace(state, 1)
        return logits_B1W

    def logits_of_each(
        self, body: nn.Module, head: nn.Module, ids_BT: Tensor, cache: LatteCache
    ) -> tuple[Tensor, list[ModelState]] | None:
        """Logits (B, T, words) behind each of a few tokens, and the state after each; the cache stays as it is."""
        if ids_BT.dtype != torch.long or ids_BT.shape[1] > native.SPARE or not _serves(ids_BT, cache):
            return None
        plan = self._plan_for(body, head)
        if plan is None or plan.arguments.embedding is None:
            return None
        low, high = ids_BT.aminmax()
        if int(low) < 0 or int(high) >= plan.arguments.embedding.shape[0]:
            return None  # the embedding itself says so best
        return self._read(plan, ids_BT, cache)

    def _read(self, plan: Plan, x: Tensor, cache: LatteCache) -> tuple[Tensor, list[ModelState]]:
        assert cache.state is not None
        block = cache.state.holder
        # What the kernel wrote for this plan needs no check.
        if not isinstance(block, _Memory) or not block.rows.serve(plan, x.shape[0]):
            block = self._block(plan, x.shape[0], cache)
        after, blocks = block.next(x.shape[1])
        rings = blocks[-1].rings.memory
        y = native.token_step(plan.arguments, x, block.rows.table, block.memory, after, rings)
        return y, [ModelState.stored_in(block) for block in blocks]

    def _block(self, plan: Plan, batch: int, cache: LatteCache) -> _Memory:
        """The cache's state in a block of memory. The state itself moves there: coming back to it costs nothing."""
        like_B1D = plan.arguments.norm.new_empty(batch, 1, plan.arguments.sizes.width)
        state, states = cache.state, cache.states_for(like_B1D, len(plan.blocks))
        assert state is not None
        assert states is not None
        for block, layer in zip(plan.blocks, states, strict=True):
            (mixed,) = layer
            require_state("mixer 'latte'", mixed, self._anatomy.mixer_of(block).expected_state(like_B1D))
        tensors = [_tensors(mixed, state.count_B) for (mixed,) in states]
        made = _Memory.first(_Layout(plan, tensors, batch), tensors, state.count_B)
        inference = torch.is_inference_mode_enabled()
        if not any(tensor.requires_grad or tensor.is_inference() != inference for _, tensor in state.tensors()):
            state.move_to(made)  # nothing but the numbers would be lost
        return made

    def _plan_for(self, body: nn.Module, head: nn.Module | None) -> Plan | None:
        """The last plan if it still holds, or a new one, or None if there can be none."""
        plan = self._plans.get(head is not None)
        if plan is None or plan.body() is not body or plan.head is not head or not plan.guard.holds():
            self._plans.pop(head is not None, None)  # or it would keep weights that were replaced
            try:
                plan = PlanMaker(self._anatomy, next(body.parameters()).dtype).plan(body, head)
            except Unfit:
                return None
            if not plan.guard.holds():
                return None
            self._plans[head is not None] = plan
        return plan if kernels_serve(plan.arguments.norm) else None


def _serves(x: Tensor, cache: LatteCache) -> bool:
    if cache.state is None or type(x) is not Tensor or x.device.type != "cpu":
        return False
    if not 1 <= x.shape[0] * x.shape[1] <= MOST_ROWS:
        return False
    if values_hidden(x) or torch.is_grad_enabled() or globally_hooked():
        return False
    return not torch.is_autocast_enabled("cpu")


def _tensors(state: Any, count_B: Tensor) -> native.LayerState:
    """A layer's state in the kernel's order; the kernel keeps a count of tokens for feed and window each."""
    feed, latents, window = state.feed, state.latents, state.window
    before: native.LayerState = (None, None)
    if isinstance(feed, ScanState):
        before = (feed.h_BD, count_B)
    elif isinstance(feed, ConvState):
        before = (feed.tail_BKD, None)
    ring: native.LayerState = (None,) * 5
    if window is not None:
        ring = (window.keys_BRGK, window.values_BRGV, window.sink_keys_BNGK, window.sink_values_BNGV, count_B)
    return (*before, latents.log_norm_BHM, latents.mean_BHMV, *ring)


def _state(tensors: Any) -> State:
    recurrent, count_B, log_norm_BHM, mean_BHMV, *ring = tensors
    feed = None if recurrent is None else ConvState(recurrent) if count_B is None else ScanState(recurrent)
    window = None if ring[0] is None else WindowState(*ring[:4])
    return LatteMixerState(feed, LatteState(log_norm_BHM, mean_BHMV), window)
