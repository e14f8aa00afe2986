"""A model as kernel arguments for one token."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from latte.decode.guard import Guard
from latte.layers.feeds import GATE_POWER, RGLRU, ConvFeed, Feed
from latte.layers.hooks import unhooked
from latte.layers.linear import RMSNorm
from latte.mixers.latte import LatteMixer
from latte.models.engine import Anatomy, Unfit
from latte.ops import native


@dataclass(eq=False)
class Plan:
    """Kernel arguments of a model, and a guard on all that they were read from."""

    body: weakref.ref[nn.Module]  # the model may own this plan
    blocks: nn.ModuleList
    head: nn.Module | None
    arguments: native.TokenModel
    guard: Guard

    @property
    def dtype(self) -> torch.dtype:
        return self.arguments.norm.dtype


class PlanMaker:
    """Walks over a model and notes all that the kernel relies on."""

    def __init__(self, anatomy: Anatomy, dtype: torch.dtype) -> None:
        self.anatomy, self.dtype = anatomy, dtype
        self.modules: list[nn.Module] = []
        self.dropouts: list[nn.Dropout] = []
        self.parents: dict[nn.Module, None] = {}
        self.table: nn.Embedding | None = None
        self.weights: list[Tensor] = []
        self.sizes: set[native.Sizes] = set()

    def plan(self, body: nn.Module, head: nn.Module | None) -> Plan:
        """Of the layers and the norm of ``body``; with a head also of its embedding, from ids to logits.

        Raises Unfit.
        """
        if not self.anatomy.allows(self.dtype):
            raise Unfit
        ends = {} if head is None else self._ends(body, head)
        blocks = self.child(body, "layers")
        layers = [self._layer(self.child(blocks, str(index))) for index in range(len(blocks))]
        if len(self.sizes) != 1:
            raise Unfit
        (sizes,) = self.sizes
        norm = self.child(body, "norm")
        if self.anatomy.eps(norm) != sizes.eps or any(end.shape[1] != sizes.width for end in ends.values()):
            raise Unfit
        arguments = native.TokenModel(sizes, layers, self._weight(norm, "weight", sizes.width), **ends)
        guard = Guard(self.modules, self.parents, self.weights, self.dropouts, self.table)
        return Plan(weakref.ref(body), blocks, head, arguments, guard)

    def _ends(self, body: nn.Module, head: Any) -> dict[str, Tensor]:
        """What comes before the layers and after them; raises Unfit."""
        self.modules += [body, head]
        self.table = table = self.child(body, "embed_tokens", nn.Embedding)
        if not self.anatomy.body_is_plain(body) or type(head) not in self.anatomy.products or head.bias is not None:
            raise Unfit
        # Layers may still be served where these have hooks: no need to look at them first.
        if body._modules.get("embed_positions") is not None or not unhooked(*self.modules):
            raise Unfit
        if "dropout" in body._modules:
            self.child(body, "dropout", nn.Dropout)
        return {
            "embedding": self._weight(table, "weight", table.num_embeddings, table.embedding_dim),
            "head": self._weight(head, "weight", head.out_features, head.in_features),
        }

    def _layer(self, block: nn.Module) -> tuple[int, ...]:
        """Kernel arguments of one block; raises Unfit."""
        mixer, value_owner, query_owner, norms, mlp = self.anatomy.parts(block, self)
        config = mixer.config
        if config.bidirectional or mixer.options.decay != "none" or mixer.options.kept:
            raise Unfit
        D, H, G, V = config.hidden_size, config.num_heads, config.kv_heads, config.width
        inside, M = self.child(mlp, "gate_proj", *self.anatomy.products).out_features, mixer.latents_per_head
        first_norm, second_norm = (self._weight(norm, "weight", D) for norm in norms)
        q = k = gate_weight = gate_bias = decay = conv = feed_norm = slot_bias = None
        feed = self.child(mixer, "feed", Feed, ConvFeed, RGLRU)
        if type(feed) is RGLRU:
            gate_weight = self._weight(feed, "gate_weight", 2, H, D // H, D // H)
            gate_bias = self._weight(feed, "gate_bias", 2, H, D // H)
            decay = self._weight(feed, "decay", D)
        elif type(feed) is ConvFeed:
            conv = self._weight(feed, "weight", D, feed.size)
        if mixer.feed_norm is not None:
            norms = [*norms, self.child(mixer, "feed_norm", RMSNorm)]
            feed_norm = self._weight(norms[-1], "weight", D)
        if query_owner is not None:
            q, k = self._matrix(query_owner, "q_proj", H * V, D), self._matrix(query_owner, "k_proj", G * V, D)
            slot_bias = None if mixer.slot0_bias is None else self._weight(mixer, "slot0_bias", H)
        eps = {self.anatomy.eps(norm) for norm in norms}
        if len(eps) != 1:
            raise Unfit
        self.sizes.add(native.Sizes(D, H, G, V, inside, eps.pop()))
        weights = native.LayerWeights(
            mixer_norm=first_norm,
            v=self._matrix(value_owner, "v_proj", G * V, D),
            q=q,
            k=k,
            gate_weight=gate_weight,
            gate_bias=gate_bias,
            decay=decay,
            conv=conv,
            feed_norm=feed_norm,
            latent_q=self._matrix(mixer, "latent_q_proj", H * mixer.slots, D),
            latent_k=self._matrix(mixer, "latent_k_proj", H * M, D),
            slot_bias=slot_bias,
            o=self._matrix(value_owner, "o_proj", D, H * V),
            mlp_norm=second_norm,
            gate=self._matrix(mlp, "gate_proj", inside, D),
            up=self._matrix(mlp, "up_proj", inside, D),
            down=self._matrix(mlp, "down_proj", D, inside),
        )
        return native.layer_fields(weights, _options(mixer, mixer.options.coupled))

    def child(self, parent: nn.Module, name: str, *kinds: type) -> Any:
        module = parent._modules.get(name)
        if module is None or (kinds and type(module) not in kinds):
            raise Unfit
        self.modules.append(module)
        self.parents[parent] = None
        if type(module) is nn.Dropout:
            self.dropouts.append(module)
        return module

    def _matrix(self, parent: nn.Module, name: str, *shape: int) -> Tensor:
        layer = self.child(parent, name, *self.anatomy.products)
        if layer.bias is not None:
            raise Unfit
        return self._weight(layer, "weight", *shape)

    def _weight(self, module: nn.Module, name: str, *shape: int) -> Tensor:
        weight = module._parameters.get(name)
        if type(weight) is not nn.Parameter or weight.shape != shape or weight.device.type != "cpu":
            raise Unfit
        if weight.dtype != self.dtype or not weight.is_contiguous():
            raise Unfit
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
