"""What a mixer is: the part of a layer that moves information between tokens, known by name.

A mechanism is one file: a dataclass of its options, a parameterisation, and a call of one of the ops. Being there is
all it takes to train it, generate with it in constant memory, pad, pack, save its state, look into it, and test it.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from latte.layers.config import MixerConfig
from latte.layers.marks import Marked, working_parameter
from latte.mixers.options import parse_options
from latte.modes import intercepted, transformed
from latte.shapes import Axes, given
from latte.state import State, require_state
from latte.tokens import Tokens, require_tokens


class Size(NamedTuple):
    """Widths that presets are made of; ``latents`` and ``window`` are for the mixers that have them."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    vocab_size: int
    latents: int
    window: int
    dropout: float = 0.0


#: Fields of a model's configuration for a size; ``mixer`` is filled in with the mixer's own name.
Preset = Callable[[Size], Mapping[str, Any]]


class View(NamedTuple):
    """Something to look at in a mixer: what it computed for each token, before it was used.

    Attributes:
        kind: ``"weights"`` (B, H, T, S), of token s for token t; or ``"channels"`` (B, T, H, C), numbers of a token.
        values: the numbers.
        normalised: they are at least 0 and sum to 1 along the last axis.
    """

    kind: str
    values: Tensor
    normalised: bool


