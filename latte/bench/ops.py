"""The ops alone, against what else computes the same kind of thing on a CPU."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from latte import ops
from latte.bench.figures import Contender, Figure, Plan, sweep
from latte.bench.harness import Call, Skipped
from latte.bench.machine import Peaks
from latte.bench.worker import Worker

HEADS, LATENTS, WIDTH, WINDOW = 8, 32, 64, 128  # a head's latents and values; the layer is 512 wide
LATTE, LATTE_TORCH, LISTING = "latte", "latte (torch)", "jax scan (paper's listing)"
NEAR, BOTH, FLEX, SDPA = "window", "latents and window", "flex_attention (compiled)", "sdpa (full causal)"
SCAN, DECAY = "diagonal scan", "decay attention"


def run(plan: Plan, peaks: Peaks) -> list[Figure]:
    """Forward, then forward and backward, over all lengths."""
    figures = []
    for kind in ("forward", "training"):
        listing = _Listing(kind, plan.threads)
        try:
            figures += sweep("ops", kind, contenders(kind, listing), plan, peaks)
        finally:
            listing.close()
    return figures


def contenders(kind: str, listing: _Listing) -> Iterator[Contender]:
    """All ops of a pass; with gradients everything is done about three times."""
    training = kind == "training"
    times = 3.0 if training else 1.0
    wide = HEADS * WIDTH * 4  # bytes of a row of values

    def latents(length: int) -> float:
        return times * 4.0 * length * HEADS * LATENTS * WIDTH

    def near(length: int) -> float:
        return times * 4.0 * length * (WINDOW + 1) * HEADS * WIDTH

    def full(length: int) -> float:
        return times * 2.0 * length * (length + 1) * HEADS * WIDTH

    def one(call: Callable[..., Tensor], *widths: int) -> Callable[[int], Call]:
        return lambda length: prepared(call, length, widths, training)

    memory = 40.0 if training else 12.0
    yield Contender(
        LATTE,
        one(_latte, LATENTS, LATENTS, WIDTH),
        ours=True,
        memory=lambda length: memory * wide * length,
        flops=latents,
        bytes=lambda length: times * length * HEADS * 4.0 * (2 * LATENTS + 2 * WIDTH),
    )
    yield Contender(
        LATTE_TORCH,
        one(partial(_latte, backend="torch"), LATENTS, LATENTS, WIDTH),
        ours=True,
        memory=lambda length: 3 * memory * wide * length,
        flops=latents,
    )
    yield Contender(
        LISTING,
        listing.prepare,
        # The gradient keeps every token's state.
        memory=lambda length: length * HEADS * 4.0 * ((3.0 * LATENTS * WIDTH) if training else 256),
        flops=latents,
    )
    yield Contender(
        NEAR,
        one(_near, WIDTH, WIDTH, WIDTH),
        ours=True,
        memory=lambda length: memory * wide * length,
        flops=near,
        bytes=lambda length: times * length * wide * 4.0,
    )
    yield Contender(
        FLEX,
        lambda length: _flex(length, training),
        memory=lambda length: 10.0 * length * length + memory * wide * length,
        flops=near,
    )
    yield Contender(
        SDPA,
        one(_sdpa, WIDTH, WIDTH, WIDTH),
        growth=2.0,
        memory=lambda length: memory * wide * length,
        flops=full,
    )
    yield Contender(
        BOTH,
        one(_both, LATENTS, LATENTS, WIDTH, WIDTH, WIDTH),
        ours=True,
        memory=lambda length: 2 * memory * wide * length,
        flops=lambda length: latents(length) + near(length),
    )
    yield Contender(
        SCAN,
        one(_scan, WIDTH, WIDTH),
        ours=True,
        memory=lambda length: memory * wide * length,
        bytes=lambda length: times * length * wide * 3.0,
    )
    yield Contender(
        DECAY,
        one(_decay, LATENTS, LATENTS, WIDTH),
        ours=True,
        memory=lambda length: memory * wide * length,
        flops=latents,
    )


def prepared(call: Callable[..., Tensor], length: int, widths: tuple[int, ...], training: bool) -> Call:
    """``call`` on random (1, length, HEADS, width) inputs, or with the gradients to them all."""
    random = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, length, HEADS, width, generator=random, requires_grad=training) for width in widths]
    if training:
        with torch.no_grad():
            gradient = torch.randn(call(*inputs).shape, generator=random)
        return lambda: torch.autograd.grad(call(*inputs), inputs, gradient)

    def forward() -> Tensor:
        with torch.no_grad():
            return call(*inputs)

    return forward


# p may be any numbers for timing: it only weighs. k are logits.
def _latte(p: Tensor, k: Tensor, v: Tensor, backend: str | None = None) -> Tensor:
    return ops.causal_latte(p, k, v, backend=backend)[0]


def _near(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ops.window_attention(q, k, v, left=WINDOW)[0]


def _both(p: Tensor, latent_k: Tensor, v: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return _latte(p, latent_k, v) + _near(q, k, v)


def _scan(log_a: Tensor, b: Tensor) -> Tensor:
    return ops.diagonal_scan(-log_a.flatten(2).abs(), b.flatten(2))[0]


def _decay(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ops.decay_attention(q, k, v, -q.abs())[0]


def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def _flex(length: int, training: bool) -> Call:
    """Compiled flex_attention with a block mask of the window: built once, as a model would."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if training:
        raise Skipped("flex_attention has no gradient on a CPU")

    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query - key <= WINDOW)

    mask = create_block_mask(seen, None, None, length, length, device="cpu")
    torch._dynamo.reset()  # a new length is a new kernel; without this it would fall back to one for all lengths
    compiled = torch.compile(flex_attention, dynamic=False)
    q, k, v = (torch.randn(1, HEADS, length, WIDTH) for _ in range(3))

    def forward() -> Tensor:
        with torch.no_grad():
            return compiled(q, k, v, block_mask=mask)

    forward()
    return forward


class _Listing:
    """The paper's listing, in a process of its own that starts when it is first asked for."""

    def __init__(self, kind: str, threads: int) -> None:
        self.training, self.threads = kind == "training", threads
        self.worker: Worker | None = None

    def prepare(self, length: int) -> Call:
        if importlib.util.find_spec("jax") is None:
            raise Skipped("jax is not installed (pip install 'latte-attention[bench]')")
        if self.worker is None:
            self.worker = Worker("latte.bench.listing", self.threads)
        self.worker.prepare(length=length, training=self.training, heads=HEADS, latents=LATENTS, width=WIDTH)
        return self.worker.run

    def close(self) -> None:
        if self.worker is not None:
            self.worker.close()
