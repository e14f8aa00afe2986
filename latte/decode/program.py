"""A model as a program: the stages of one token, and where its states lie."""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from latte.decode.guard import Guard
from latte.layers.quantized import Quantized, QuantizedLinear
from latte.layers.rotary import Rotary
from latte.models.engine import Anatomy, Unfit
from latte.ops import native
from latte.ops.blocks import FORMATS
from latte.state import State

#: Where activations and parts of states start, counted in numbers and in bytes.
NUMBERS, BYTES = 16, 64
#: Slots that a ring has more than the window looks at: so many tokens can be read in one call, and taken back.
SPARE = 16


class Part(NamedTuple):
    """A tensor of a state that every token replaces: where it lies in a block, in bytes for each row of the batch."""

    path: str
    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    by_bits: bool = False  # along the first axis one block for each bit of the number of tokens read


class Kept(NamedTuple):
    """Keys and values of a layer of attention: in a ring behind a window, or, without one, all of them."""

    paths: tuple[str, ...]  # of their tensors: keys, values, and sink keys and values or which are alive
    window: int | None
    sinks: int
    groups: int
    key_width: int
    value_width: int
    chunked: bool = False  # a state's ring holds only what its run of window + 1 tokens has read, from slot 0 on


class Rows(NamedTuple):
    """Some rows of a projection: how many, what is added to their products, and the activation behind them."""

    number: int
    act: str = "identity"
    bias: Tensor | None = None


class MixerLayout(NamedTuple):
    """The state of one mixer: where each of its tensors is."""

    name: str
    empty: State  # the state before any token, for one row
    parts: tuple[Part, ...]
    kept: tuple[int, ...]  # indices of the layout's memories


@dataclass(eq=False)
class Layout:
    """Where the states of all layers lie; the same for every batch."""

    dtype: torch.dtype
    width: int
    layers: list[list[MixerLayout]] = field(default_factory=list)
    memories: list[Kept] = field(default_factory=list)
    row_bytes: int = 0

    def same(self, other: Layout) -> bool:
        """Whether a session of one serves the other."""
        return self is other or self._key() == other._key()

    def _key(self) -> Any:
        mixers = [[(m.name, type(m.empty), m.parts, m.kept) for m in layer] for layer in self.layers]
        return self.dtype, self.width, mixers, self.memories


@dataclass(eq=False)
class Program:
    """The stages of a model as kernel arguments, and a guard on all that they were read from."""

    body: weakref.ref[nn.Module]  # the model may own this program
    head: nn.Module | None
    layout: Layout
    words: Any
    room: int  # numbers that activations take, a row
    output: int  # numbers of a row of the output
    partial: int
    work: int  # multiply-adds of a token
    vocabulary: int  # 0 where embedded tokens are given
    places: int | None  # tokens that a document may have: learned positions end there, or blocks of a state
    guard: Guard

    @functools.cached_property
    def like(self) -> Tensor:
        """Of the dtype that the program computes in."""
        return torch.empty(0, dtype=self.layout.dtype, device="cpu")


