"""A layer: residual sublayers, each x + sublayer(norm(x)); a sublayer mixes tokens or works on each by itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from latte.layers.linear import RMSNorm
from latte.layers.mlp import MLPS
from latte.mixers import Mixer, build
from latte.models.config import LatteConfig
from latte.modes import values_hidden
from latte.state import State
from latte.tokens import Tokens

#: What the sublayers of a block remember, in the order of its mixers.
BlockState = tuple[State, ...]
#: Tensors (B, T, ...) by name that layers hand on to later ones beside the residual stream.
Carried = dict[str, Tensor]


def build_norm(config: LatteConfig) -> nn.Module:
    if config.norm_kind == "layer":
        return nn.LayerNorm(config.hidden_size, config.norm_eps)
    return RMSNorm(config.hidden_size, config.norm_eps)


def mixer_weights(mixer: Mixer, x_BTD: Tensor, tokens: Tokens) -> Tensor:
    """How much of token s is in token t: (B, H, T, S), rows that sum to 1.

    Raises:
        ValueError: the mixer has no such weights, or the tokens stand behind a carried state.
    """
    if tokens.continues:
        raise ValueError(
            "output_attentions was asked for behind a cache, which keeps no single tokens to attend to: "
            "expected all tokens in one call"
        )
    view = mixer.look(x_BTD, tokens).get("weights")
    if view is None or not view.normalised:
        raise ValueError(f"output_attentions was asked for, but mixer {mixer.name!r} has no weights that sum to 1")
    return view.values


class Block(GradientCheckpointingLayer):
    """The sublayers of one layer, one after another.

    Each is an attribute named by its role (``mixer``, ``mlp``, a second of a kind ``mixer_2``), its norm beside it
    (``mixer_norm``).
    """

    #: Tokens read at a time where no gradient is wanted, if the state holds all of those before: what passes between
    #: the operations of a long row would otherwise be written to memory and read again, gigabytes of it.
    TOKENS_AT_ONCE = 2048

    def __init__(self, config: LatteConfig, layer: int) -> None:
        super().__init__()
        self.roles: list[str] = []
        for sublayer in config.sublayers(layer):
            count = 1 + sum(role.split("_")[0] == sublayer.kind for role in self.roles)
            role = sublayer.kind if count == 1 else f"{sublayer.kind}_{count}"
            self.roles.append(role)
            self.add_module(f"{role}_norm", build_norm(config))
            mixes = sublayer.kind == "mixer"
            module = build(sublayer.name, sublayer.config) if mixes else MLPS[sublayer.name](sublayer.config)
            self.add_module(role, module)
        self.dropout = nn.Dropout(config.dropout)
        self.causal = not config.bidirectional

    @property
    def mixers(self) -> list[Any]:
        return [self._modules[role] for role in self.roles if role.startswith("mixer")]

    @property
    def mlps(self) -> list[Any]:
        return [self._modules[role] for role in self.roles if role.startswith("mlp")]

    def forward(
        self, x_BTD: Tensor, states: BlockState | None, tokens: Tokens, carried: Carried | None = None
    ) -> tuple[Tensor, BlockState | None, Carried]:
        """The residual stream, the states after these tokens, none if bidirectional, and what later layers are handed.

        ``carried`` is what earlier layers hand on; what they wrote stays.
        """
        carried = {} if carried is None else carried
        if not self._in_pieces(x_BTD):
            return self._read(x_BTD, states, tokens, carried)
        y_BTD = torch.empty_like(x_BTD)
        added: dict[str, list[Tensor]] = {}
        pieces = zip(x_BTD.split(self.TOKENS_AT_ONCE, dim=1), y_BTD.split(self.TOKENS_AT_ONCE, dim=1), strict=True)
        start = 0
        for (x, y), part in zip(pieces, tokens.parts(self.TOKENS_AT_ONCE), strict=True):
            here = {name: value[:, start : start + part.length] for name, value in carried.items()}
            read, states, after = self._read(x, states, part, here)
            for name in after.keys() - here.keys():
                added.setdefault(name, []).append(after[name])
            y.copy_(read)
            start += part.length
        return y_BTD, states, carried | {name: torch.cat(parts, dim=1) for name, parts in added.items()}

    def attention_weights(self, x_BTD: Tensor, tokens: Tokens) -> Tensor:
        """The weights (B, H, T, S) of the first mixer for this input of the block; quadratic in the length.

        Raises:
            ValueError: its weights do not sum to 1, or these tokens stand behind a state that keeps no single tokens.
        """
        for role in self.roles:
            sublayer, norm = self._modules[role], self._modules[f"{role}_norm"]
            assert sublayer is not None
            assert norm is not None
            if isinstance(sublayer, Mixer):
                return mixer_weights(sublayer, norm(x_BTD), tokens)
            x_BTD = x_BTD + self.dropout(sublayer(norm(x_BTD)))
        raise ValueError("output_attentions was asked for, but a layer has no mixer")

    def _in_pieces(self, x_BTD: Tensor) -> bool:
        if torch.is_grad_enabled() or values_hidden(x_BTD) or x_BTD.shape[1] <= self.TOKENS_AT_ONCE:
            return False
        return self.causal and all(mixer.growth != "linear" for mixer in self.mixers)

    def _read(
        self, x_BTD: Tensor, states: BlockState | None, tokens: Tokens, carried: Carried
    ) -> tuple[Tensor, BlockState | None, Carried]:
        carried = dict(carried)  # mixers add to it
        before = iter(states or (None,) * len(self.mixers))
        after: list[State] = []
        for role in self.roles:
            sublayer, norm = self._modules[role], self._modules[f"{role}_norm"]
            assert sublayer is not None
            assert norm is not None
            if isinstance(sublayer, Mixer):
                change_BTD, state = sublayer(norm(x_BTD), next(before), tokens, carried)
                if state is not None:
                    after.append(state)
            else:
                change_BTD = sublayer(norm(x_BTD))
            x_BTD = x_BTD + self.dropout(change_BTD)
        return x_BTD, tuple(after) if self.causal else None, carried
