"""Sliding-window attention as a part of mixers: projections, rotary encoding, and the window op."""

from __future__ import annotations

from torch import Tensor, nn

from latte.layers.config import MixerConfig
from latte.layers.linear import Linear, split_heads
from latte.layers.rotary import Rotary, rotary
from latte.ops import WindowState, window_attention
from latte.shapes import require_divides
from latte.tokens import Tokens


class Window(nn.Module):
    """p_0(s|t), equation (17): softmax attention to the last ``size`` tokens and the present one; values from outside.

    Sinks are looked at from place min(t, sinks + size): as if right behind a full window, however far they are, because
    a pretrained model was trained on no other distances.
    """

    def __init__(
        self, config: MixerConfig, size: int, sinks: int = 0, softcap: float | None = None, rope: bool = True
    ) -> None:
        super().__init__()
        if size < 0 or sinks < 0:
            raise ValueError(f"window is {size} and sinks is {sinks}, expected at least 0 for both")
        if sinks and config.bidirectional:
            raise ValueError(f"sinks is {sinks}, expected 0: a bidirectional window has none")
        if rope:
            require_divides("rotary encoding", 2, config.width, "channels in a pair", "head width")
        self.config, self.size, self.sinks, self.softcap, self.rope = config, size, sinks, softcap, rope
        self._rotary: Rotary | None = rotary(config.width, config.rope_theta) if rope else None
        self.scale: float | None = None  # of queries times keys; None: 1/sqrt(width)
        self._build_projections()

    def _build_projections(self) -> None:
        config = self.config
        self.q_proj = Linear(config.hidden_size, config.num_heads * config.width)
        self.k_proj = Linear(config.hidden_size, config.kv_heads * config.width)

    def queries_and_keys(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """(B, T, H, K) and (B, T, G, K), not turned by their places yet."""
        return split_heads(self.q_proj(x_BTD), self.config.num_heads), split_heads(
            self.k_proj(x_BTD), self.config.kv_heads
        )

    @property
    def rotary(self) -> Rotary:
        assert self._rotary is not None, "a window with rope; a pretrained model sets it before the first token"
        return self._rotary

    def init_state(self, like_BTD: Tensor) -> WindowState:
        width = self.config.width
        return WindowState.empty(like_BTD, self.size, self.sinks, self.config.kv_heads, width, width)

    def forward(
        self, x_BTD: Tensor, v_BTGV: Tensor, state: WindowState | None, tokens: Tokens
    ) -> tuple[Tensor, Tensor, WindowState | None]:
        """Means of values (B, T, H, V), logs of their normalisers (B, T, H), and the state after these tokens."""
        return self.attend(*self.queries_and_keys(x_BTD), v_BTGV, state, tokens)

    def attend(
        self, q_BTHK: Tensor, k_BTGK: Tensor, v_BTGV: Tensor, state: WindowState | None, tokens: Tokens
    ) -> tuple[Tensor, Tensor, WindowState | None]:
        """The same, given queries and keys."""
        sink_query = None
        if self.rope:
            if self.sinks:
                nearest = tokens.place_BT.clamp(max=self.sinks + self.size)
                sink_query = self.rotary.turn_to(q_BTHK, nearest)
            q_BTHK, k_BTGK = (self.rotary.turn(x, tokens) for x in (q_BTHK, k_BTGK))
        return window_attention(
            q_BTHK,
            k_BTGK,
            v_BTGV,
            left=self.size,
            right=self.size if self.config.bidirectional else 0,
            scale=self.scale,
            softcap=self.softcap,
            sinks=self.sinks,
            sink_query=sink_query,
            state=state,
            tokens=tokens,
        )
