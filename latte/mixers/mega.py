"""Mega (Ma et al., 2023): a damped moving average feeds one gated head of attention, whole or in chunks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init  # leaves weights alone that were loaded from a file

from latte.layers.config import MixerConfig
from latte.layers.marks import Mark, Marked
from latte.layers.rotary import rotary
from latte.mixers.base import Preset
from latte.mixers.gated_attention import GatedAttentionMixer, GatedAttentionState
from latte.mixers.registry import register
from latte.ops import (
    AttentionState,
    ScanState,
    WindowState,
    diagonal_scan,
    laplace_attention,
    softmax_attention,
    window_attention,
)
from latte.ops.numbers import compute_dtype
from latte.ops.recompute import recomputed
from latte.shapes import require_divides
from latte.state import State
from latte.tokens import Tokens

# Tokens whose moving averages are in memory at once: several numbers for every channel.
BLOCK = 256


class MovingAverage(Marked):
    """y_t = sum_n c_n h_t[n] / sqrt(N), h_t = (1 - p d) h_{t-1} + p b x_t: N averages a channel, p and d in (0, 1)."""

    marks: ClassVar[Mapping[str, Mark]] = dict.fromkeys(("rate", "damping", "entry", "read"), Mark(decay=False))

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.rate, self.damping, self.entry, self.read = (nn.Parameter(torch.empty(width, size)) for _ in range(4))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        init.normal_(self.rate, std=0.2)
        init.normal_(self.damping, std=0.2)
        init.normal_(self.read)
        sign = 1 - 2 * (torch.arange(self.entry.shape[1], dtype=self.entry.dtype, device=self.entry.device) % 2)
        init.copy_(self.entry, sign + 0.02 * torch.randn_like(self.entry, requires_grad=False))

    def forward(self, x_BTD: Tensor, state: ScanState | None, tokens: Tokens) -> tuple[Tensor, ScanState]:
        dtype = compute_dtype(x_BTD)
        p, d = torch.sigmoid(self.rate.to(dtype)), torch.sigmoid(self.damping.to(dtype))
        log_kept = torch.log1p(-(p * d).clamp(max=1 - 1e-6))
        entry, read = p * self.entry, self.read / self.read.shape[1] ** 0.5
        h_BD = (ScanState.empty(x_BTD, p.numel()) if state is None else state).h_BD
        outputs = []
        for block, part in enumerate(tokens.parts(BLOCK)):
            x = x_BTD[:, block * BLOCK : (block + 1) * BLOCK].to(dtype)
            y, h_BD = recomputed(_averaged, x, log_kept, entry, read, h_BD, part)
            outputs.append(y)
        return torch.cat(outputs, dim=1).to(x_BTD.dtype), ScanState(h_BD)


def _averaged(
    x_BTD: Tensor, log_kept_DN: Tensor, entry_DN: Tensor, read_DN: Tensor, h_BD: Tensor, tokens: Tokens
) -> tuple[Tensor, Tensor]:
    b_BTDN = x_BTD[..., None] * entry_DN
    fade_BTP = log_kept_DN.flatten().expand(*x_BTD.shape[:2], -1)
    h_BTP, after = diagonal_scan(fade_BTP, b_BTDN.flatten(2), state=ScanState(h_BD), tokens=tokens)
    return (h_BTP.view_as(b_BTDN) * read_DN).sum(-1), after.h_BD


@register("mega")
class MegaMixer(GatedAttentionMixer):
    """out = u . (silu(h + W_h (r . a)) - x), a_t = sum_s softmax_s(q_t . k_s / sqrt(Z)) v_s,  v = silu(W_v x).

    m = silu(average(x) + w . x), a damped moving average, and (u, z, r, h) are projections of m, through sigmoid, silu,
    silu and nothing; q and k are z scaled and shifted per channel. With ``chunk`` a token attends only within its run
    of so many tokens of the document, and the average is what passes between runs: linear time and a state of one size.
    If bidirectional, a second average runs from the right, and both hold the present token.

        softmax  the weights above; q and k are turned by their places
        laplace  weights phi(q_t . k_s / n_t + b_{t-s}) that nothing normalises (``latte.ops.laplace``): n_t tokens are
                 seen, and b_{t-s} = R_t alpha . R_s beta, learned vectors turned by their places

    Source: arXiv 2209.10655, where laplace is for images. Of its two biases b is the rotary one; beside a softmax it is
    replaced by the usual rotary encoding. Its averages are cut to 1,024 taps in some runs; here they are whole.
    """

    @dataclass(frozen=True)
    class Options:
        attention: Literal["softmax", "laplace"] = "softmax"
        chunk: int | None = None  # None: attention to the whole document
        ema_size: int = 16  # averages of each channel
        key_width: int = 64  # Z
        value_expansion: int = 2  # value width over hidden_size

    directions = ("causal", "bidirectional")
    examples = (
        {"ema_size": 2, "key_width": 4},
        {"chunk": 5, "ema_size": 3, "key_width": 2, "value_expansion": 1},
        {"ema_size": 2, "key_width": 4, "bidirectional": True},
        {"chunk": 3, "ema_size": 1, "key_width": 2, "bidirectional": True},
        {"attention": "laplace", "ema_size": 2, "key_width": 4},
        {"attention": "laplace", "chunk": 5, "ema_size": 1, "key_width": 2, "value_expansion": 1},
        {"attention": "laplace", "ema_size": 1, "key_width": 4, "bidirectional": True},
        {"attention": "laplace", "chunk": 3, "ema_size": 1, "key_width": 2, "bidirectional": True},
    )
    presets: ClassVar[Mapping[str, Preset] | None] = {
        "mega-chunk": lambda size: {"pattern": [["mixer", "gelu"]], "mixer_options": {"chunk": size.window}},
        "mega": lambda size: {"pattern": [["mixer", "gelu"]]},
    }
    published = {"mega": (23.75, 153)}  # noqa: RUF012
    marks: ClassVar[Mapping[str, Mark]] = {
        **GatedAttentionMixer.marks,
        **dict.fromkeys(("skip", "bias"), Mark(decay=False)),
    }

    def __init__(self, config: MixerConfig) -> None:
        super().__init__(config)
        require_divides("mixer 'mega'", 2, self.keys, "channels in a pair", "key_width")
        self.rotary = rotary(self.keys, config.rope_theta)

    def build_filter(self) -> None:
        options, D = self.options, self.config.hidden_size
        for name in ("chunk", "ema_size"):
            if getattr(options, name) is not None and getattr(options, name) < 1:
                raise ValueError(f"mixer 'mega': {name} is {getattr(options, name)}, expected at least 1")
        self.average = MovingAverage(D, options.ema_size)
        self.back_average = MovingAverage(D, options.ema_size) if self.config.bidirectional else None
        self.skip = nn.Parameter(torch.empty(D))
        self.laplace = options.attention == "laplace"
        if self.laplace:
            self.bias = nn.Parameter(torch.empty(2, self.keys))  # alpha, beta

    def reset_parameters(self) -> None:
        super().reset_parameters()
        for average in (self.average, self.back_average):
            if average is not None:
                average.reset_parameters()
        init.normal_(self.skip)
        if self.laplace:
            init.normal_(self.bias, std=0.02)

    def init_state(self, like_BTD: Tensor) -> GatedAttentionState:
        average = ScanState.empty(like_BTD, self.config.hidden_size * self.options.ema_size)
        widths = (1, 2 * self.keys if self.laplace else self.keys, self.values)
        if self.options.chunk is None:
            return GatedAttentionState(average, AttentionState.empty(like_BTD, *widths))
        return GatedAttentionState(average, WindowState.empty(like_BTD, self.options.chunk - 1, 0, *widths))

    def filtered(self, x_BTD: Tensor, state: Any, tokens: Tokens) -> tuple[Tensor, State]:
        y_BTD, after = self.average(x_BTD, state, tokens)
        if self.back_average is not None:
            back_BTD, _ = self.back_average(x_BTD.flip(1), None, tokens.reversed)
            y_BTD = y_BTD + back_BTD.flip(1)
        return F.silu(y_BTD + self.skip * x_BTD), after

    def attend(
        self, q_BT1Z: Tensor, k_BT1Z: Tensor, v_BT1V: Tensor, state: Any, tokens: Tokens
    ) -> tuple[Tensor, State | None]:
        """One head of attention, to the document or within chunks of it."""
        causal, chunk = not self.config.bidirectional, self.options.chunk
        inside = tokens if chunk is None else in_chunks(tokens, chunk)
        q, k = self.with_places(q_BT1Z, k_BT1Z, tokens, inside)
        after: Any
        if self.laplace:
            left = None if chunk is None else chunk - 1
            y, after = laplace_attention(q, k, v_BT1V, causal=causal, left=left, state=state, tokens=inside)
        elif chunk is None:
            y, after = softmax_attention(q, k, v_BT1V, causal=causal, state=state, tokens=tokens)
        else:
            reach = {"left": chunk - 1, "right": 0 if causal else chunk - 1}
            y, _, after = window_attention(q, k, v_BT1V, **reach, state=state, tokens=inside)
        if chunk is None or after is None:
            return y, after
        return y, _of_this_chunk(after, tokens.count_B % chunk)

    def with_places(self, q_BT1Z: Tensor, k_BT1Z: Tensor, tokens: Tokens, inside: Tokens) -> tuple[Tensor, Tensor]:
        """Queries and keys (B, T, 1, K) whose products are the logits, up to the scale of the softmax."""
        if not self.laplace:
            q, k = (self.rotary.turn(x, tokens) for x in (q_BT1Z, k_BT1Z))
            return q, k
        count_BT = inside.count_BT
        if self.config.bidirectional:
            count_BT = count_BT + inside.reversed.count_BT.flip(1) - 1
        q_BT1Z = q_BT1Z / count_BT.clamp(min=1)[..., None, None].to(q_BT1Z.dtype)
        bias_BT2Z = self.bias.to(q_BT1Z.dtype).expand(*count_BT.shape, -1, -1).contiguous()
        alpha, beta = self.rotary.turn(bias_BT2Z, tokens).split(1, dim=2)
        return torch.cat([q_BT1Z, alpha], dim=-1), torch.cat([k_BT1Z, beta], dim=-1)

    def flops_per_token(self, context: int) -> int:
        seen = context if self.options.chunk is None else self.options.chunk
        averages = 4 * self.config.hidden_size * self.options.ema_size
        widths = 2 * self.keys if self.laplace else self.keys
        return super().flops_per_token(context) + averages + 2 * seen * (widths + self.values)


def _of_this_chunk(window: WindowState, count_B: Tensor) -> WindowState:
    """The state without what earlier chunks left in its ring."""
    slot_R = torch.arange(window.keys_BRGK.shape[1], device=count_B.device)
    here_BR11 = (slot_R < count_B[:, None])[..., None, None]
    keys, values = (torch.where(here_BR11, ring, 0.0) for ring in (window.keys_BRGK, window.values_BRGV))
    return WindowState(keys, values, window.sink_keys_BNGK, window.sink_values_BNGV)


def in_chunks(tokens: Tokens, chunk: int) -> Tokens:
    """The same tokens where every ``chunk`` of a document counts as a document of its own."""
    begins_BT = (tokens.place_BT % chunk == 0) & tokens.real_BT
    reset = begins_BT if tokens.reset is None else begins_BT | tokens.reset
    start_B = tokens.start_B % chunk if tokens.continues else None
    return Tokens(tokens.batch, tokens.length, tokens.device, tokens.mask, reset, start_B, tokens.continues)
