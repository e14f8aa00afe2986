"""Latte and Latte-Macchiato: attention through latents, with a sliding window as latent 0 under the same softmax."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import initialization as init

from latte.mixers.base import Mixer, MixerConfig, register
from latte.mixers.feeds import Feed, build_feed
from latte.mixers.layers import (
    Linear,
    RMSNorm,
    nothing_but_forward,
    project_together,
    repeat_heads,
    split_heads,
)
from latte.mixers.window import Window
from latte.ops import LatteState, WindowState, bidirectional_latte, causal_latte, native
from latte.ops.backends import choose_backend
from latte.ops.tokens import segment_ids
from latte.shapes import require_divides
from latte.state import State, require_state, state


@state
class LatteMixerState(State):
    feed: State | None
    latents: LatteState
    window: WindowState | None


def _state(feed: State | None, latents: LatteState | None, window: WindowState | None) -> LatteMixerState | None:
    return None if latents is None else LatteMixerState(feed, latents, window)


@register("latte")
class LatteMixer(Mixer):
    """y_t = p(0|t) sum_s p_0(s|t) v_s + sum_l p(l|t) sum_s p(s|l,t) v_s, equations (15) and (16).

    p(.|t) is one softmax per head over the latents and, with a window, slot 0; p_0 is softmax attention on the window;
    window and latents share values and output projection. Latent logits are not scaled. What feeds them is x, a
    convolution of x or an RG-LRU over x (equation 19); the window and the values always come from x. ``coupled`` puts
    the window's keys under the same softmax as the latents, each by its own score: the logit of slot 0 is then
    log sum_s e^{score of s} plus its learned part.
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
        softcap: float | None = None  # of the window's logits
        rope: bool = True  # on the window's queries and keys
        slot0_bias: float | None = None  # start of a learned bias on slot 0; None: no bias
        coupled: bool = False  # slot 0's logit also holds the log-normaliser of the window's scores

    normalised = True
    directions = ("causal", "bidirectional")
    examples: ClassVar[tuple[Mapping[str, Any], ...]] = (
        {},
        {"feed": "conv"},
        {"feed": "rglru"},
        {"feed": "rglru", "feed_norm": True, "radius": "power"},
        {"window": 5},
        {"feed": "conv", "window": 4, "rope": False, "conv_size": 4},
        {"feed": "rglru", "window": 3, "slot0_bias": 2.0},
        {"window": 0, "softcap": 5.0},
        {"window": 3, "sinks": 2},
        {"feed": "conv", "window": 6, "sinks": 1, "softcap": 8.0, "num_key_value_heads": 1},
        {"window": 4, "sinks": 2, "coupled": True, "slot0_bias": 1.0},
        {"bidirectional": True},
        {"bidirectional": True, "feed": "conv", "window": 2},
        {"bidirectional": True, "feed": "rglru", "window": 3},
        {"bidirectional": True, "window": 2, "coupled": True},
    )

    def __init__(self, config: MixerConfig) -> None:
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
        self._expected: tuple[tuple, LatteMixerState] | None = None
        self.window: Window | None = None
        self.slot0_bias = None
        if options.window is not None:
            self.window = self._build_window()
            if options.slot0_bias is not None:
                self.slot0_bias = nn.Parameter(torch.full((H,), float(options.slot0_bias)))
        elif options.coupled:
            raise ValueError("mixer 'latte': coupled is True without a window, expected a window to couple with")
        self._build_projections()

    def _build_window(self) -> Window:
        options = self.options
        return Window(self.config, options.window, options.sinks, options.softcap, options.rope)

    def _build_projections(self) -> None:
        config = self.config
        self.v_proj = Linear(config.hidden_size, config.kv_heads * config.width)
        self.o_proj = Linear(config.num_heads * config.width, config.hidden_size, residual=True)

    def reset_parameters(self) -> None:
        if self.slot0_bias is not None:
            init.constant_(self.slot0_bias, self.options.slot0_bias)

    def values(self, x_BTD: Tensor) -> Tensor:
        return split_heads(self.v_proj(x_BTD), self.config.kv_heads)

    def project(self, y_BTHV: Tensor, x_BTD: Tensor) -> Tensor:
        return self.o_proj(y_BTHV.flatten(2))

    def latents(self, x_BTD: Tensor, *, mask: Tensor | None = None, reset: Tensor | None = None) -> Tensor:
        fed_BTD, _ = self.fed(x_BTD, None, mask, reset)
        log_norm_BTH = None
        if self.window is not None and self.options.coupled:
            _, log_norm_BTH, _ = self.window(x_BTD, self.values(x_BTD), None, mask, reset)
        return self._slot_weights(fed_BTD, log_norm_BTH)

    def init_state(self, like_BTD: Tensor) -> LatteMixerState:
        config = self.config
        return LatteMixerState(
            self.feed.init_state(like_BTD),
            LatteState.empty(like_BTD, config.num_heads, self.latents_per_head, config.width),
            None if self.window is None else self.window.init_state(like_BTD),
        )

    def mix(
        self,
        x_BTD: Tensor,
        values_BTGV: Tensor | None,
        state: State | None,
        mask: Tensor | None,
        reset: Tensor | None,
    ) -> tuple[Tensor, State | None]:
        before = None if state is None else require_state("mixer 'latte'", state, self.expected_state(x_BTD))
        if before is not None and values_BTGV is None and self._fused_step_serves(x_BTD):
            return self._fused_step(x_BTD, before, mask, reset)
        v_BTGV, near_BTHV, log_norm_BTH, window_state = self._attend(x_BTD, values_BTGV, before, mask, reset)
        y_BTHV, feed_state, latent_state = self.with_latents(
            x_BTD, v_BTGV, near_BTHV, log_norm_BTH, before, mask, reset
        )
        return y_BTHV, _state(feed_state, latent_state, window_state)

    def _mix_and_project(
        self, x_BTD: Tensor, state: State | None, mask: Tensor | None, reset: Tensor | None
    ) -> tuple[Tensor, State | None]:
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return super()._mix_and_project(x_BTD, state, mask, reset)
        # What lies between the window and the output is cheap to compute and large to keep: for gradients it is
        # computed again, and a layer keeps less than one of softmax attention.
        before = None if state is None else require_state("mixer 'latte'", state, self.expected_state(x_BTD))
        v_BTGV, near_BTHV, log_norm_BTH, window_state = self._attend(x_BTD, None, before, mask, reset)

        def rest() -> tuple[Tensor, State | None, LatteState | None]:
            y_BTHV, fed, read = self.with_latents(x_BTD, v_BTGV, near_BTHV, log_norm_BTH, before, mask, reset)
            return self.project(y_BTHV, x_BTD), fed, read

        y_BTD, feed_state, latent_state = checkpoint(rest, use_reentrant=False, preserve_rng_state=False)
        return y_BTD, _state(feed_state, latent_state, window_state)

    def _attend(
        self,
        x_BTD: Tensor,
        values_BTGV: Tensor | None,
        before: LatteMixerState | None,
        mask: Tensor | None,
        reset: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, WindowState | None]:
        """Values, and with a window its heads, the logs of their normalisers, and its state."""
        v_BTGV = self.values(x_BTD) if values_BTGV is None else values_BTGV
        if self.window is None:
            return v_BTGV, None, None, None
        return v_BTGV, *self.window(x_BTD, v_BTGV, before and before.window, mask, reset)

    def with_latents(
        self,
        x_BTD: Tensor,
        v_BTGV: Tensor,
        near_BTHV: Tensor | None,
        log_norm_BTH: Tensor | None,
        before: LatteMixerState | None,
        mask: Tensor | None,
        reset: Tensor | None,
    ) -> tuple[Tensor, State | None, LatteState | None]:
        """Heads of the whole layer, given the window's; and the states of feed and latents."""
        config = self.config
        v_BTHV = repeat_heads(v_BTGV, config.num_heads)
        fed_BTD, feed_state = self.fed(x_BTD, before and before.feed, mask, reset)
        p_BTHM = self._slot_weights(fed_BTD, log_norm_BTH)
        k_BTHM = split_heads(self.latent_k_proj(fed_BTD), config.num_heads)
        latent_p_BTHM = p_BTHM if self.window is None else p_BTHM[..., 1:]
        if config.bidirectional:
            segments = None if reset is None else segment_ids(reset, x_BTD)
            y_BTHV = bidirectional_latte(latent_p_BTHM, k_BTHM, v_BTHV, mask=mask, segments=segments)
            latent_state = None
        else:
            y_BTHV, latent_state = causal_latte(
                latent_p_BTHM, k_BTHM, v_BTHV, state=before and before.latents, mask=mask, reset=reset
            )
        if near_BTHV is not None:
            y_BTHV = torch.addcmul(y_BTHV, p_BTHM[..., :1], near_BTHV)
        return y_BTHV, feed_state, latent_state

    def expected_state(self, x_BTD: Tensor) -> LatteMixerState:
        """What a state for such an input must look like: sizes without memory, kept from call to call."""
        if torch.compiler.is_compiling():
            return self.init_state(x_BTD)
        key = (x_BTD.shape[0], x_BTD.dtype, x_BTD.device)
        if self._expected is None or self._expected[0] != key:
            shapes = self.init_state(x_BTD).map(lambda tensor: tensor.new_empty(()).expand(tensor.shape))
            self._expected = (key, shapes)
        return self._expected[1]

    def _fused_step_serves(self, x_BTD: Tensor) -> bool:
        """Whether these inputs are one token each, to be read by the native kernel without gradients."""
        if x_BTD.shape[1] != 1 or torch.compiler.is_compiling() or torch.is_grad_enabled():
            return False
        if not nothing_but_forward(self.feed) or (self.window is not None and not nothing_but_forward(self.window)):
            return False
        return not torch.is_autocast_enabled("cpu") and choose_backend("macchiato_step", None, x_BTD) == "native"

    def _fused_step(
        self, x_B1D: Tensor, before: LatteMixerState, mask: Tensor | None, reset: Tensor | None
    ) -> tuple[Tensor, State]:
        """What :meth:`mix` does, for one token, in one kernel between the projections."""
        heads, x_BD = self.config.num_heads, x_B1D[:, 0]
        mask_B, reset_B = (None if flags is None else flags[:, 0] for flags in (mask, reset))
        fed_BD, feed_state = self.feed.fused_step(x_BD, before.feed, mask_B, reset_B)
        fed_BD = fed_BD if self.feed_norm is None else self.feed_norm(fed_BD)
        slots_BD, k_BD = project_together(fed_BD, self.latent_q_proj, self.latent_k_proj)
        v_BGV, q_BHK, k_BGK = self._heads_of_token(x_BD)
        near = None
        if self.window is not None and before.window is not None and q_BHK is not None and k_BGK is not None:
            near = self.window.near(q_BHK, k_BGK, before.window, self.slot0_bias, self.options.coupled)
        y_BHV, log_norm_BHM, mean_BHMV, ring = native.macchiato_step(
            split_heads(slots_BD, heads),
            split_heads(k_BD, heads),
            v_BGV,
            before.latents.log_norm_BHM,
            before.latents.mean_BHMV,
            near,
            mask_B,
            reset_B,
        )
        window_state = None if ring is None else WindowState(*ring)
        return y_BHV[:, None], LatteMixerState(feed_state, LatteState(log_norm_BHM, mean_BHMV), window_state)

    def _heads_of_token(self, x_BD: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Values of one token, and with a window its queries and keys."""
        window, heads, groups = self.window, self.config.num_heads, self.config.kv_heads
        if window is None:
            (v_BD,) = project_together(x_BD, self.v_proj)
            return split_heads(v_BD, groups), None, None
        v_BD, q_BD, k_BD = project_together(x_BD, self.v_proj, window.q_proj, window.k_proj)
        return split_heads(v_BD, groups), split_heads(q_BD, heads), split_heads(k_BD, groups)

    def fed(
        self, x_BTD: Tensor, state: State | None, mask: Tensor | None, reset: Tensor | None
    ) -> tuple[Tensor, State | None]:
        y_BTD, after = self.feed(x_BTD, state, mask, reset)
        return (y_BTD if self.feed_norm is None else self.feed_norm(y_BTD)), after

    def _slot_weights(self, fed_BTD: Tensor, log_norm_BTH: Tensor | None) -> Tensor:
        """p(l|t) of equation (19) over slot 0 (with a window) and the latents: (B, T, H, slots)."""
        logits_BTHM = split_heads(self.latent_q_proj(fed_BTD), self.config.num_heads)
        extra = [] if self.slot0_bias is None else [self.slot0_bias[:, None]]
        if self.options.coupled and log_norm_BTH is not None:
            extra.append(log_norm_BTH[..., None].to(logits_BTHM.dtype))
        if extra:
            logits_BTHM = torch.cat([sum(extra, logits_BTHM[..., :1]), logits_BTHM[..., 1:]], dim=-1)
        wide = torch.float32 if logits_BTHM.dtype in (torch.float16, torch.bfloat16) else None
        return logits_BTHM.softmax(dim=-1, dtype=wide).to(fed_BTD.dtype)
