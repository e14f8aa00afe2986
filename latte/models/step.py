"""One token through all blocks in one native call, where calling them one by one would do nothing more.

Decoding reads every weight once a token. Everything else, module calls and small operations, took longer than that.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

from latte.mixers.feeds import GATE_POWER, RGLRU, ConvFeed, Feed, RGLRUState
from latte.mixers.latte import LatteMixer, LatteMixerState
from latte.mixers.layers import Linear, RMSNorm, nothing_but_forwards
from latte.mixers.window import Window
from latte.models.blocks import Block, SwiGLU
from latte.ops import ConvState, LatteState, ScanState, WindowState, native
from latte.ops.backends import choose_backend
from latte.state import State, require_state


class Unfit(Exception):  # noqa: N818  (an outcome, not an error)
    """The model holds something that the kernel does not know."""


@dataclass(frozen=True)
class _Plan:
    """What the kernel is told of a model, and what must still be so at the next token for that to be true."""

    blocks: nn.ModuleList
    norm: nn.Module
    sizes: native.Sizes
    norm_weight: Tensor
    layers: list[tuple[int, ...]]
    modules: list[nn.Module]
    dropouts: list[nn.Dropout]
    families: list[tuple[dict[str, Any], list[nn.Module | None]]]  # what is registered where
    places: list[tuple[dict[str, Any], str]]  # where each weight is registered
    weights: list[Tensor]
    addresses: list[int]  # of the weights, as the kernel knows them

    def holds(self) -> bool:
        """Nothing was wrapped, replaced, moved, watched by a hook or set to drop since the plan was made."""
        if not nothing_but_forwards(self.modules):
            return False
        if any(dropout.training and dropout.p for dropout in self.dropouts):
            return False
        if any(list(registered.values()) != children for registered, children in self.families):
            return False
        # In one go through each list, not one loop over all: asked for every token.
        now = [registered.get(name) for registered, name in self.places]
        if not all(map(operator.is_, now, self.weights)) or not all(map(Tensor.is_contiguous, self.weights)):
            return False
        return list(map(Tensor.data_ptr, self.weights)) == self.addresses


class _Made(NamedTuple):
    """The last states that came from here: they need no check. Replaced as a whole: no interrupt leaves a mixture."""

    states: list[weakref.ref[State]]
    where: list[native.Addresses]
    room: native.StateRoom  # for the next ones
    batch: int

    def are(self, states: Sequence[State], batch: int) -> bool:
        if len(states) != len(self.states) or self.batch != batch:
            return False
        return all(made() is state for made, state in zip(self.states, states, strict=True))


class TokenStep:
    """The blocks and the last norm of a model, for inputs of one token a row."""

    def __init__(self, maker: type[PlanMaker] | None = None) -> None:
        self._maker = maker or PlanMaker
        self._plan: _Plan | None = None
        self._made: _Made | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A copy has weights of its own.
        return TokenStep(self._maker).__dict__

    def __call__(
        self, blocks: nn.ModuleList, norm: nn.Module, x_B1D: Tensor, states: tuple[State, ...]
    ) -> tuple[Tensor, list[State]] | None:
        """Hidden states after the norm, and new states; None where the blocks themselves have to be called.

        Raises:
            ValueError: states of another model or batch.
        """
        if not _serves(x_B1D):
            return None
        plan = self._plan_for(blocks, norm, x_B1D.dtype)
        if plan is None or plan.sizes.width != x_B1D.shape[2]:
            return None
        made, batch = self._made, x_B1D.shape[0]
        if made is not None and made.are(states, batch):
            where, room = made.where, made.room
        else:
            for block, state in zip(blocks, states, strict=True):
                expected = self._maker.mixer_of(block).expected_state(x_B1D)
                require_state("mixer 'latte'", state, expected)
            states = tuple(state.map(Tensor.contiguous) for state in states)
            before = [_tensors(state) for state in states]
            where, room = [native.addresses(tensors) for tensors in before], native.StateRoom(before)
        tensors, there = room.make()
        y_BD = native.token_step(x_B1D[:, 0], plan.norm_weight, plan.sizes, plan.layers, where, there)
        after = [_state(parts) for parts in tensors]
        self._made = _Made([weakref.ref(state) for state in after], there, room, batch)
        return y_BD[:, None], after

    def _plan_for(self, blocks: nn.ModuleList, norm: nn.Module, dtype: torch.dtype) -> _Plan | None:
        """The last plan if it still holds, or a new one, or None if there can be none."""
        plan = self._plan
        known = plan is not None and plan.blocks is blocks and plan.norm is norm and plan.norm_weight.dtype == dtype
        if plan is not None and known and plan.holds():
            return plan
        self._made = None
        try:
            self._plan = self._maker(dtype).plan(blocks, norm)
        except Unfit:
            self._plan = None
        return self._plan if self._plan is not None and self._plan.holds() else None


def _serves(x_B1D: Tensor) -> bool:
    B, T, _ = x_B1D.shape
    if T != 1 or B > native.FEW_ROWS or type(x_B1D) is not Tensor:
        return False
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or _global_forward_hooks or _global_forward_pre_hooks:
        return False
    return not torch.is_autocast_enabled("cpu") and choose_backend("token_step", None, x_B1D) == "native"


def _tensors(state: Any) -> native.LayerState:
    """A layer's state in the kernel's order."""
    feed, latents, window = state.feed, state.latents, state.window
    fed: native.LayerState = (None, None)
    if isinstance(feed, RGLRUState):
        fed = (feed.scan.h_BD, feed.count_B)
    elif isinstance(feed, ConvState):
        fed = (feed.tail_BKD, None)
    near: native.LayerState = (None,) * 5
    if window is not None:
        near = (window.keys_BRGK, window.values_BRGV, window.sink_keys_BNGK, window.sink_values_BNGV, window.count_B)
    return (*fed, latents.log_norm_BHM, latents.mean_BHMV, *near)


def _state(tensors: Any) -> State:
    fed, count_B, log_norm_BHM, mean_BHMV, *near = tensors
    feed = None if fed is None else ConvState(fed) if count_B is None else RGLRUState(ScanState(fed), count_B)
    window = None if near[0] is None else WindowState(*near)
    return LatteMixerState(feed, LatteState(log_norm_BHM, mean_BHMV), window)


class PlanMaker:
    """Walks over a model of our own blocks and notes all that the kernel relies on."""

    #: What a projection may be: classes whose call is nothing but the product with their weight.
    PRODUCTS: tuple[type, ...] = (Linear, nn.Linear)

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.modules: list[nn.Module] = []
        self.dropouts: list[nn.Dropout] = []
        self.parents: dict[nn.Module, None] = {}
        self.places: list[tuple[dict[str, Any], str]] = []
        self.weights: list[Tensor] = []
        self.sizes: set[native.Sizes] = set()

    @staticmethod
    def mixer_of(block: Any) -> LatteMixer:
        return block.mixer

    def plan(self, blocks: nn.ModuleList, norm: nn.Module) -> _Plan:
        """Raises Unfit."""
        fields = [self.layer(self.child(blocks, str(index))) for index in range(len(blocks))]
        if len(self.sizes) != 1:
            raise Unfit
        (sizes,) = self.sizes
        if self.eps(norm) != sizes.eps:
            raise Unfit
        self.modules.append(norm)
        weight = self.weight(norm, "weight", sizes.width)
        families = [(parent._modules, list(parent._modules.values())) for parent in self.parents]
        where = [weight.data_ptr() for weight in self.weights]
        return _Plan(
            blocks, norm, sizes, weight, fields, self.modules, self.dropouts, families, self.places, self.weights, where
        )

    def layer(self, block: nn.Module) -> tuple[int, ...]:
        """The fields of one block; raises Unfit."""
        if type(block) is not Block:
            raise Unfit
        mixer = self.child(block, "mixer", LatteMixer)
        window = None if mixer.window is None else self.child(mixer, "window", Window)
        self.dropouts.append(self.child(block, "dropout", nn.Dropout))
        norms = [self.child(block, name, RMSNorm) for name in ("mixer_norm", "mlp_norm")]
        return self.fields(mixer, mixer, window, norms, self.child(block, "mlp", SwiGLU))

    def fields(
        self, mixer: LatteMixer, home: nn.Module, window: nn.Module | None, norms: list[Any], mlp: Any
    ) -> tuple[int, ...]:
        """Of a layer whose values and output are projected in ``home``, queries and keys in ``window``."""
        config, options = mixer.config, mixer.options
        if config.bidirectional:
            raise Unfit
        D, H, G, V = config.hidden_size, config.num_heads, config.kv_heads, config.width
        inside, M = self.child(mlp, "gate_proj", *self.PRODUCTS).out_features, mixer.latents_per_head
        first_norm, second_norm = (self.weight(norm, "weight", D) for norm in norms)
        q = k = gate_weight = gate_bias = decay = conv = feed_norm = slot_bias = None
        feed = self.child(mixer, "feed", Feed, ConvFeed, RGLRU)
        if type(feed) is RGLRU:
            gate_weight = self.weight(feed, "gate_weight", 2, H, D // H, D // H)
            gate_bias = self.weight(feed, "gate_bias", 2, H, D // H)
            decay = self.weight(feed, "decay", D)
        elif type(feed) is ConvFeed:
            conv = self.weight(feed, "weight", D, feed.size)
        if mixer.feed_norm is not None:
            norms = [*norms, self.child(mixer, "feed_norm", RMSNorm)]
            feed_norm = self.weight(norms[-1], "weight", D)
        if window is not None:
            q, k = self.matrix(window, "q_proj", H * V, D), self.matrix(window, "k_proj", G * V, D)
            slot_bias = None if mixer.slot0_bias is None else self.weight(mixer, "slot0_bias", H)
        eps = {self.eps(norm) for norm in norms}
        if len(eps) != 1:
            raise Unfit
        self.sizes.add(native.Sizes(D, H, G, V, inside, eps.pop()))
        weights = native.LayerWeights(
            mixer_norm=first_norm,
            v=self.matrix(home, "v_proj", G * V, D),
            q=q,
            k=k,
            gate_weight=gate_weight,
            gate_bias=gate_bias,
            decay=decay,
            conv=conv,
            feed_norm=feed_norm,
            latent_q=self.matrix(mixer, "latent_q_proj", H * mixer.slots, D),
            latent_k=self.matrix(mixer, "latent_k_proj", H * M, D),
            slot_bias=slot_bias,
            o=self.matrix(home, "o_proj", D, H * V),
            mlp_norm=second_norm,
            gate=self.matrix(mlp, "gate_proj", inside, D),
            up=self.matrix(mlp, "up_proj", inside, D),
            down=self.matrix(mlp, "down_proj", D, inside),
        )
        return native.layer_fields(weights, _options(mixer, options.coupled))

    def eps(self, norm: nn.Module) -> float:
        if type(norm) is not RMSNorm:
            raise Unfit
        return norm.eps

    def child(self, parent: nn.Module, name: str, *kinds: type) -> Any:
        module = parent._modules.get(name)
        if module is None or (kinds and type(module) not in kinds):
            raise Unfit
        self.modules.append(module)
        self.parents[parent] = None
        return module

    def matrix(self, parent: nn.Module, name: str, *shape: int) -> Tensor:
        layer = self.child(parent, name, *self.PRODUCTS)
        if layer.bias is not None:
            raise Unfit
        return self.weight(layer, "weight", *shape)

    def weight(self, module: nn.Module, name: str, *shape: int) -> Tensor:
        weight = module._parameters.get(name)
        if type(weight) is not nn.Parameter or weight.shape != shape or weight.device.type != "cpu":
            raise Unfit
        if weight.dtype != self.dtype or not weight.is_contiguous():
            raise Unfit
        self.places.append((module._parameters, name))
        self.weights.append(weight)
        return weight


def _options(mixer: LatteMixer, coupled: bool) -> native.LayerOptions:
    M, window = mixer.latents_per_head, mixer.window
    if window is None:
        return native.LayerOptions(M, None, 0, False, None, GATE_POWER, None, 1.0)
    scale = mixer.config.width**-0.5 if window.scale is None else window.scale
    known = native.LayerOptions(M, window.size, window.sinks, coupled, window.softcap, GATE_POWER, None, scale)
    if not window.rope:
        return known
    turning = window.rotary
    return known._replace(frequencies=turning.frequencies, stretch=turning.stretch, exact_from=turning.rounded_below)
