"""What a mixer is: the part of a layer that moves information between tokens, known by name.

A mechanism is one file: a dataclass of its options, a parameterisation, and a call of one of the ops. Registering it
is all it takes to train it, generate with it in constant memory, pad, pack, save its state, and test it.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from latte.shapes import Axes, require_divides
from latte.state import State


@dataclasses.dataclass(frozen=True)
class MixerConfig:
    """The layer that a mixer sits in, and the options of its own mechanism.

    Raises:
        ValueError: a width or count that is not positive, or does not divide.
    """

    hidden_size: int
    num_heads: int
    num_key_value_heads: int | None = None  # shared by groups of heads; None: as many as heads
    head_dim: int | None = None  # value width per head; None: hidden_size / num_heads
    bidirectional: bool = False
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6
    layer_index: int = 0
    num_layers: int = 1
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_heads", "num_layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least 1")
        if self.head_dim is None:
            require_divides("mixer", self.num_heads, self.hidden_size, "num_heads", "hidden_size")
        require_divides("mixer", self.kv_heads, self.num_heads, "num_key_value_heads", "num_heads")

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_key_value_heads is None else self.num_key_value_heads

    @property
    def width(self) -> int:
        """Value width per head."""
        return self.hidden_size // self.num_heads if self.head_dim is None else self.head_dim


class Weights(NamedTuple):
    """What a normalised mixer attends to: weights @ values, through the output projection, is its output."""

    tokens_BHTS: Tensor  # p(s|t)
    values_BSGV: Tensor
    latents_BTHM: Tensor | None  # p(l|t); with a window, slot 0 is the window


class Mixer(nn.Module):
    """Base of all mixers. Subclasses define :meth:`mix`, and the class attributes below where they differ.

    ``forward`` reads any number of tokens from any state; ``step`` reads one. Both are the same function of the
    tokens read so far, however they are cut.
    """

    Options: ClassVar[type] = types.SimpleNamespace
    #: Set by :func:`register`.
    name: ClassVar[str]
    #: Outputs are weighted means of values, and :meth:`weights` shows the weights.
    normalised: ClassVar[bool] = False
    #: Directions the mechanism is defined for.
    directions: ClassVar[tuple[str, ...]] = ("causal",)
    #: The state has one size, however many tokens were read.
    constant_state: ClassVar[bool] = True
    #: Option sets that the contract runs beside the defaults; keys of MixerConfig may stand among them.
    examples: ClassVar[tuple[Mapping[str, Any], ...]] = ({},)

    def __init__(self, config: MixerConfig) -> None:
        super().__init__()
        direction = "bidirectional" if config.bidirectional else "causal"
        if direction not in self.directions:
            raise ValueError(
                f"mixer {self.name!r} is {' and '.join(self.directions)} only, but {direction} was asked for"
            )
        self.config = config
        self.options: Any = parse_options(self.name, self.Options, config.options)

    def reset_parameters(self) -> None:
        """Draw anew the parameters that the mixer itself owns; its layers have their own ways."""

    def mix(
        self,
        x_BTD: Tensor,
        values_BTGV: Tensor | None,
        state: State | None,
        mask: Tensor | None,
        reset: Tensor | None,
    ) -> tuple[Tensor, State | None]:
        """Outputs per head (B, T, H, V) before the output projection, and the state after these tokens.

        A normalised mixer mixes ``values`` instead of its own where they are given.
        """
        raise NotImplementedError("an abstract method: every mixer defines it")

    def project(self, y_BTHV: Tensor, x_BTD: Tensor) -> Tensor:
        """From heads back to the model's width: (B, T, H, V) to (B, T, D)."""
        raise NotImplementedError("an abstract method: every mixer defines it")

    def init_state(self, like_BTD: Tensor) -> State:
        """The state before any token, for rows, dtype and device like ``like_BTD``'s."""
        raise NotImplementedError("an abstract method: every causal mixer defines it")

    def values(self, x_BTD: Tensor) -> Tensor:
        """What a normalised mixer takes means of: (B, T, G, V)."""
        raise NotImplementedError("an abstract method: every normalised mixer defines it")

    def forward(
        self,
        x_BTD: Tensor,
        *,
        state: State | None = None,
        mask: Tensor | None = None,
        reset: Tensor | None = None,
    ) -> tuple[Tensor, State | None]:
        """Mix (B, T, D) along T: outputs (B, T, D), and the state after these tokens (None if bidirectional).

        Raises:
            ValueError: an input of another rank or width, masks that do not fit, a state of another mixer or batch, or
                a state given to a bidirectional mixer.
        """
        self._check(x_BTD, state, mask, reset)
        return self._mix_and_project(x_BTD, state, mask, reset)

    def _mix_and_project(
        self, x_BTD: Tensor, state: State | None, mask: Tensor | None, reset: Tensor | None
    ) -> tuple[Tensor, State | None]:
        y_BTHV, after = self.mix(x_BTD, None, state, mask, reset)
        return self.project(y_BTHV, x_BTD), after

    def step(self, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
        """One token a row: (B, D) and a state give (B, D) and the next state."""
        y_B1D, after = self(x_BD[:, None], state=state)
        return y_B1D[:, 0], after

    def weights(self, x_BTD: Tensor, *, mask: Tensor | None = None, reset: Tensor | None = None) -> Weights:
        """The weights p(s|t) themselves: quadratic, for looking at.

        Raises:
            ValueError: the mechanism is not normalised, so it has none.
        """
        if not self.normalised:
            raise ValueError(f"mixer {self.name!r} is not normalised: it has no weights to show")
        self._check(x_BTD, None, mask, reset)
        B, T = x_BTD.shape[:2]
        values_BTGV = self.values(x_BTD)
        # The output is linear in the values, so unit vectors as values give the weights.
        units_BTGT = torch.eye(T, dtype=x_BTD.dtype, device=x_BTD.device)[:, None].expand(B, T, values_BTGV.shape[2], T)
        weights_BTHT, _ = self.mix(x_BTD, units_BTGT, None, mask, reset)
        return Weights(weights_BTHT.transpose(1, 2), values_BTGV, self.latents(x_BTD, mask=mask, reset=reset))

    def latents(self, x_BTD: Tensor, *, mask: Tensor | None = None, reset: Tensor | None = None) -> Tensor | None:
        """p(l|t) (B, T, H, slots) for mechanisms that have latents, None for others."""
        return None

    def flops_per_token(self, context: int) -> int:
        """Multiply-adds times two of one token's forward pass, given how many tokens stand before it."""
        return 2 * sum(parameter.numel() for parameter in self.parameters() if parameter.dim() > 1)

    def _check(self, x_BTD: Tensor, state: State | None, mask: Tensor | None, reset: Tensor | None) -> None:
        axes = Axes(f"mixer {self.name!r}")
        axes.bind("x", x_BTD, "BTD")
        if x_BTD.shape[2] != self.config.hidden_size:
            raise ValueError(
                f"mixer {self.name!r}: x has width {x_BTD.shape[2]}, expected hidden_size {self.config.hidden_size}"
            )
        own = next(self.parameters())
        if x_BTD.device != own.device:
            raise ValueError(f"mixer {self.name!r}: x is on {x_BTD.device}, expected {own.device} as its weights")
        if x_BTD.dtype != own.dtype and not torch.is_autocast_enabled(own.device.type):
            raise ValueError(f"mixer {self.name!r}: x is {x_BTD.dtype}, expected {own.dtype} as its weights")
        axes.flags("mask", mask)
        axes.flags("reset", reset)
        if state is not None and self.config.bidirectional:
            raise ValueError(f"mixer {self.name!r}: a state was given, expected none: it is bidirectional")

    def extra_repr(self) -> str:
        return f"{self.name!r}, {self.options}"


M = TypeVar("M", bound=type[Mixer])
_REGISTRY: dict[str, type[Mixer]] = {}


def register(name: str) -> Callable[[M], M]:
    """Class decorator that makes a mixer known by ``name``.

    Raises:
        ValueError: another mixer has that name.
    """

    def add(cls: M) -> M:
        known = _REGISTRY.get(name)
        if known is not None and known.__qualname__ != cls.__qualname__:
            raise ValueError(f"mixer {name!r} is registered already, by {known.__module__}.{known.__qualname__}")
        cls.name = name
        _REGISTRY[name] = cls
        return cls

    return add


def names() -> list[str]:
    """Names of all registered mixers."""
    return sorted(_REGISTRY)


def mixer_class(name: str) -> type[Mixer]:
    """The class registered as ``name``.

    Raises:
        ValueError: no mixer has that name.
    """
    if name not in _REGISTRY:
        raise ValueError(f"unknown mixer {name!r}{_hint(name, names())}, expected one of {', '.join(names())}")
    return _REGISTRY[name]


def build(name: str, config: MixerConfig) -> Mixer:
    """A new mixer of that name.

    Raises:
        ValueError: an unknown name or option, or sizes that do not fit.
    """
    return mixer_class(name)(config)


def parse_options(mixer: str, options_class: type, given: Mapping[str, Any]) -> Any:
    """``given`` as the mixer's own dataclass of options, names and types checked."""
    if not dataclasses.is_dataclass(options_class):
        if given:
            raise ValueError(f"mixer {mixer!r} has no options, but {', '.join(map(repr, given))} was given")
        return options_class()
    hints = typing.get_type_hints(options_class)
    for name, value in given.items():
        if name not in hints:
            known = ", ".join(sorted(hints))
            raise ValueError(f"mixer {mixer!r} has no option {name!r}{_hint(name, hints)}, expected one of {known}")
        if not _fits(value, hints[name]):
            raise ValueError(f"mixer {mixer!r}: option {name} is {value!r}, expected {_describe(hints[name])}")
    return options_class(**given)


def _hint(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _fits(value: Any, hint: Any) -> bool:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, part) for part in typing.get_args(hint))
    if origin is Literal:
        return value in typing.get_args(hint)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return value is None if hint is type(None) else isinstance(value, hint)


def _describe(hint: Any) -> str:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_describe(part) for part in typing.get_args(hint))
    if origin is Literal:
        return "one of " + ", ".join(map(repr, typing.get_args(hint)))
    return "None" if hint is type(None) else hint.__name__
