"""What the tests of ops share: random inputs, closeness, and one description of every causal op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from latte import ops
from latte.layers.rotary import Rotary
from latte.models import ModelState
from latte.ops.registry import NATIVE_OPS
from latte.testing.numbers import assert_close, assert_states_close, flags, generator, normal
from latte.tokens import Tokens

__all__ = ["CAUSAL", "LENGTHS", "Causal", "assert_close", "assert_states_close", "flags", "generator", "normal"]

#: One token, odd lengths, and both sides of the edges of sub-blocks (16), chunks and runs (64).
LENGTHS = [1, 2, 3, 5, 8, 15, 16, 17, 33, 63, 64, 65, 81]


class Causal(NamedTuple):
    """One causal op with some of its options: how to make its inputs (tokens along axis 1), and how to call it."""

    op: str
    make: Callable[[torch.Generator, int, int, torch.dtype], list[Tensor]]
    call: Callable[..., tuple[Tensor, Any]]

    def run(
        self,
        inputs: list[Tensor],
        backend: str | None = None,
        state: ModelState | None = None,
        mask: Tensor | None = None,
        reset: Tensor | None = None,
    ) -> tuple[Tensor, ModelState]:
        """Outputs, and the state with the number of tokens that it has read."""
        start = None if state is None else state.count_B
        tokens = Tokens.of(inputs[0], mask=mask, reset=reset, start=start)
        before = None if state is None else state.layers[0][0]
        y, *_, after = self.call(*inputs, backend=backend, state=before, tokens=tokens)
        return y, ModelState(((after,),), tokens.count_B)

    @property
    def backends(self) -> list[str]:
        """The reference is what the others are compared with."""
        return ["torch", "native"] if self.op in NATIVE_OPS else ["torch"]


def _latte(size: float) -> Causal:
    def make(g: torch.Generator, B: int, T: int, dtype: torch.dtype) -> list[Tensor]:
        p, k, v = normal(g, B, T, 2, 3).softmax(-1), size * normal(g, B, T, 2, 3), normal(g, B, T, 2, 5)
        return [x.to(dtype) for x in (p, k, v)]

    return Causal("causal_latte", make, ops.causal_latte)


def _window(left: int, groups: int = 2, sinks: int = 0, softcap: float | None = None, turned: bool = False) -> Causal:
    def make(g: torch.Generator, B: int, T: int, dtype: torch.dtype) -> list[Tensor]:
        shapes = [(B, T, 4, 6), (B, T, groups, 6), (B, T, groups, 5)] + [(B, T, 4, 6)] * turned
        return [normal(g, *shape, dtype=dtype) * (2 if i == 0 else 1) for i, shape in enumerate(shapes)]

    def call(q: Tensor, k: Tensor, v: Tensor, sink_query: Tensor | None = None, **kwargs: Any) -> tuple[Tensor, Any]:
        return ops.window_attention(
            q, k, v, left=left, sinks=sinks, softcap=softcap, sink_query=sink_query, scale=0.7, **kwargs
        )

    return Causal("window_attention", make, call)


def _kept(
    left: int,
    kept: int,
    groups: int = 2,
    sinks: int = 0,
    softcap: float | None = None,
    reach: int | None = None,
    received: float | None = None,
) -> Causal:
    """With a reach queries and keys are turned by their places."""
    turning = Rotary((1.0, 0.3, 0.02), stretch=1.2)

    def make(g: torch.Generator, B: int, T: int, dtype: torch.dtype) -> list[Tensor]:
        shapes = [(B, T, 4, 6), (B, T, groups, 6), (B, T, groups, 5), (B, T, groups)]
        return [normal(g, *shape, dtype=dtype) * (2 if i == 0 else 1) for i, shape in enumerate(shapes)]

    def call(q: Tensor, k: Tensor, v: Tensor, s: Tensor, *, tokens: Tokens, **kwargs: Any) -> tuple[Tensor, Any]:
        far, weight = None, torch.linspace(-0.3, 0.2, groups).to(q.dtype)
        if reach is not None:
            far = ops.Far(reach, turning.turn_to(q, torch.full_like(tokens.place_BT, reach)), turning.turn_back)
            q, k = turning.turn(q, tokens), turning.turn(k, tokens)
        options = {"left": left, "kept": kept, "sinks": sinks, "softcap": softcap, "scale": 0.7, "weight": weight}
        got = None if received is None else torch.full_like(weight, received)
        return ops.kept_attention(q, k, v, s, far=far, received=got, tokens=tokens, **options, **kwargs)

    return Causal("kept_attention", make, call)


def _scan(strength: float) -> Causal:
    def make(g: torch.Generator, B: int, T: int, dtype: torch.dtype) -> list[Tensor]:
        return [-strength * normal(g, B, T, 5, dtype=dtype).abs(), normal(g, B, T, 5, dtype=dtype)]

    return Causal("diagonal_scan", make, ops.diagonal_scan)


def _complex_scan(strength: float, constant: bool) -> Causal:
    def make(g: torch.Generator, B: int, T: int, dtype: torch.dtype) -> list[Tensor]:
        inputs = [normal(g, B, T, 5, 2, dtype=dtype)]
        if not constant:
            inputs += [-strength * normal(g, B, T, 5, dtype=dtype).abs(), 3 * normal(g, B, T, 5, dtype=dtype)]
        return inputs

    def call(b: Tensor, log_r: Tensor | None = None, theta: Tensor | None = None, **kwargs: Any) -> tuple[Tensor, Any]:
        if log_r is None or theta is None:
            g = generator(0)
            log_r, theta = -strength * normal(g, 5, dtype=b.dtype).abs(), 3 * normal(g, 5, dtype=b.dtype)
        return ops.complex_scan(b, log_r, theta, **kwargs)

    return Causal("complex_scan", make, call)


def _state_space(strength: float) -> Causal:
    def make(g: torch.Generator, B: int, T: int, dtype: torch.dtype) -> list[Tensor]:
        return [normal(g, B, T, 3, dtype=dtype)]

    def call(z: Tensor, **kwargs: Any) -> tuple[Tensor, Any]:
        g = generator(0)
        model = (-strength * normal(g, 3, 4).abs(), 3 * normal(g, 3, 4), normal(g, 3, 4, 2))
        return ops.state_space(z, *model, **kwargs)

    return Causal("state_space", make, call)


def _conv(size: int, bias: bool) -> Causal:
    def make(g: torch.Generator, B: int, T: int, dtype: torch.dtype) -> list[Tensor]:
        return [normal(g, B, T, 5, dtype=dtype)]

    def call(x: Tensor, **kwargs: Any) -> tuple[Tensor, Any]:
        g = generator(size)
        weight, offset = normal(g, 5, size, dtype=x.dtype), normal(g, 5, dtype=x.dtype)
        return ops.causal_conv(x, weight, offset if bias else None, **kwargs)

    return Causal("causal_conv", make, call)


def _decay(axes: str, strength: float = 1.0) -> Causal:
    sizes = {"H": 2, "K": 3}

    def make(g: torch.Generator, B: int, T: int, dtype: torch.dtype) -> list[Tensor]:
        inputs = [normal(g, B, T, 2, width, dtype=dtype) for width in (3, 3, 5)]
        if axes.startswith("BT"):
            inputs.append(-strength * normal(g, B, T, *(sizes[a] for a in axes[2:]), dtype=dtype).abs())
        return inputs

    def call(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None = None, **kwargs: Any) -> tuple[Tensor, Any]:
        if axes == "H":
            log_decay = torch.tensor([-0.03, -1.5], dtype=q.dtype)
        return ops.decay_attention(q, k, v, log_decay, **kwargs)

    return Causal("decay_attention", make, call)


def _delta(axes: str, strength: float = 1.0, free: bool = False) -> Causal:
    """Unit keys, as all mechanisms have them; ``free``: erases along one direction what it reads along another."""
    sizes = {"H": 2, "K": 3}

    def make(g: torch.Generator, B: int, T: int, dtype: torch.dtype) -> list[Tensor]:
        inputs = [normal(g, B, T, 2, width, dtype=dtype) for width in (3, 3, 5, 3)]
        if axes:
            inputs.append(-strength * normal(g, B, T, *(sizes[a] for a in axes[2:]), dtype=dtype).abs())
        return inputs

    def call(
        q: Tensor, k: Tensor, v: Tensor, rate: Tensor, log_decay: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Any]:
        unit, rate = torch.nn.functional.normalize(k, dim=-1), rate.sigmoid()
        if free:
            return ops.delta_attention(q, k, v, -unit, rate * unit, log_decay, **kwargs)
        faded = unit
        if log_decay is not None:
            faded = unit * (log_decay if log_decay.dim() == 4 else log_decay[..., None]).exp()
        return ops.delta_attention(q, 2 * rate[..., :1] * unit, v, faded, None, log_decay, **kwargs)

    return Causal("delta_attention", make, call)


def _bonus(strength: float) -> Causal:
    def make(g: torch.Generator, B: int, T: int, dtype: torch.dtype) -> list[Tensor]:
        q, k, v, gate = (normal(g, B, T, 2, width, dtype=dtype) for width in (3, 3, 5, 3))
        return [q, k, v, -strength * gate.abs()]

    def call(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, **kwargs: Any) -> tuple[Tensor, Any]:
        return ops.bonus_attention(q, k, v, log_decay, normal(generator(2), 2, 3, dtype=q.dtype), **kwargs)

    return Causal("bonus_attention", make, call)


def _log_linear(strength: float) -> Causal:
    def make(g: torch.Generator, B: int, T: int, dtype: torch.dtype) -> list[Tensor]:
        q, k, v, weights = (normal(g, B, T, 2, width, dtype=dtype) for width in (3, 3, 5, 8))
        return [q, k, v, -strength * normal(g, B, T, 2, dtype=dtype).abs(), weights]

    return Causal("log_linear_attention", make, ops.log_linear_attention)


def _log_linear_delta() -> Causal:
    def call(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, weights: Tensor, **kwargs: Any) -> tuple[Tensor, Any]:
        unit = torch.nn.functional.normalize(k, dim=-1)
        erase = unit * log_decay.exp()[..., None]
        return ops.log_linear_attention(q, 0.7 * unit, v, log_decay, weights, erase, **kwargs)

    return Causal("log_linear_attention", _log_linear(0.3).make, call)


def _softmax(groups: int) -> Causal:
    def make(g: torch.Generator, B: int, T: int, dtype: torch.dtype) -> list[Tensor]:
        return [normal(g, B, T, heads, width, dtype=dtype) for heads, width in ((4, 6), (groups, 6), (groups, 5))]

    return Causal("softmax_attention", make, ops.softmax_attention)


def _laplace(left: int | None) -> Causal:
    def make(g: torch.Generator, B: int, T: int, dtype: torch.dtype) -> list[Tensor]:
        return [normal(g, B, T, 2, width, dtype=dtype) for width in (3, 3, 5)]

    def call(q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> tuple[Tensor, Any]:
        return ops.laplace_attention(q, k, v, left=left, **kwargs)

    return Causal("laplace_attention", make, call)


def _selective(strength: float) -> Causal:
    def make(g: torch.Generator, B: int, T: int, dtype: torch.dtype) -> list[Tensor]:
        x, delta, B_, C = (normal(g, B, T, width, dtype=dtype) for width in (5, 5, 3, 3))
        return [x, delta.abs(), B_, C]

    def call(x: Tensor, delta: Tensor, B: Tensor, C: Tensor, **kwargs: Any) -> tuple[Tensor, Any]:
        A = -strength * normal(generator(0), 5, 3, dtype=x.dtype).abs()
        return ops.selective_scan(x, delta, A, B, C, **kwargs)

    return Causal("selective_scan", make, call)


def _wkv(size: float, pace: float) -> Causal:
    def make(g: torch.Generator, B: int, T: int, dtype: torch.dtype) -> list[Tensor]:
        return [size * normal(g, B, T, 5, dtype=dtype), normal(g, B, T, 5, dtype=dtype)]

    def call(k: Tensor, v: Tensor, **kwargs: Any) -> tuple[Tensor, Any]:
        g = generator(1)
        decay, bonus = pace * normal(g, 5, dtype=k.dtype).abs(), normal(g, 5, dtype=k.dtype)
        return ops.wkv(k, v, decay, bonus, **kwargs)

    return Causal("wkv", make, call)


def _log_sum(size: float, pace: float) -> Causal:
    def make(g: torch.Generator, B: int, T: int, dtype: torch.dtype) -> list[Tensor]:
        return [size * normal(g, B, T, 5, dtype=dtype), pace * normal(g, B, T, 5, dtype=dtype).abs()]

    def call(k: Tensor, decay: Tensor, **kwargs: Any) -> tuple[Tensor, Any]:
        share, log_kept, after = ops.log_sum(k, decay, **kwargs)
        return torch.cat([share, log_kept.expm1()], dim=-1), after

    return Causal("log_sum", make, call)


def _kalman(pace: float) -> Causal:
    def make(g: torch.Generator, B: int, T: int, dtype: torch.dtype) -> list[Tensor]:
        v, noise, k, q = (normal(g, B, T, width, dtype=dtype) for width in (5, 5, 3, 3))
        return [v, noise.abs() + 0.01, k, q]

    def call(*inputs: Tensor, **kwargs: Any) -> tuple[Tensor, Any]:
        g = generator(1)
        a, p = torch.exp(-pace * normal(g, 5, 3, dtype=inputs[0].dtype).abs()), normal(g, 5, 3, dtype=inputs[0].dtype)
        return ops.kalman(*inputs, a, 0.1 * p.abs() + 1e-3, **kwargs)

    return Causal("kalman", make, call)


CAUSAL = {
    "kalman": _kalman(0.1),
    "kalman, strong": _kalman(5.0),
    "log_sum": _log_sum(1.0, 0.1),
    "log_sum, logits of 1e4": _log_sum(1e4, 1.0),
    "log_sum, strong": _log_sum(3.0, 50.0),
    "causal_latte": _latte(1.0),
    "causal_latte, logits of 30": _latte(30.0),
    "causal_latte, logits of 1e4": _latte(1e4),
    "window_attention, left 0": _window(0),
    "window_attention, left 3, 1 group": _window(3, groups=1),
    "window_attention, left 5, 4 groups, softcap": _window(5, groups=4, softcap=2.0),
    "window_attention, left 20": _window(20),
    "window_attention, left 4, 2 sinks": _window(4, sinks=2),
    "window_attention, left 0, 1 sink": _window(0, sinks=1),
    "window_attention, left 3, 5 sinks, softcap, turned queries": _window(3, sinks=5, softcap=1.5, turned=True),
    "kept_attention, left 0, 1 kept": _kept(0, 1),
    "kept_attention, left 3, 4 kept, 1 group": _kept(3, 4, groups=1),
    "kept_attention, left 2, 3 kept, 2 sinks, softcap": _kept(2, 3, sinks=2, softcap=2.0),
    "kept_attention, left 5, 20 kept, 4 groups": _kept(5, 20, groups=4),
    "kept_attention, left 2, 5 kept, 1 sink, reach 6": _kept(2, 5, sinks=1, reach=6),
    "kept_attention, left 0, 3 kept, reach 1": _kept(0, 3, reach=1),
    "kept_attention, left 3, 4 kept, 1 sink, received": _kept(3, 4, sinks=1, received=1.5),
    "kept_attention, left 0, 2 kept, softcap, received": _kept(0, 2, groups=1, softcap=2.0, received=0.7),
    "diagonal_scan": _scan(0.3),
    "diagonal_scan, strong": _scan(50.0),
    "complex_scan": _complex_scan(0.3, constant=False),
    "complex_scan, strong": _complex_scan(50.0, constant=False),
    "complex_scan, constant": _complex_scan(0.03, constant=True),
    "state_space": _state_space(0.03),
    "state_space, strong": _state_space(50.0),
    "causal_conv, 1 tap": _conv(1, bias=False),
    "causal_conv, 4 taps, bias": _conv(4, bias=True),
    "decay_attention, none": _decay(""),
    "decay_attention, per head": _decay("H"),
    "decay_attention, per token": _decay("BTH"),
    "decay_attention, per channel": _decay("BTHK"),
    "decay_attention, per channel, strong": _decay("BTHK", 200.0),
    "bonus_attention": _bonus(0.3),
    "bonus_attention, strong": _bonus(200.0),
    "delta_attention, no decay": _delta(""),
    "delta_attention, per token": _delta("BTH"),
    "delta_attention, per channel": _delta("BTHK"),
    "delta_attention, per channel, strong": _delta("BTHK", 200.0),
    "delta_attention, diagonal and low rank": _delta("BTHK", 0.3, free=True),
    "log_linear_attention": _log_linear(0.05),
    "log_linear_attention, delta rule": _log_linear_delta(),
    "log_linear_attention, strong": _log_linear(50.0),
    "softmax_attention": _softmax(4),
    "softmax_attention, 2 groups": _softmax(2),
    "laplace_attention": _laplace(None),
    "laplace_attention, left 0": _laplace(0),
    "laplace_attention, left 20": _laplace(20),
    "selective_scan": _selective(1.0),
    "selective_scan, strong": _selective(200.0),
    "wkv": _wkv(1.0, 0.1),
    "wkv, logits of 1e4": _wkv(1e4, 1.0),
    "wkv, strong": _wkv(3.0, 50.0),
}
