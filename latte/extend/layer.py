"""A pretrained attention layer with latents: its own attention on a window is slot 0, what lies behind comes from them.

Only the latents' queries and keys, what feeds them, and slot 0's part of the softmax are new.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import initialization as init

from latte.extend.families import Family
from latte.extend.opening import fit_latents
from latte.mixers.base import MixerConfig
from latte.mixers.latte import LatteMixer
from latte.mixers.rotary import Rotary
from latte.mixers.window import Window
from latte.ops import softmax_attention
from latte.ops.tokens import positions
from latte.ops.window import window_attention
from latte.state import State

#: A bias on slot 0 that leaves the latents a weight of exactly 0: the layer is the pretrained one on its window.
CLOSED = 1e4


class PretrainedWindow(Window):
    """The window of a pretrained attention module: its projections, scale, cap and rotary encoding untouched."""

    def __init__(
        self, config: MixerConfig, size: int, sinks: int, attention: nn.Module, family: Family, original: Any
    ) -> None:
        super().__init__(config, size, sinks, family.softcap(original))
        self.attention, self.family, self.original = attention, family, original
        self.scale = family.scale(original)
        self._rotary = None  # the pretrained model's own, which it tells

    def _build_projections(self) -> None:
        """None of its own."""

    def queries_and_keys(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        return self.family.queries_and_keys(self.attention, x_BTD, self.original)

    def tell_rotary(self, value: Rotary) -> None:
        self._rotary = value


class ExtendedMixer(LatteMixer):
    """Latte-Macchiato around a pretrained attention module."""

    name = "extended"
    examples = ()

    def __init__(self, config: MixerConfig, layer: int, attention: nn.Module, family: Family, original: Any) -> None:
        self._given = (
            layer,
            attention,
            family,
            original,
        )  # for the parts that the base class asks for while it is made
        super().__init__(config)
        del self._given
        self.layer = layer

    def _build_window(self) -> Window:
        layer, attention, family, original = self._given
        size, sinks = self.options.window, self.options.sinks
        own = family.own_window(original, layer)
        if own is not None and own <= size:
            size, sinks = own, 0  # all that the pretrained layer ever saw
        return PretrainedWindow(self.config, size, sinks, attention, family, original)

    def _build_projections(self) -> None:
        """None of its own."""

    @property
    def near(self) -> PretrainedWindow:
        assert isinstance(self.window, PretrainedWindow)
        return self.window

    def values(self, x_BTD: Tensor) -> Tensor:
        return self.near.family.values(self.near.attention, x_BTD, self.near.original)

    def project(self, y_BTHV: Tensor, x_BTD: Tensor) -> Tensor:
        return self.near.family.output(self.near.attention, y_BTHV)

    def reset_parameters(self) -> None:
        """New weights start with the latents told apart by what they look for, and closed."""
        super().reset_parameters()
        std = self.config.hidden_size**-0.5
        init.normal_(self.latent_k_proj.weight, std=std)
        init.normal_(self.latent_q_proj.weight, std=0.1 * std)

    def _heads_of_token(self, x_BD: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        x_B1D = x_BD[:, None]
        q_B1HK, k_B1GK = self.near.queries_and_keys(x_B1D)
        return self.values(x_B1D)[:, 0], q_B1HK[:, 0], k_B1GK[:, 0]

    def original(self, x_BTD: Tensor, reset: Tensor | None) -> Tensor:
        """Heads of the pretrained attention, to all that the pretrained layer saw: the quadratic teacher."""
        near = self.near
        q_BTHK, k_BTGK = near.queries_and_keys(x_BTD)
        return self._attend_to_all(q_BTHK, k_BTGK, self.values(x_BTD), reset)

    def turned(self, q_BTHK: Tensor, k_BTGK: Tensor, reset: Tensor | None) -> tuple[Tensor, Tensor, int]:
        """Queries and keys turned by their places, and how many tokens back the pretrained layer saw."""
        near, length = self.near, q_BTHK.shape[1]
        if reset is None:
            q_BTHK, k_BTGK = (near.rotary.turn_from_start(x) for x in (q_BTHK, k_BTGK))
        else:
            place_BT, _ = positions(q_BTHK, None, reset, torch.zeros_like(reset[:, 0], dtype=torch.long))
            q_BTHK, k_BTGK = (near.rotary.turn(x, place_BT) for x in (q_BTHK, k_BTGK))
        own = near.family.own_window(near.original, self.layer)
        return q_BTHK, k_BTGK, length if own is None else min(own, length)

    def _attend_to_all(self, q_BTHK: Tensor, k_BTGK: Tensor, v_BTGV: Tensor, reset: Tensor | None) -> Tensor:
        near = self.near
        q_BTHK, k_BTGK, left = self.turned(q_BTHK, k_BTGK, reset)
        if left == q_BTHK.shape[1] and near.softcap is None:
            return softmax_attention(q_BTHK, k_BTGK, v_BTGV, scale=near.scale, reset=reset)[0]
        return window_attention(q_BTHK, k_BTGK, v_BTGV, left=left, scale=near.scale, softcap=near.softcap, reset=reset)[
            0
        ]

    def transfer(self, x_BTD: Tensor, reset: Tensor | None) -> tuple[Tensor, Tensor]:
        """The pretrained layer's output, and how far this layer is from it on the same input.

        The distance is the squared error after the output projection, over the target's square. Only what is new gets
        gradients.
        """
        with torch.no_grad():
            q_BTHK, k_BTGK = self.near.queries_and_keys(x_BTD)
            v_BTGV = self.values(x_BTD)
            target_BTD = self.project(self._attend_to_all(q_BTHK, k_BTGK, v_BTGV, reset), x_BTD)
            near_BTHV, log_norm_BTH, _ = self.near.attend(q_BTHK, k_BTGK, v_BTGV, None, None, reset)
        y_BTHV, _, _ = self.with_latents(x_BTD, v_BTGV, near_BTHV, log_norm_BTH, None, None, reset)
        error = (self.project(y_BTHV, x_BTD) - target_BTD).square().sum()
        return target_BTD, error / target_BTD.square().sum()


@dataclass
class Reading:
    """One call of the model, on its way through the layers: what they need to know, and what they leave."""

    mask: Tensor | None
    reset: Tensor | None
    before: tuple[State, ...] | None
    after: dict[int, State] = field(default_factory=dict)
    mode: Literal["extended", "original", "transfer", "open"] = "extended"
    losses: dict[int, Tensor] = field(default_factory=dict)
    share: float | None = None  # for "open"


class ExtendedAttention(nn.Module):
    """Stands where the pretrained attention stood, and answers to the same call."""

    def __init__(self, mixer: ExtendedMixer) -> None:
        super().__init__()
        self.mixer = mixer

    def forward(self, hidden_states: Tensor, *, reading: Reading, **_: Any) -> tuple[Tensor, None]:
        mixer, layer, x_BTD = self.mixer, self.mixer.layer, hidden_states
        if reading.mode == "extended":
            state = None if reading.before is None else reading.before[layer]
            y_BTD, after = mixer(x_BTD, state=state, mask=reading.mask, reset=reading.reset)
            reading.after[layer] = after
        elif reading.mode == "transfer":
            y_BTD, loss = mixer.transfer(x_BTD, reading.reset)
            reading.losses[layer] = _with_gradients_taken(loss, mixer)
        else:
            if reading.mode == "open":
                fit_latents(mixer, x_BTD, reading.reset, reading.share)
            y_BTD = mixer.project(mixer.original(x_BTD, reading.reset), x_BTD)
        return y_BTD, None


def _with_gradients_taken(loss: Tensor, mixer: nn.Module) -> Tensor:
    """The same loss, its gradients in hand: what the layer kept for them is free before the next layer is read."""
    learning = [parameter for parameter in mixer.parameters() if parameter.requires_grad]
    if not (loss.requires_grad and learning):
        return loss
    return _Taken.apply(loss.detach(), torch.autograd.grad(loss, learning, allow_unused=True), *learning)


class _Taken(torch.autograd.Function):
    """A loss whose gradients with respect to some parameters are known."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: tuple[Tensor | None, ...], *_: Tensor) -> Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(None if gradient is None else slope * gradient for gradient in ctx.gradients)


def extend_layer(attention: nn.Module, layer: int, family: Family, original: Any, options: dict[str, Any]) -> nn.Module:
    """A pretrained attention module as an extended one."""
    heads, groups, width = family.heads(original)
    config = MixerConfig(
        hidden_size=original.hidden_size,
        num_heads=heads,
        num_key_value_heads=groups,
        head_dim=width,
        layer_index=layer,
        num_layers=original.num_hidden_layers,
        options={**options, "num_latents": heads * options["num_latents"], "slot0_bias": CLOSED},
    )
    return ExtendedAttention(ExtendedMixer(config, layer, attention, family, original))


__all__ = ["CLOSED", "ExtendedAttention", "ExtendedMixer", "PretrainedWindow", "Reading", "extend_layer"]
