"""What the contract is run on: every registered mixer with every set of options it lists, small; and inputs for it."""

from __future__ import annotations

import dataclasses
import itertools
import os
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast
from unittest import mock

import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from latte.layers.linear import HeadNorm
from latte.mixers import HeadMixer, Mixer, MixerConfig, build, mixer_class, names
from latte.models import LatteCache, LatteConfig, LatteModel, ModelState
from latte.testing.numbers import generator, normal
from latte.tokens import Tokens

D, H = 8, 2
#: One token, odd lengths, and both sides of the edges of sub-blocks (16), chunks and runs (64).
LENGTHS = [1, 2, 5, 9, 15, 16, 17, 33, 63, 64, 65, 70]
SHORT = [1, 2, 5, 9, 17, 21]
DTYPES = [torch.float64, torch.float32]

#: The same few examples every time (make test-all draws more), reported as they were drawn: making them smaller would
#: take minutes.
deterministic = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=int(os.environ.get("LATTE_EXAMPLES", "8")),
    phases=[Phase.explicit, Phase.generate],
)
seeds = st.integers(0, 10**6)


class Subject(nn.Module):
    """What the contract is run on: it carries its own count of tokens, so that cutting a row is passing a state on."""

    name: str
    bidirectional: bool
    growth: str

    def forward(
        self, x: Tensor, state: ModelState | None = None, mask: Tensor | None = None, reset: Tensor | None = None
    ) -> tuple[Tensor, ModelState | None]:
        raise NotImplementedError("an abstract method")

    def init_state(self, x: Tensor) -> ModelState:
        raise NotImplementedError("an abstract method")

    def step(self, x: Tensor, state: ModelState) -> tuple[Tensor, ModelState | None]:
        y, after = self(x[:, None], state)
        return y[:, 0], after


class MixerSubject(Subject):
    """A mixer alone."""

    def __init__(self, mixer: Mixer) -> None:
        super().__init__()
        self.mixer, self.name, self.bidirectional = mixer, mixer.name, mixer.config.bidirectional
        self.growth = "none" if self.bidirectional else mixer.growth

    def forward(
        self, x: Tensor, state: ModelState | None = None, mask: Tensor | None = None, reset: Tensor | None = None
    ) -> tuple[Tensor, ModelState | None]:
        start = None if state is None else state.count_B
        tokens = Tokens.of(x, mask=mask, reset=reset, start=start, where=f"mixer {self.name!r}")
        y, after = self.mixer(x, None if state is None else state.layers[0][0], tokens)
        return y, None if after is None else ModelState(((after,),), tokens.count_B)

    def init_state(self, x: Tensor) -> ModelState:
        return ModelState(((self.mixer.init_state(x),),), torch.zeros(x.shape[0], dtype=torch.long))


class ModelSubject(Subject):
    """Two layers of a mixer and an MLP on a residual stream."""

    def __init__(self, model: LatteModel) -> None:
        super().__init__()
        self.model, self.bidirectional = model, model.config.bidirectional
        self.name = model.config.mixer

    def forward(
        self, x: Tensor, state: ModelState | None = None, mask: Tensor | None = None, reset: Tensor | None = None
    ) -> tuple[Tensor, ModelState | None]:
        cache = None if self.bidirectional else LatteCache(state)
        y = self.model(
            inputs_embeds=x, attention_mask=mask, reset=reset, past_key_values=cache, use_cache=cache is not None
        ).last_hidden_state
        # What stands at padding is the stream itself: it says nothing about the mixers.
        y = y if mask is None else torch.where(mask[..., None], y, 0.0)
        return y, None if cache is None else cache.state

    def init_state(self, x: Tensor) -> ModelState:
        states = tuple(tuple(mixer.init_state(x) for mixer in block.mixers) for block in cast(Any, self.model.layers))
        return ModelState(states, torch.zeros(x.shape[0], dtype=torch.long))


