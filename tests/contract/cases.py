"""What the contract is run on: every registered mixer with every set of options it lists, small; and inputs for it."""

from __future__ import annotations

import dataclasses
import itertools
import os
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from latte.mixers import Mixer, MixerConfig, build, mixer_class, names
from latte.state import State
from tests.ops.helpers import generator, normal

D, H = 8, 2
#: One token, odd lengths, and both sides of the edges of sub-blocks (16), chunks and runs (64).
LENGTHS = [1, 2, 5, 9, 15, 16, 17, 33, 63, 64, 65, 70]
SHORT = [1, 2, 5, 9, 17, 21]
DTYPES = [torch.float64, torch.float32]

deterministic = settings(derandomize=True, database=None, deadline=None, max_examples=8)
seeds = st.integers(0, 10**6)


@dataclasses.dataclass(frozen=True)
class Case:
    """A mixer's name and one of its ``examples``; keys of MixerConfig stand among the options."""

    name: str
    example: tuple[tuple[str, Any], ...]

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{key}={value}' for key, value in self.example)})"

    @property
    def bidirectional(self) -> bool:
        return bool(dict(self.example).get("bidirectional", False))

    def build(self, dtype: torch.dtype = torch.float64, seed: int = 0) -> Mixer:
        """The mixer, small, with all its parameters moved away from where they start."""
        cls, fields, options = mixer_class(self.name), {}, {}
        for key, value in self.example:
            (fields if key in MixerConfig.__dataclass_fields__ else options)[key] = value
        if "num_latents" in getattr(cls.Options, "__dataclass_fields__", {}):
            options.setdefault("num_latents", 4 * H)
        config = MixerConfig(hidden_size=D, num_heads=H, **fields, options=options)
        with torch.random.fork_rng(devices=[]):  # where the parameters start is drawn from torch's own generator
            torch.manual_seed(seed)
            mixer = build(self.name, config).to(dtype)
        g = generator(seed + 1)
        with torch.no_grad():
            for parameter in mixer.parameters():
                parameter.add_(0.5 * normal(g, *parameter.shape, dtype=dtype))
        return mixer

    def build_all(self) -> dict[torch.dtype, Mixer]:
        """The mixer in every dtype, for comparing its outputs at that dtype's tolerance."""
        return {torch.float64: self.build(), torch.float32: self.build_narrow()}

    def build_narrow(self) -> Mixer:
        """The mixer in float32, giving its heads where a norm of each would magnify what narrow numbers round off."""
        mixer = self.build(torch.float32)
        if _norms_heads(mixer):
            mixer.project = types.MethodType(_heads, mixer)
        return mixer


def _norms_heads(mixer: Mixer) -> bool:
    """Whether ``project`` is not linear in the heads, as with a norm of each.

    Such a norm magnifies rounding without bound where a head cancels to nearly 0: the equation itself, token by token
    in float32, is then up to 1e-4 away from float64 and no two forms can agree to 1e-5, and under autocast whole
    outputs are lost. In float32 these mixers are compared on the heads, which all the difference between forms goes
    through; in float64, as a whole.
    """
    x = inputs(0, 1, 2, torch.float32)
    y, _ = mixer.mix(x, None, None, None, None)
    return not torch.allclose(mixer.project(2 * y, x), 2 * mixer.project(y, x))


def _heads(mixer: Mixer, y_BTHV: Tensor, x_BTD: Tensor) -> Tensor:
    return y_BTHV.flatten(2)


def cases(name: str | None = None) -> list[Case]:
    """Every example of every registered mixer, or of one."""
    wanted = names() if name is None else [name]
    return [Case(n, tuple(example.items())) for n in wanted for example in mixer_class(n).examples]


@contextmanager
def backend(name: str | None) -> Iterator[None]:
    """Every op that is asked to choose uses ``name``."""
    with mock.patch.dict(os.environ):
        os.environ.pop("LATTE_BACKEND", None)
        if name is not None:
            os.environ["LATTE_BACKEND"] = name
        yield


def inputs(seed: int, B: int, T: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return normal(generator(seed), B, T, D, dtype=dtype)


def pieces(
    mixer: Mixer,
    x: Tensor,
    cuts: Any,
    state: State | None = None,
    mask: Tensor | None = None,
    reset: Tensor | None = None,
) -> tuple[Tensor, State | None]:
    """The pieces between ``cuts``, one after the other, carrying the state."""
    edges = sorted({0, *(c for c in cuts if 0 < c < x.shape[1]), x.shape[1]})
    outputs = []
    for start, stop in itertools.pairwise(edges):
        part = (slice(None), slice(start, stop))
        y, state = mixer(
            x[part],
            state=state,
            mask=None if mask is None else mask[part],
            reset=None if reset is None else reset[part],
        )
        outputs.append(y)
    return torch.cat(outputs, dim=1), state


def after(mixer: Mixer, seed: int, B: int, T: int, dtype: torch.dtype = torch.float64) -> State:
    """A state that has read ``T`` tokens."""
    return mixer(inputs(seed, B, T, dtype))[1].detach()


def steps(mixer: Mixer, x: Tensor, state: State) -> tuple[Tensor, State]:
    outputs = []
    for t in range(x.shape[1]):
        y, state = mixer.step(x[:, t], state)
        outputs.append(y)
    return torch.stack(outputs, dim=1), state
