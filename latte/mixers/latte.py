"""Latte and Latte-Macchiato: attention through latents, with a sliding window as latent 0 under the same softmax."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from latte.layers.config import MixerConfig
from latte.layers.feeds import Feed, build_feed
from latte.layers.linear import Linear, RMSNorm, repeat_heads, split_heads
from latte.layers.marks import Mark
from latte.layers.window import Window
from latte.mixers.base import Preset, Size, View
from latte.mixers.heads import HeadMixer
from latte.mixers.registry import register
from latte.ops import (
    DecayState,
    KeptState,
    LatteState,
    LogSumState,
    WindowState,
    bidirectional_latte,
    causal_latte,
    decay_attention,
    log_sum,
)
from latte.ops.numbers import compute_dtype
from latte.ops.recompute import recomputed
from latte.shapes import require_divides
from latte.state import State, state
from latte.tokens import Tokens, require_tokens

#: softplus^-1 of where the decays start: memories of ten to ten thousand tokens.
DECAYS = (-9.0, -2.0)


@state
class LatteMixerState(State):
    feed: State | None
    latents: LatteState
    window: WindowState | KeptState | None


class Windowed(NamedTuple):
    """What the window gives: means of values, logs of their normalisers, and its state."""

    y_BTHV: Tensor
    log_norm_BTH: Tensor
    state: WindowState | KeptState | None


def _preset(feed: str = "x", window: bool = False, **fields: Any) -> Preset:
    """A variant of the paper: what feeds the latents, with or without a window."""

    def fill(size: Size) -> dict[str, Any]:
        options = {"num_latents": size.latents, "feed": feed, **({"window": size.window} if window else {})}
        return {"mixer_options": options, **fields}

    return fill


def _example(**options: Any) -> dict[str, Any]:
    return {"num_latents": 8, **options}


#: Options of the tokens behind the window.
KEPT_OPTIONS = ("kept", "reach", "score_weight", "received", "recall")


def kept_options(options: Any) -> dict[str, Any]:
    """What of the options concerns the tokens behind the window."""
    return {name: getattr(options, name) for name in KEPT_OPTIONS}


@register("latte")
class LatteMixer(HeadMixer):
    """y_t = p(0|t) sum_s p_0(s|t) v_s + sum_l p(l|t) sum_s p(s|l,t) v_s, equations (15) and (16).

    p(.|t) is one softmax per head over the latents and, with a window, slot 0; p_0 is softmax attention on the window;
    window and latents share values and output projection. Latent logits are not scaled. What feeds them is x, a
    convolution of x or an RG-LRU over x (equation 19); the window and the values always come from x. ``coupled`` puts
    the window's keys under the same softmax as the latents, each by its own score: the logit of slot 0 is then
    log sum_s e^{score of s} plus its learned part. ``decay`` lets latents forget:
    p(s|l,t) ~ e^{k_s - w_{s+1} - ... - w_t}, w >= 0 per latent. Without it only a larger key overwrites a latent.
    ``kept`` tokens that left the window stay under its softmax, per key/value head those with the best scores.
    """

    @dataclass(frozen=True)
    class Options:
        num_latents: int = 128  # over all heads
        feed: Literal["x", "conv", "rglru"] = "x"
        conv_size: int = 3
        feed_norm: bool = False  # RMSNorm between feed and latents
        radius: Literal["base", "power"] = "base"  # what of the RG-LRU starts in [0.9, 0.999]
        window: int | None = None  # tokens before the present one; None: latents only
        sinks: int = 0  # first tokens of the document that stay in sight of the window
        kept: int = 0  # tokens behind the window that stay in sight: those with the best learned scores
        reach: int | None = None  # largest distance at which a kept token is looked at; None: its own
        score_weight: float = 0.0  # start of the learned weight of scores in the logits of kept tokens
        received: float | None = None  # start of the weight, in scores, of log attention got in the window; None: none
        recall: bool = False  # tokens also have learned lifetimes, for which they stay however old they are
        softcap: float | None = None  # of the window's logits
        rope: bool = True  # on the window's queries and keys
        slot0_bias: float | None = None  # start of a learned bias on slot 0; None: no bias
        coupled: bool = False  # slot 0's logit also holds the log-normaliser of the window's scores
        decay: Literal["none", "constant", "data"] = "none"  # of what latents remember, per latent; data: per token too

    linear_in_values = normalised = True
    directions = ("causal", "bidirectional")
    examples: ClassVar[tuple[Mapping[str, Any], ...]] = (
        _example(),
        _example(feed="conv"),
        _example(feed="rglru"),
        _example(feed="rglru", feed_norm=True, radius="power"),
        _example(window=5),
        _example(feed="conv", window=4, rope=False, conv_size=4),
        _example(feed="rglru", window=3, slot0_bias=2.0),
        _example(window=0, softcap=5.0),
        _example(window=3, sinks=2),
        _example(feed="conv", window=6, sinks=1, softcap=8.0, num_key_value_heads=1),
        _example(window=4, sinks=2, coupled=True, slot0_bias=1.0),
        _example(window=2, kept=3, score_weight=0.5),
        _example(
            feed="rglru", window=3, sinks=2, kept=4, coupled=True, reach=9, num_key_value_heads=1, score_weight=1.0
        ),
        _example(window=0, kept=2, rope=False, softcap=3.0, score_weight=-0.5),
        _example(window=3, sinks=1, kept=3, received=0.8, score_weight=0.5),
        _example(window=2, kept=3, recall=True, score_weight=0.5),
        _example(decay="constant"),
        _example(decay="data", feed="conv", window=3),
        _example(bidirectional=True),
        _example(bidirectional=True, feed="conv", window=2),
        _example(bidirectional=True, feed="rglru", window=3),
        _example(bidirectional=True, window=2, coupled=True),
    )
    marks: ClassVar[Mapping[str, Mark]] = {"latent_decay": Mark(decay=False, float32=True)}
    presets: ClassVar[Mapping[str, Preset] | None] = {
        "latte": _preset(block="plain", position_embedding="learned"),
        "latte++": _preset(position_embedding="learned"),
        "latte-conv++": _preset("conv"),
        "latte-conv-swa++": _preset("conv", window=True),
        "latte-r++": _preset("rglru"),
        "latte-r-swa++": _preset("rglru", window=True),
    }
    published: ClassVar[Mapping[str, tuple[float, int]]] = {
        "latte": (21.88, 111),
        "latte++": (21.56, 140),
        "latte-conv++": (20.26, 140),
        "latte-conv-swa++": (18.52, 153),
        "latte-r++": (19.99, 139),
        "latte-r-swa++": (17.64, 153),
    }

    def __init__(self, config: MixerConfig, window: Window | None = None) -> None:
        """A mixer; ``window`` is given where it is not to be made from the options: that of a pretrained model."""
        super().__init__(config)
        options, H = self.options, config.num_heads
        require_divides("mixer 'latte'", H, options.num_latents, "num_heads", "num_latents")
        self.latents_per_head = options.num_latents // H
        self.slots = self.latents_per_head + (options.window is not None)
        self.feed: Feed = build_feed(
            options.feed,
            config.hidden_size,
            blocks=H,
            conv_size=options.conv_size,
            radius=options.radius,
            bidirectional=config.bidirectional,
        )
        self.feed_norm = RMSNorm(config.hidden_size, config.norm_eps) if options.feed_norm else None
        self.latent_q_proj = Linear(config.hidden_size, H * self.slots)
        self.latent_k_proj = Linear(config.hidden_size, H * self.latents_per_head)
        self.window, self.slot0_bias = window, None
        if options.window is not None:
            if window is None:
                window = Window(
                    config, options.window, options.sinks, options.softcap, options.rope, **kept_options(options)
                )
                self.window = window
            if options.slot0_bias is not None:
                self.slot0_bias = nn.Parameter(torch.full((H,), float(options.slot0_bias)))
        self.latent_decay = self.decay_proj = None
        if options.decay != "none":
            if config.bidirectional:
                raise ValueError(f"mixer 'latte': decay is {options.decay!r}, expected 'none': it is bidirectional")
            self.latent_decay = nn.Parameter(torch.empty(options.num_latents))
            if options.decay == "data":
                self.decay_proj = Linear(config.hidden_size, options.num_latents)
            self.reset_parameters()
        if options.kept and options.window is None:
            raise ValueError(f"mixer 'latte': kept is {options.kept} without a window, expected a window to leave")
        if options.coupled and options.window is None:
            raise ValueError("mixer 'latte': coupled is True without a window, expected a window to couple with")

    def reset_parameters(self) -> None:
        if self.slot0_bias is not None:
            init.constant_(self.slot0_bias, self.options.slot0_bias)
        if self.window is not None:
            self.window.reset_parameters()
        if self.latent_decay is not None:
            init.uniform_(self.latent_decay, *DECAYS)

    def init_state(self, like_BTD: Tensor) -> LatteMixerState:
        config = self.config
        return LatteMixerState(
            self.feed.init_state(like_BTD),
            LatteState.empty(like_BTD, config.num_heads, self.latents_per_head, config.width),
            None if self.window is None else self.window.init_state(like_BTD),
        )

    def look(self, x_BTD: Tensor, tokens: Tokens | None = None) -> dict[str, View]:
        """``weights``; ``latents``, p(l|t), with a window slot 0 first; ``latent_keys``, the logits of p(s|l,t), a
        softmax over the s that t may see; and ``window``, p_0(s|t)."""
        tokens = require_tokens("mixer 'latte'", tokens, x_BTD)
        z_BTD, _ = self.latent_input(x_BTD, None, tokens)
        views, log_norm_BTH = super().look(x_BTD, tokens), None
        if self.window is not None:
            windowed_BTHS, log_norm_BTH, _ = self.window(x_BTD, self.unit_values(x_BTD), None, tokens)
            views["window"] = View("weights", windowed_BTHS.transpose(1, 2), normalised=True)
        keys_BTHM = split_heads(self.latent_k_proj(z_BTD), self.config.num_heads)
        if self.latent_decay is not None:  # softmax over s of k_s + W_s is that of k_s - (W_t - W_s)
            total = tokens.zero_padding(self.latent_decay_rates(z_BTD)).cumsum(1)
            keys_BTHM = keys_BTHM + total.view_as(keys_BTHM)
        views["latent_keys"] = View("channels", keys_BTHM, normalised=False)
        views["latents"] = View("channels", self.slot_weights(z_BTD, log_norm_BTH), normalised=True)
        return views

    def mix_heads(self, x_BTD: Tensor, v_BTGV: Tensor, state: Any, tokens: Tokens) -> tuple[Tensor, State | None]:
        windowed = self._attend_to_window(x_BTD, v_BTGV, state, tokens)
        y_BTHV, feed, latents = self.add_latents(x_BTD, v_BTGV, windowed, state, tokens)
        return y_BTHV, self._state(feed, latents, windowed)

    def mix(self, x_BTD: Tensor, state: Any, tokens: Tokens) -> tuple[Tensor, State | None]:
        # What lies between the window and the output is cheap to compute and large to keep: for gradients it is
        # computed again, and a layer keeps less than one of softmax attention.
        v_BTGV = self.values(x_BTD)
        windowed = self._attend_to_window(x_BTD, v_BTGV, state, tokens)

        def rest() -> tuple[Tensor, State | None, LatteState | None]:
            y_BTHV, feed, latents = self.add_latents(x_BTD, v_BTGV, windowed, state, tokens)
            return self.project(y_BTHV, x_BTD), feed, latents

        y_BTD, feed, latents = recomputed(rest)
        return y_BTD, self._state(feed, latents, windowed)

    def _attend_to_window(self, x_BTD: Tensor, v_BTGV: Tensor, state: Any, tokens: Tokens) -> Windowed | None:
        if self.window is None:
            return None
        return Windowed(*self.window(x_BTD, v_BTGV, None if state is None else state.window, tokens))

    def add_latents(
        self, x_BTD: Tensor, v_BTGV: Tensor, windowed: Windowed | None, state: Any, tokens: Tokens
    ) -> tuple[Tensor, State | None, LatteState | None]:
        """Heads of the whole layer, given the window's; and the states of feed and latents."""
        feed, latents = (None, None) if state is None else (state.feed, state.latents)
        z_BTD, feed = self.latent_input(x_BTD, feed, tokens)
        p_BTHM = self.slot_weights(z_BTD, None if windowed is None else windowed.log_norm_BTH)
        k_BTHM = split_heads(self.latent_k_proj(z_BTD), self.config.num_heads)
        v_BTHV = repeat_heads(v_BTGV, self.config.num_heads)
        latent_p_BTHM = p_BTHM if windowed is None else p_BTHM[..., 1:]
        if self.config.bidirectional:
            y_BTHV, latents = bidirectional_latte(latent_p_BTHM, k_BTHM, v_BTHV, tokens=tokens), None
        else:
            y_BTHV, latents = self._read_latents(z_BTD, latent_p_BTHM, k_BTHM, v_BTHV, latents, tokens)
        if windowed is not None:
            y_BTHV = torch.addcmul(y_BTHV, p_BTHM[..., :1], windowed.y_BTHV)
        return y_BTHV, feed, latents

    def latent_decay_rates(self, z_BTD: Tensor) -> Tensor:
        """w >= 0 (B, T, H * M): how fast each latent forgets."""
        assert self.latent_decay is not None
        rates = self.latent_decay.to(compute_dtype(z_BTD)).expand(*z_BTD.shape[:2], -1)
        return F.softplus(rates if self.decay_proj is None else rates + self.decay_proj(z_BTD).to(rates.dtype))

    def _read_latents(
        self, z_BTD: Tensor, p: Tensor, k: Tensor, v: Tensor, latents: LatteState | None, tokens: Tokens
    ) -> tuple[Tensor, LatteState]:
        """Causal Latte; with decay a_t = log(e^{a_{t-1} - w_t} + e^{k_t}) normalises, and means fade alike."""
        if self.options.decay == "none":
            return causal_latte(p, k, v, state=latents, tokens=tokens)
        before = LatteState.empty(v, k.shape[2], k.shape[3], v.shape[-1]) if latents is None else latents
        wide, sums = compute_dtype(v), LogSumState(before.log_norm_BHM.flatten(1))
        rates_BTD = self.latent_decay_rates(z_BTD)
        share, log_kept, sums = log_sum(k.flatten(2).to(wide), rates_BTD, state=sums, tokens=tokens)
        share, log_kept = (x.view_as(k) for x in (share, log_kept))
        mean = DecayState(before.mean_BHMV)
        y, mean = decay_attention(p.to(wide), share, v.to(wide), log_kept, state=mean, tokens=tokens)
        return y.to(v.dtype), LatteState(sums.log_norm_BD.view_as(before.log_norm_BHM), mean.sum_BHKV)

    def latent_input(self, x_BTD: Tensor, state: State | None, tokens: Tokens) -> tuple[Tensor, State | None]:
        """What queries and keys of the latents are made from, y_t of equations (18) and (19); and the feed's state."""
        z_BTD, after = self.feed(x_BTD, state, tokens)
        return (z_BTD if self.feed_norm is None else self.feed_norm(z_BTD)), after

    def slot_weights(self, z_BTD: Tensor, log_norm_BTH: Tensor | None) -> Tensor:
        """p(l|t) of equation (19) over slot 0 (with a window) and the latents: (B, T, H, slots)."""
        logits_BTHM = split_heads(self.latent_q_proj(z_BTD), self.config.num_heads)
        extra = [] if self.slot0_bias is None else [self.slot0_bias[:, None]]
        if self.options.coupled and log_norm_BTH is not None:
            extra.append(log_norm_BTH[..., None].to(logits_BTHM.dtype))
        if extra:
            logits_BTHM = torch.cat([sum(extra, logits_BTHM[..., :1]), logits_BTHM[..., 1:]], dim=-1)
        wide = torch.float32 if logits_BTHM.dtype in (torch.float16, torch.bfloat16) else None
        return logits_BTHM.softmax(dim=-1, dtype=wide).to(z_BTD.dtype)

    @staticmethod
    def _state(feed: State | None, latents: LatteState | None, windowed: Windowed | None) -> LatteMixerState | None:
        return None if latents is None else LatteMixerState(feed, latents, None if windowed is None else windowed.state)