@dataclasses.dataclass(frozen=True)
class Case:
    """A mixer's name and one of its ``examples``; keys of MixerConfig stand among the options."""

    name: str
    example: tuple[tuple[str, Any], ...]
    layers: int = 0  # of a model; 0: the mixer alone

    def __str__(self) -> str:
        options = ", ".join(f"{key}={value}" for key, value in self.example)
        return f"{self.name}({options})" + ("" if not self.layers else f" x {self.layers}")

    @property
    def bidirectional(self) -> bool:
        return bool(dict(self.example).get("bidirectional", False))

    def build(self, dtype: torch.dtype = torch.float64, seed: int = 0) -> Any:
        """The mixer or model, small, with all its parameters moved away from where they start."""
        fields: dict[str, Any] = {}
        options: dict[str, Any] = {}
        for key, value in self.example:
            (fields if key in MixerConfig.__dataclass_fields__ else options)[key] = value
        with torch.random.fork_rng(devices=[]):  # where the parameters start is drawn from torch's own generator
            torch.manual_seed(seed)
            subject = (self._model if self.layers else self._mixer)(fields, options).to(dtype).eval()
        g = generator(seed + 1)
        with torch.no_grad():
            for parameter in subject.parameters():
                parameter.add_(0.5 * normal(g, *parameter.shape, dtype=parameter.dtype))
        return subject

    def _mixer(self, fields: dict[str, Any], options: dict[str, Any]) -> Subject:
        fields = {"hidden_size": D, "num_heads": H, "intermediate_size": 2 * D, **fields}
        return MixerSubject(build(self.name, MixerConfig(**fields, options=options)))

    def _model(self, fields: dict[str, Any], options: dict[str, Any]) -> Subject:
        renamed = {("num_attention_heads" if key == "num_heads" else key): value for key, value in fields.items()}
        fields = {"hidden_size": D, "num_attention_heads": H, "intermediate_size": 2 * D, "vocab_size": 3, **renamed}
        config = LatteConfig(mixer=self.name, mixer_options=options, num_hidden_layers=self.layers, **fields)
        return ModelSubject(LatteModel(config))

    def build_all(self) -> dict[torch.dtype, Any]:
        """The subject in every dtype, for comparing its outputs at that dtype's tolerance."""
        return {torch.float64: self.build(), torch.float32: self.build_narrow()}

    def build_narrow(self) -> Any:
        """The subject in float32; heads go to the output projection without a norm that would magnify rounding."""
        subject = self.build(torch.float32)
        for part in subject.modules():
            if isinstance(part, HeadMixer) and _norms_heads(part):
                part.project = types.MethodType(HeadMixer.project, part)  # type: ignore[method-assign]
            elif isinstance(part, HeadNorm):
                part.forward = types.MethodType(nn.Identity.forward, part)  # type: ignore[method-assign]
        return subject


def _norms_heads(mixer: HeadMixer) -> bool:
    """Whether ``project`` is not linear in the heads, as with a norm of each.

    Such a norm magnifies rounding without bound where a head cancels to nearly 0: the equation itself, token by token
    in float32, is then up to 1e-4 away from float64 and no two forms can agree to 1e-5, and under autocast whole
    outputs are lost. In float32 these mixers are compared without it: all the difference between forms goes through the
    heads. In float64, as a whole.
    """
    x = inputs(0, 1, 2, torch.float32)
    y, _ = mixer.mix_heads(x, mixer.values(x), None, Tokens.of(x))
    return not torch.allclose(mixer.project(2 * y, x), 2 * mixer.project(y, x))


def cases(name: str | None = None) -> list[Case]:
    """Every example of every registered mixer, or of one."""
    wanted = names() if name is None else [name]
    return [Case(n, tuple(example.items())) for n in wanted for example in mixer_class(n).examples]


def model_cases(name: str | None = None) -> list[Case]:
    """A two-layer model of every mixer, or of one, in each of its directions."""
    first: dict[tuple[str, bool], Case] = {}
    for case in cases(name):
        first.setdefault((case.name, case.bidirectional), dataclasses.replace(case, layers=2))
    return list(first.values())


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
    mixer: Subject,
    x: Tensor,
    cuts: Any,
    state: ModelState | None = None,
    mask: Tensor | None = None,
    reset: Tensor | None = None,
) -> tuple[Tensor, Any]:
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


def after(mixer: Subject, seed: int, B: int, T: int, dtype: torch.dtype = torch.float64) -> ModelState:
    """A state that has read ``T`` tokens."""
    return mixer(inputs(seed, B, T, dtype))[1].detach()


def steps(mixer: Subject, x: Tensor, state: Any) -> tuple[Tensor, Any]:
    outputs = []
    for t in range(x.shape[1]):
        y, state = mixer.step(x[:, t], state)
        outputs.append(y)
    return torch.stack(outputs, dim=1), state
