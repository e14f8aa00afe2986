"""Softmax attention to keys and values in memory: what a window and full attention share."""

from __future__ import annotations

from typing import Any

from latte.decode.program import Builder, Kept
from latte.layers.rotary import Rotary
from latte.models.engine import Mixing

#: The tensors of a window's state.
RING = ("keys_BRGK", "values_BRGV", "sink_keys_BNGK", "sink_values_BNGV")
#: Those of attention to all tokens.
ALL = ("keys_BSGK", "values_BSGV", "live_BS")


def queries_keys_values(b: Builder, at: Mixing, x: str) -> None:
    """Activations "q", "k" and "v" of a mixer's heads."""
    config, queries = at.mixer.config, at.queries
    assert queries is not None
    H, G, K = config.num_heads, config.kv_heads, config.width
    parts = ((at.values, "v_proj", G, "v"), (queries, "q_proj", H, "q"), (queries, "k_proj", G, "k"))
    b.product(x, config.hidden_size, *((owner, name, n * K, b.room(y, n * K)) for owner, name, n, y in parts))
    if at.head_norms is not None:
        for norm, y, heads in zip(at.head_norms, ("q", "k"), (H, G), strict=True):
            b.norm(norm, y, y, K, groups=heads)


class Attention:
    """One layer's attention as stages, between its projections; ``values``: their heads and width, if not the usual."""

    def __init__(
        self,
        b: Builder,
        at: Mixing,
        paths: tuple[str, ...],
        rotary: Rotary | None,
        window: int | None = None,
        sinks: int = 0,
        scale: float | None = None,
        softcap: float | None = None,
        farthest: int | None = None,
        values: tuple[int, int] | None = None,
    ) -> None:
        config = at.mixer.config
        K, (G, V) = config.width, values or (config.kv_heads, config.width)
        self.b, self.heads = b, config.num_heads
        memory = b.memory(Kept(paths, window, sinks, G, K, V))
        self._near = None if rotary is None else b.angles(rotary)
        far = None if rotary is None or not sinks else b.angles(rotary, nearest=farthest)
        self._widths: dict[str, Any] = {"memory": memory, "groups": G, "key_width": K, "value_width": V}
        self._reach: dict[str, Any] = {"window": -1 if window is None else window}
        scale = K**-0.5 if scale is None else scale
        self._how: dict[str, Any] = {"scale": scale, "softcap": softcap, "sink_angles": far}
        b.partial = max(b.partial, self.heads * (V + 2))

    def shared(self) -> dict[str, Any]:
        """Fields that other stages with the same queries and memory have too."""
        how = {name: self._how[name] for name in ("scale", "softcap")}
        return {"angles": self._near, **self._widths, **how}

    def keep(self, beside: bool = False) -> None:
        """The token's key and value go to memory; attention waits for it."""
        self.b.stage("Keep", beside=beside, k="k", v="v", angles=self._near, **self._widths)

    def attend(self, y: str, log_norm: str | None = None) -> None:
        """Means of values go to ``y``, logs of their normalisers to ``log_norm``."""
        to: dict[str, Any] = {"y": y, "log_norm": log_norm, "heads": self.heads, **self._reach}
        self.b.stage("Attend", q="q", angles=self._near, **to, **self._widths, **self._how)
        self.b.stage("Merge", value_width=self._widths["value_width"], **to)
