"""A pretrained attention layer with latents: its own attention on a window is slot 0, what lies behind comes from them.

Only the latents' queries and keys, what feeds them, and slot 0's part of the softmax are new.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import initialization as init

from latte.extend.families import Family
from latte.extend.opening import fit_latents
from latte.layers.config import MixerConfig
from latte.layers.rotary import Rotary
from latte.layers.window import Window
from latte.mixers.latte import KEPT_OPTIONS, LatteMixer, Windowed
from latte.models.blocks import mixer_weights
from latte.ops import softmax_attention, window_attention
from latte.state import State
from latte.tokens import Tokens

#: A bias on slot 0 that leaves the latents a weight of exactly 0: the layer is the pretrained one on its window.
CLOSED = 1e4


class PretrainedWindow(Window):
    """The window of a pretrained attention module: its projections, scale, cap and rotary encoding untouched."""

    def __init__(
        self,
        config: MixerConfig,
        size: int,
        sinks: int,
        attention: nn.Module,
        family: Family,
        original: Any,
        **kept: Any,
    ) -> None:
        super().__init__(config, size, sinks, family.softcap(original), **kept)
        self.attention, self.family, self.original = attention, family, original
        self.scale = family.scale(original)
        self._rotary = None  # the pretrained model's own, which it sets

    def _build_projections(self) -> None:
        """None of its own."""

    def queries_and_keys(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        # Under autocast products are narrow; the recurrences stay in the dtype of the stream, and states with them.
        q_BTHK, k_BTGK = self.family.queries_and_keys(self.attention, x_BTD, self.original)
        return q_BTHK.to(x_BTD.dtype), k_BTGK.to(x_BTD.dtype)

    def set_rotary(self, value: Rotary | None) -> None:
        """None: the pretrained layer turns nothing."""
        self._rotary, self.rope = value, value is not None


class ExtendedMixer(LatteMixer):
    """Latte-Macchiato around a pretrained attention module, which projects values and output.

    A ``full`` one keeps the pretrained attention: its window is as long as the texts that the model was made for, and
    its latents stay closed.
    """

    name = "extended"
    examples = ()
    presets = {}  # noqa: RUF012

    def __init__(self, config: MixerConfig, layer: int, window: PretrainedWindow, full: bool = False) -> None:
        super().__init__(config, window)
        self.layer, self.full = layer, full

    def build_projections(self) -> None:
        """None of its own."""

    @property
    def pretrained(self) -> PretrainedWindow:
        assert isinstance(self.window, PretrainedWindow)
        return self.window

    def values(self, x_BTD: Tensor) -> Tensor:
        v_BTGV = self.pretrained.family.values(self.pretrained.attention, x_BTD, self.pretrained.original)
        return v_BTGV.to(x_BTD.dtype)

    def project(self, y_BTHV: Tensor, x_BTD: Tensor) -> Tensor:
        return self.pretrained.family.output(self.pretrained.attention, y_BTHV)

    def reset_parameters(self) -> None:
        """New weights start with latents that look for different things, and slot 0 closed to them."""
        super().reset_parameters()
        std = self.config.hidden_size**-0.5
        init.normal_(self.latent_k_proj.weight, std=std)
        init.normal_(self.latent_q_proj.weight, std=0.1 * std)
        for projection in (self.pretrained.score_proj, self.pretrained.lifetime_proj):
            if projection is not None:  # until scores are fitted, the first tokens are kept
                init.zeros_(projection.weight)

    def original(self, x_BTD: Tensor, tokens: Tokens) -> Tensor:
        """Heads of the pretrained attention, to all that the pretrained layer saw: the quadratic teacher."""
        q_BTHK, k_BTGK = self.pretrained.queries_and_keys(x_BTD)
        return self._attend_to_all(q_BTHK, k_BTGK, self.values(x_BTD), tokens)

    def turned(self, q_BTHK: Tensor, k_BTGK: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor, int]:
        """Queries and keys turned by their places, and how many tokens back the pretrained layer saw."""
        window = self.pretrained
        if window.rope:
            q_BTHK, k_BTGK = (window.rotary.turn(x, tokens) for x in (q_BTHK, k_BTGK))
        own = window.family.own_window(window.original, self.layer)
        return q_BTHK, k_BTGK, tokens.length if own is None else min(own, tokens.length)

    def _attend_to_all(self, q_BTHK: Tensor, k_BTGK: Tensor, v_BTGV: Tensor, tokens: Tokens) -> Tensor:
        scale, softcap = self.pretrained.scale, self.pretrained.softcap
        q_BTHK, k_BTGK, left = self.turned(q_BTHK, k_BTGK, tokens)
        if left == tokens.length and softcap is None:
            return softmax_attention(q_BTHK, k_BTGK, v_BTGV, scale=scale, tokens=tokens)[0]
        return window_attention(q_BTHK, k_BTGK, v_BTGV, left=left, scale=scale, softcap=softcap, tokens=tokens)[0]

    def transfer(self, x_BTD: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """The pretrained layer's output, and how far this layer is from it on the same input.

        The distance is the squared error after the output projection, over the target's square. Only what is new gets
        gradients.
        """
        with torch.no_grad():
            q_BTHK, k_BTGK = self.pretrained.queries_and_keys(x_BTD)
            v_BTGV = self.values(x_BTD)
            target_BTD = self.project(self._attend_to_all(q_BTHK, k_BTGK, v_BTGV, tokens), x_BTD)
            scores = self.pretrained.scores(x_BTD, tokens)
            windowed = Windowed(*self.pretrained.attend(q_BTHK, k_BTGK, v_BTGV, None, tokens, scores))
        y_BTHV, _, _ = self.add_latents(x_BTD, v_BTGV, windowed, None, tokens)
        error = (self.project(y_BTHV, x_BTD) - target_BTD).square().sum()
        return target_BTD, error / target_BTD.square().sum()


@dataclass
class Reading:
    """One call of the model, on its way through the layers: what they need, and what they leave."""

    tokens: Tokens
    before: tuple[tuple[State, ...], ...] | None
    after: dict[int, State] = field(default_factory=dict)
    mode: Literal["extended", "original", "transfer", "open"] = "extended"
    alone: int | None = None  # the only layer that is read in this mode; the others are read as they were
    losses: dict[int, Tensor] = field(default_factory=dict)
    weights: dict[int, Tensor] | None = None  # of attention, filled where they are wanted
    share: float | None = None  # for "open"
    visit: Callable[[ExtendedMixer, Tensor, Tokens], None] | None = None  # called with each layer's input


class ExtendedAttention(nn.Module):
    """Stands where the pretrained attention stood, and answers to the same call."""

    def __init__(self, mixer: ExtendedMixer) -> None:
        super().__init__()
        self.mixer = mixer

    def forward(self, hidden_states: Tensor, *, reading: Reading, **_: Any) -> tuple[Tensor, None]:
        mixer, layer, x_BTD = self.mixer, self.mixer.layer, hidden_states
        if reading.weights is not None:
            reading.weights[layer] = mixer_weights(mixer, x_BTD, reading.tokens)
        if reading.visit is not None:
            reading.visit(mixer, x_BTD, reading.tokens)
        mode = reading.mode if reading.alone in (None, layer) else "original"
        if mode == "extended":
            (state,) = (None,) if reading.before is None else reading.before[layer]
            y_BTD, after = mixer(x_BTD, state, reading.tokens)
            reading.after[layer] = after
        elif mode == "transfer":
            y_BTD, loss = mixer.transfer(x_BTD, reading.tokens)
            reading.losses[layer] = _with_gradients_taken(loss, mixer)
        else:
            if mode == "open" and not mixer.full:
                fit_latents(mixer, x_BTD, reading.tokens, reading.share)
            y_BTD = mixer.project(mixer.original(x_BTD, reading.tokens), x_BTD)
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


def extend_layer(
    attention: nn.Module, layer: int, family: Family, original: Any, options: dict[str, Any], full: bool = False
) -> nn.Module:
    """A pretrained attention module as an extended one; ``full``: as it was."""
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
    size, sinks = options["window"], options.get("sinks", 0)
    kept = {name: options[name] for name in KEPT_OPTIONS if name in options}
    context = getattr(original, "max_position_embeddings", None) or 0
    if full:
        size, sinks, kept = max(context, size), 0, {}
    own = family.own_window(original, layer)
    if own is not None and own <= size:
        size, sinks, kept = own, 0, {}  # all that the pretrained layer ever saw
    if kept.get("kept") and kept.get("reach") is None:
        kept["reach"] = max(context, size + 1)
    window = PretrainedWindow(config, size, sinks, attention, family, original, **kept)
    return ExtendedAttention(ExtendedMixer(config, layer, window, full))


__all__ = ["CLOSED", "ExtendedAttention", "ExtendedMixer", "PretrainedWindow", "Reading", "extend_layer"]
