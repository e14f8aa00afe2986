"""What the kernel for one token is told of a model, and what must still be so at the next token for that to be true."""

from __future__ import annotations

import operator
import weakref
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from latte.mixers.feeds import GATE_POWER, RGLRU, ConvFeed, Feed
from latte.mixers.latte import LatteMixer
from latte.mixers.layers import Linear, RMSNorm, nothing_but_forwards
from latte.mixers.window import Window
from latte.models.blocks import Block, SwiGLU
from latte.ops import native


class Unfit(Exception):  # noqa: N818  (an outcome, not an error)
    """The model holds something that the kernel does not know."""


@dataclass(eq=False)
class Plan:
    """A model as the kernel knows it, and all that it was read from."""

    body: weakref.ref[nn.Module]  # which may own this plan
    blocks: nn.ModuleList
    head: nn.Module | None
    table: nn.Embedding | None
    told: native.TokenModel
    modules: list[nn.Module]
    kinds: list[type]  # of the modules
    owns: list[dict[str, Any]]  # what is set on the modules themselves
    dropouts: list[nn.Dropout]
    families: list[dict[str, Any]]  # where modules are registered
    children: list[nn.Module | None]  # what is registered there
    homes: list[dict[str, Any]]  # where weights are registered
    registry: list[Tensor | None]  # what is registered there
    weights: list[Tensor]  # those that the kernel reads
    addresses: list[int]  # of the weights, as the kernel knows them
    hooks: int = -1  # of any module in the world, when these had none

    @property
    def dtype(self) -> torch.dtype:
        return self.told.norm.dtype

    def holds(self) -> bool:
        """Nothing was wrapped, replaced, moved, watched by a hook or set to drop since the plan was made.

        Asked for every token, of things that the weights have driven out of the caches since: each list is gone through
        in one go, and what tells the same with less reading is read.
        """
        if list(map(type, self.modules)) != self.kinds or any(map(dict.__contains__, self.owns, repeat("forward"))):
            return False
        if any(map(dict.__contains__, self.owns, repeat("_compiled_call_impl"))):
            return False
        # Torch numbers all hooks: where there is no new one anywhere, there is none here.
        hooks = RemovableHandle.next_id
        if hooks != self.hooks:
            if not nothing_but_forwards(self.modules):
                return False
            self.hooks = hooks
        if any(dropout.training and dropout.p for dropout in self.dropouts):
            return False
        if list(chain.from_iterable(map(dict.values, self.families))) != self.children:
            return False
        now = list(chain.from_iterable(map(dict.values, self.homes)))
        if len(now) != len(self.registry) or not all(map(operator.is_, now, self.registry)):
            return False
        if self.table is not None and self.table.max_norm is not None:
            return False
        if not all(map(Tensor.is_contiguous, self.weights)):
            return False
        return list(map(Tensor.data_ptr, self.weights)) == self.addresses


class PlanMaker:
    """Walks over a model of our own blocks and notes all that the kernel relies on."""

    #: What a projection may be: classes whose call is nothing but the product with their weight.
    PRODUCTS: tuple[type, ...] = (Linear, nn.Linear)

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.modules: list[nn.Module] = []
        self.dropouts: list[nn.Dropout] = []
        self.parents: dict[nn.Module, None] = {}
        self.table: nn.Embedding | None = None
        self.weights: list[Tensor] = []
        self.sizes: set[native.Sizes] = set()

    @staticmethod
    def mixer_of(block: Any) -> LatteMixer:
        return block.mixer

    def plan(self, body: nn.Module, head: nn.Module | None) -> Plan:
        """Of the layers and the norm of ``body``; with a head also of its embedding, from ids to logits.

        Raises Unfit.
        """
        ends = {} if head is None else self.ends(body, head)
        blocks = self.child(body, "layers")
        fields = [self.layer(self.child(blocks, str(index))) for index in range(len(blocks))]
        if len(self.sizes) != 1:
            raise Unfit
        (sizes,) = self.sizes
        norm = self.child(body, "norm")
        if self.eps(norm) != sizes.eps:
            raise Unfit
        if any(end.shape[1] != sizes.width for end in ends.values()):
            raise Unfit
        told = native.TokenModel(sizes, fields, self.weight(norm, "weight", sizes.width), **ends)
        families = [parent._modules for parent in self.parents]
        homes = [module._parameters for module in self.modules]
        return Plan(
            weakref.ref(body),
            blocks,
            head,
            self.table,
            told,
            self.modules,
            list(map(type, self.modules)),
            [module.__dict__ for module in self.modules],
            self.dropouts,
            families,
            list(chain.from_iterable(map(dict.values, families))),
            homes,
            list(chain.from_iterable(map(dict.values, homes))),
            self.weights,
            list(map(Tensor.data_ptr, self.weights)),
        )

    def ends(self, body: nn.Module, head: Any) -> dict[str, Tensor]:
        """What comes before the layers and after them; raises Unfit."""
        self.modules += [body, head]
        self.table = table = self.child(body, "embed_tokens", nn.Embedding)
        if not self.reads_itself(body) or type(head) not in self.PRODUCTS or head.bias is not None:
            raise Unfit
        # Layers may still be served where these are watched: no need to look at them first.
        if body._modules.get("embed_positions") is not None or not nothing_but_forwards(self.modules):
            raise Unfit
        if "dropout" in body._modules:
            self.dropouts.append(self.child(body, "dropout", nn.Dropout))
        return {
            "embedding": self.weight(table, "weight", table.num_embeddings, table.embedding_dim),
            "head": self.weight(head, "weight", head.out_features, head.in_features),
        }

    def reads_itself(self, body: nn.Module) -> bool:
        """Whether ``body`` would do nothing but embed, call its layers and norm."""
        from latte.models.decoder import LatteModel

        return type(body).forward is LatteModel.forward

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