class Builder:
    """Walks over a model, notes all that its program relies on, and collects the stages.

    Activations are named, and a name stands for the same memory in every layer.
    """

    def __init__(self, anatomy: Anatomy, dtype: torch.dtype) -> None:
        self.anatomy, self.dtype = anatomy, dtype
        self.modules: list[nn.Module] = []
        self.dropouts: list[nn.Dropout] = []
        self.parents: dict[nn.Module, None] = {}
        self.weights: list[Tensor] = []
        self.constants: list[Tensor] = []
        self.work = self.partial = 0
        self.places: int | None = None
        self._stages: list[tuple[str, bool, dict[str, Any]]] = []
        self._widths: dict[str, int] = {}
        self._angles: dict[Any, str] = {}
        self._start: list[tuple[str, bool, dict[str, Any]]] = []
        self.layout: Layout
        self._mixer: Any = None
        self._parts: list[Part] = []
        self._kept: list[int] = []

    # Modules and weights, each noted for the guard.

    def child(self, parent: nn.Module, name: str, *kinds: type) -> Any:
        module = parent._modules.get(name)
        if module is None or (kinds and type(module) not in kinds):
            what = "nothing" if module is None else f"a {type(module).__name__}"
            kind = type(module)
            raise Unfit(
                f"{type(parent).__name__}.{name} is {what}",
                lambda: parent._modules.get(name) is module and type(module) is kind,
            )
        self.note(module)
        self.parents[parent] = None
        if type(module) is nn.Dropout:
            self.dropouts.append(module)
        return module

    def note(self, module: nn.Module) -> None:
        self.modules.append(module)

    def weight(self, module: nn.Module, name: str, *shape: int) -> Tensor:
        """A parameter of this shape, of the model's dtype, in one piece on the CPU; raises Unfit."""
        weight = module._parameters.get(name)

        def fits() -> bool:
            if type(weight) is not nn.Parameter or weight.shape != shape or weight.device.type != "cpu":
                return False
            return weight.dtype == self.dtype and weight.is_contiguous()

        if not fits():
            what = "nothing" if weight is None else f"{tuple(weight.shape)} of {weight.dtype} on {weight.device}"
            raise Unfit(
                f"{type(module).__name__}.{name} is {what}, not {shape} of {self.dtype} in one piece on the CPU",
                lambda: module._parameters.get(name) is weight and not fits(),
            )
        assert weight is not None
        self.weights.append(weight)
        return weight

    def constant(self, tensor: Tensor) -> Tensor:
        """A tensor that the program reads and owns."""
        self.constants.append(tensor)
        return tensor

    # Stages.

    def stage(self, kind: str, /, beside: bool = False, **fields: Any) -> None:
        """Append a stage; ``beside``: the next one does not wait for it."""
        self._stages.append((kind, beside, fields))

    def room(self, name: str, width: int) -> str:
        """Memory for ``width`` numbers a row under a name; it may be used again by every layer."""
        self._widths[name] = max(width, self._widths.get(name, 0))
        return name

    def has_room(self, name: str) -> bool:
        """Whether an earlier stage has such memory."""
        return name in self._widths

    def norm(self, module: nn.Module, x: str, y: str | int, width: int, groups: int = 1, added: bool = False) -> None:
        known = self.anatomy.norm(module)
        bias = None
        if known.centred and module._parameters.get("bias") is not None:
            bias = self.weight(module, "bias", width)
        weight = self.weight(module, "weight", width)
        sizes: dict[str, Any] = {"width": width, "groups": groups, "centred": known.centred, "added": added}
        self.stage("Norm", x=x, y=y, weight=weight, bias=bias, eps=known.eps, plus=known.plus, **sizes)

    def product(
        self,
        x: str,
        width: int,
        *parts: tuple[nn.Module, str, int, str | int],
        act: str = "identity",
        gated: bool = False,
        added: bool = False,
        beside: bool = False,
        bias: Tensor | None = None,
    ) -> None:
        """x times the weights of projections, each given as owner, name, number of rows, and where the product goes.

        ``act`` is applied to the first, behind ``bias`` if that is given.
        """
        fields: dict[str, Any] = {}
        for index, (owner, name, rows, y) in enumerate(parts):
            layer = self.child(owner, name, *self.anatomy.products, QuantizedLinear)
            fields |= {f"{field}{index}": value for field, value in self.matrix(layer, rows, width).items()}
            fields[f"y{index}"] = y
        if gated and fields["format0"] != fields["format1"]:
            raise Unfit("a gate and what it multiplies are quantised in different formats")
        if bias is not None:
            if fields["bias0"] is not None:
                raise Unfit(f"{type(parts[0][0]).__name__}.{parts[0][1]} has a bias of its own")
            fields["bias0"] = bias
        how: dict[str, Any] = {"act": native.ACTIVATIONS[act], "gated": gated, "added": added}
        self.stage("Product", beside=beside, x=x, width=width, **how, **fields)

    def split(self, x: str, width: int, owner: nn.Module, name: str, /, **parts: Rows) -> None:
        """x times the rows of one projection, cut in activations of these names."""
        layer = self.child(owner, name, *self.anatomy.products, QuantizedLinear)
        whole = self.matrix(layer, sum(rows.number for rows in parts.values()), width)
        first = 0
        for y, rows in parts.items():
            last, bias = first + rows.number, rows.bias if whole["bias"] is None else whole["bias"].detach()[first:]
            fields: dict[str, Any] = {"w0": whole["w"].detach()[first:last], "rows0": rows.number, "bias0": bias}
            fields |= {"format0": whole["format"], "act": native.ACTIVATIONS[rows.act], "y0": self.room(y, rows.number)}
            self.stage("Product", beside=y != [*parts][-1], x=x, width=width, **fields)
            first = last

    def matrix(self, layer: Any, rows: int, width: int) -> dict[str, Any]:
        """Fields of a projection: its weight, how that is kept, and its bias."""
        bias = None if layer.bias is None else self.weight(layer, "bias", rows)
        weight, number = self.numbers(layer, rows, width)
        self.work += rows * width
        return {"w": weight, "bias": bias, "rows": rows, "format": number}

    def numbers(self, module: Any, rows: int, width: int) -> tuple[Tensor, int]:
        """A matrix that the kernel reads, and the number of its format."""
        if not isinstance(module, Quantized):
            return self.weight(module, "weight", rows, width), 0
        blocks, wanted = module.blocks, (rows, FORMATS[module.kind].row_bytes(width))
        if blocks.shape != wanted or not blocks.is_contiguous() or self.dtype != torch.float32:
            raise Unfit(f"blocks of {module.kind} have shape {tuple(blocks.shape)}, or the model is not in float32")
        self.weights.append(blocks)
        return blocks, native.BLOCK_FORMATS[module.kind]

    def angles(self, rotary: Rotary, nearest: int | None = None) -> str:
        """Cosines and sines of each token's place, computed once for all layers that turn alike."""
        key = (rotary, nearest)
        if key not in self._angles:
            half = len(rotary.frequencies)
            name = self._angles[key] = self.room(f"angles {len(self._angles)}", 2 * half)
            speeds = self.constant(torch.tensor(rotary.frequencies, dtype=torch.float64, device="cpu"))
            how = {"nearest": 1 << 62 if nearest is None else nearest, "rounded": rotary.rounded_below}
            self._start.append(
                ("Angles", True, {"y": name, "speeds": speeds, "half": half, "stretch": rotary.stretch, **how})
            )
        return self._angles[key]

    # States.

    def begin_mixer(self, mixer: Any, like_B1D: Tensor) -> None:
        self._mixer, self._parts, self._kept = mixer, [], []
        self._empty = mixer.expected_state(like_B1D)
        self._tensors = dict(self._empty.tensors())

    def end_mixer(self) -> MixerLayout:
        """What the mixer's stages keep; raises Unfit if that is not all of its state."""
        covered = {part.path for part in self._parts}
        for index in self._kept:
            covered |= set(self.layout.memories[index].paths)
        if covered != set(self._tensors):
            missing = sorted(set(self._tensors) - covered)
            raise Unfit(f"the stages of mixer {self._mixer.name!r} do not keep {', '.join(missing)}")
        return MixerLayout(self._mixer.name, self._empty, tuple(self._parts), tuple(self._kept))

    def part(self, path: str, levels: int = 0) -> int:
        """A tensor of the mixer's state, which stages replace at every token: its place for a stage.

        With ``levels`` it holds a block for each bit of the number of tokens read, and has room for so many.
        """
        tensor = self._tensors[path]
        shape, start = tuple(tensor.shape[1:]), self.layout.row_bytes
        if levels:
            shape = (levels, *shape[1:])
            self.end_at(1 << levels - 1)
        size = torch.Size(shape).numel() * tensor.element_size()
        self.layout.row_bytes += -(-size // BYTES) * BYTES
        self._parts.append(Part(path, start, shape, tensor.dtype, levels > 0))
        return start

    def end_at(self, places: int) -> None:
        """No document has more tokens than these."""
        self.places = places if self.places is None else min(places, self.places)

    def memory(self, kept: Kept) -> int:
        """Keys and values of the mixer's attention: the number of their memory for a stage."""
        self.layout.memories.append(kept)
        self._kept.append(len(self.layout.memories) - 1)
        return self._kept[-1]

    def finish(self) -> tuple[Any, int]:
        """The program's words, and the numbers that its activations take."""
        offsets, total = {}, 0
        for name, width in self._widths.items():
            offsets[name] = total
            total += -(-width // NUMBERS) * NUMBERS
        words: list[int] = []
        for kind, beside, fields in [*self._start, *self._stages]:
            packed = native.pack(kind, fields, offsets)
            words += [native.stages()[kind][0], int(beside), len(packed), *packed]
        return native.words_of(words), total