class Mixer(Marked):
    """Base of all mixers. Subclasses define :meth:`mix`, and the class attributes below where they differ.

    ``forward`` reads any number of tokens from any state; ``step`` reads one. Both are the same function of the
    tokens read so far, however they are cut.
    """

    Options: ClassVar[type] = types.SimpleNamespace
    #: Set by :func:`latte.mixers.register`.
    name: ClassVar[str]
    #: Directions the mechanism is defined for.
    directions: ClassVar[tuple[str, ...]] = ("causal",)
    #: The first token of a document gives 0, whatever it is.
    silent_start: ClassVar[bool] = False
    #: Complete sets of options for small layers, which the contract runs; keys of MixerConfig may stand among them.
    examples: ClassVar[tuple[Mapping[str, Any], ...]] = ({},)
    #: Named models made of this mixer; None: one of the mixer's own name, with its default options.
    presets: ClassVar[Mapping[str, Preset] | None] = None
    #: The paper's figures for a preset: perplexity on OpenWebText and millions of parameters.
    published: ClassVar[Mapping[str, tuple[float, int]]] = {}

    def __init__(self, config: MixerConfig) -> None:
        super().__init__()
        direction = "bidirectional" if config.bidirectional else "causal"
        if direction not in self.directions:
            raise ValueError(
                f"mixer {self.name!r} is {' and '.join(self.directions)} only, but {direction} was asked for"
            )
        self.config = config
        self.options: Any = parse_options(self.name, self.Options, config.options)
        self._expected: tuple[tuple[Any, ...], State] | None = None

    def mix(self, x_BTD: Tensor, state: Any, tokens: Tokens) -> tuple[Tensor, State | None]:
        """Outputs (B, T, D) and the state after these tokens; ``state`` is of :meth:`init_state`'s kind.

        A bidirectional mixer gets None and returns None.
        """
        raise NotImplementedError("an abstract method: every mixer defines it")

    def mix_carrying(
        self, x_BTD: Tensor, state: Any, tokens: Tokens, carried: dict[str, Tensor]
    ) -> tuple[Tensor, State | None]:
        """As :meth:`mix`, which most mixers define alone, beside what earlier layers computed of the same tokens.

        ``carried`` holds tensors (B, T, ...) by name. A mixer may add one, which later layers then find there. A
        bidirectional mixer reads rows as a whole: it may replace one, and hand on tensors of any shape.
        """
        return self.mix(x_BTD, state, tokens)

    def init_state(self, like_BTD: Tensor) -> State:
        """The state before any token, for rows and dtype like ``like_BTD``'s: the specification of all others."""
        raise NotImplementedError("an abstract method: every causal mixer defines it")

    def reset_parameters(self) -> None:
        """Draw anew the parameters that the mixer itself owns; its layers have their own ways."""

    def look(self, x_BTD: Tensor, tokens: Tokens | None = None) -> dict[str, View]:
        """What there is to look at, by name: quadratic where weights are among it."""
        return {}

    def forward(
        self,
        x_BTD: Tensor,
        state: State | None = None,
        tokens: Tokens | None = None,
        carried: dict[str, Tensor] | None = None,
    ) -> tuple[Tensor, State | None]:
        """Mix (B, T, D) along T: outputs (B, T, D), and the state after these tokens (None if bidirectional).

        ``tokens`` describes padding and documents; a mechanism that depends on places needs it beside a state, to know
        how many tokens that has read. ``carried`` is what the layers of a model hand on: see :meth:`mix_carrying`.

        Raises:
            ValueError: an input of another rank or width, tokens that do not fit, a state of another mixer or batch, a
                state given to a bidirectional mixer, or a :meth:`mix` that returned something else than it must.
        """
        where = f"mixer {self.name!r}"
        self._check(where, x_BTD, state)
        tokens = require_tokens(where, tokens, x_BTD, state)
        carried = {} if carried is None else carried
        if self.config.bidirectional:
            return self._checked(x_BTD, None, *self.mix_carrying(x_BTD, None, tokens, carried))
        if state is None:
            empty = self.init_state(x_BTD)
            return self._checked(x_BTD, empty, *self.mix_carrying(x_BTD, empty, tokens, carried))
        require_state(where, state, self.expected_state(x_BTD))
        return self._checked(x_BTD, state, *self.mix_carrying(x_BTD, state, tokens, carried))

    def step(self, x_BD: Tensor, state: State, tokens: Tokens | None = None) -> tuple[Tensor, State | None]:
        """One token a row: (B, D) and a state give (B, D) and the next state."""
        y_B1D, after = self(x_BD[:, None], state, tokens)
        return y_B1D[:, 0], after

    @property
    def growth(self) -> str:
        """How the state grows with the number of tokens: ``"constant"``, ``"log"`` or ``"linear"``."""
        return self.expected_state(torch.empty(1, 1, self.config.hidden_size, device="meta")).whole_growth

    def expected_state(self, like_BTD: Tensor) -> State:
        """What a state for such an input looks like, kept from call to call, without memory."""
        if torch.compiler.is_compiling() or transformed() or intercepted():  # what is made now must not be kept
            return self.init_state(like_BTD)
        key = (like_BTD.shape[0], like_BTD.dtype, like_BTD.device)
        if self._expected is None or self._expected[0] != key:
            with torch.inference_mode(False), torch.no_grad():
                shapes = self.init_state(like_BTD).map(lambda tensor: tensor.new_empty(()).expand(tensor.shape))
            self._expected = (key, shapes)
        return self._expected[1]

    def flops_per_token(self, context: int) -> int:
        """Multiply-adds times two of one token's forward pass, given how many tokens stand before it."""
        return 2 * sum(parameter.numel() for parameter in self.parameters() if parameter.dim() > 1)

    def _check(self, where: str, x_BTD: Tensor, state: State | None) -> None:
        Axes(where).bind("x", x_BTD, "BTD")
        if x_BTD.shape[2] != self.config.hidden_size:
            raise ValueError(f"{where}: x has width {x_BTD.shape[2]}, expected hidden_size {self.config.hidden_size}")
        own = working_parameter(self)
        # Weights on the meta device are offloaded: hooks bring them where the input is when they are used.
        if own is not None and own.device.type != "meta" and x_BTD.device != own.device:
            raise ValueError(f"{where}: x is on {x_BTD.device}, expected {own.device} as its weights")
        if own is not None and x_BTD.dtype != own.dtype and not torch.is_autocast_enabled(own.device.type):
            raise ValueError(f"{where}: x is {x_BTD.dtype}, expected {own.dtype} as its weights")
        if state is not None and self.config.bidirectional:
            raise ValueError(f"{where}: a state was given, expected none: it is bidirectional")

    def _checked(
        self, x_BTD: Tensor, before: State | None, y_BTD: Tensor, after: State | None
    ) -> tuple[Tensor, State | None]:
        """What :meth:`mix` returned, if it is what every caller relies on."""
        if y_BTD.shape != x_BTD.shape:
            raise ValueError(f"mixer {self.name!r}: mix returned shape {given(y_BTD)}, expected {given(x_BTD)} as x")
        if type(after) is not type(before):
            returned = "no state" if after is None else f"a {type(after).__name__}"
            wanted = "none: it is bidirectional" if before is None else f"the {type(before).__name__} after its tokens"
            raise ValueError(f"mixer {self.name!r}: mix returned {returned}, expected {wanted}")
        return y_BTD, after

    def extra_repr(self) -> str:
        return f"{self.name!r}, {self.options}"
