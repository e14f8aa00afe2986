"""States: what a mechanism remembers of the tokens it has read, as immutable values that know their size.

A state is a frozen dataclass of tensors (batch first), of other states, or of tuples of states. Because nothing ever
changes a state in place, a snapshot is the object itself and rolling back is using it again; ``fork`` is only needed
to own the memory. Everything below works for every mechanism's state.

A state's specification is its class and the state before any token. The last part of a tensor's name spells its axes
(``keys_BSGK``); ``free`` names those whose size may differ from the empty state's, and ``growth`` says how they grow.
Complex numbers are pairs of floats along an axis Z. How many tokens were read is not part of a mechanism's state: see
:class:`latte.tokens.Tokens`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import safetensors
import safetensors.torch
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from typing_extensions import dataclass_transform

from latte.shapes import given

FORMAT = "latte-state-2"
#: How a state grows with the number of tokens read, slowest first.
GROWTHS = ("constant", "log", "linear")
_KINDS: dict[str, type[State]] = {}
S = TypeVar("S", bound="State")


class State:
    """Base of all states; subclasses are declared with :func:`state`."""

    #: Letters of the axes whose size depends on how much was read.
    free: ClassVar[str] = ""
    #: How the free axes grow with the number of tokens.
    growth: ClassVar[Literal["constant", "log", "linear"]] = "constant"
    #: The fields' names, kept because decoding asks for them at every step, for every state of every layer.
    _names: ClassVar[tuple[str, ...]]

    def tensors(self, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
        """Every tensor with its dotted path, in a fixed order."""
        for name, value in _fields(self):
            yield from _walk(value, prefix + name)

    def map(self: S, function: Callable[[Tensor], Tensor]) -> S:
        """The same state with ``function`` applied to every tensor."""
        return type(self)(**{name: _map(value, function) for name, value in _fields(self)})

    def leaves(self, prefix: str = "") -> Iterator[tuple[str, Tensor, str]]:
        """Every tensor with its dotted path and the letters of its free axes, one per axis, ``.`` where it is fixed."""
        for name, value in _fields(self):
            if isinstance(value, Tensor):
                axes = name.rpartition("_")[2]
                yield prefix + name, value, "".join(letter if letter in self.free else "." for letter in axes)
            else:
                for path, part in _parts(value, prefix + name):
                    yield from part.leaves(path + ".")

    @property
    def whole_growth(self) -> str:
        """The fastest growth of this state and the states in it."""
        inner = [part.whole_growth for name, value in _fields(self) for _, part in _parts(value, name)]
        return max([self.growth, *inner], key=GROWTHS.index)

    @property
    def nbytes(self) -> int:
        """Bytes held, over the whole batch."""
        return sum(tensor.numel() * tensor.element_size() for _, tensor in self.tensors())

    @property
    def batch_size(self) -> int:
        return next(tensor for _, tensor in self.tensors()).shape[0]

    @property
    def device(self) -> torch.device:
        return next(tensor for _, tensor in self.tensors()).device

    def fork(self: S) -> S:
        """A copy that shares no memory with this one."""
        return self.map(torch.clone)

    def detach(self: S) -> S:
        """The same numbers, cut from the graph: truncated back-propagation through time."""
        return self.map(torch.Tensor.detach)

    def to(self: S, device: torch.device | str) -> S:
        return self.map(lambda tensor: tensor.to(device))

    def select(self: S, index: Tensor) -> S:
        """Rows ``index`` of the batch, in that order, repeats allowed: beam search and dropping finished rows."""
        return self.map(lambda tensor: tensor.index_select(0, index.to(tensor.device)))

    def repeat(self: S, times: int) -> S:
        """Each row ``times`` times in a row."""
        return self.map(lambda tensor: tensor.repeat_interleave(times, dim=0))

    @staticmethod
    def concat(states: Sequence[S]) -> S:
        """The rows of several states of one mechanism as one batch, in that order.

        Raises:
            ValueError: states of different mechanisms, or of different sizes.
        """
        first = states[0]
        rows = [[tensor for _, tensor in state.tensors()] for state in states]
        specs = [(type(state), [(path, tensor.shape[1:]) for path, tensor in state.tensors()]) for state in states]
        if any(spec != specs[0] for spec in specs):
            raise ValueError("states of different kinds or sizes were given, expected one kind and size for one batch")
        together = iter([torch.cat(tensors) for tensors in zip(*rows, strict=True)])
        return first.map(lambda _: next(together))

    def save(self, path: str | Path, notes: Mapping[str, str] | None = None) -> None:
        """Write to a safetensors file, whole or not at all; ``notes`` stand in its header."""
        path = Path(path)
        scratch = path.with_name(path.name + ".part")
        tensors = {name: tensor.detach().contiguous().clone() for name, tensor in self.tensors()}
        metadata = {**(notes or {}), "format": FORMAT, "layout": json.dumps(_layout(self))}
        safetensors.torch.save_file(tensors, scratch, metadata=metadata)
        scratch.replace(path)

    @staticmethod
    def load(path: str | Path, device: torch.device | str = "cpu") -> State:
        """Read what :meth:`save` wrote.

        Raises:
            ValueError: the file is not a saved state, is damaged, or holds a kind this version does not know.
            FileNotFoundError: there is no such file.
        """
        return State.load_with_notes(path, device)[0]

    @staticmethod
    def load_with_notes(path: str | Path, device: torch.device | str = "cpu") -> tuple[State, dict[str, str]]:
        """The same, and the notes that were saved with it."""
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"no state file at {path}")
        try:
            with safetensors.safe_open(path, framework="pt", device=str(device)) as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except safetensors.SafetensorError as error:
            raise ValueError(f"{path} is not a readable safetensors file: {error}") from error
        if metadata.get("format") != FORMAT:
            raise ValueError(
                f"{path} is not a state that this version reads: its format is {metadata.get('format')!r}, "
                f"expected {FORMAT!r}"
            )
        layout = json.loads(metadata.pop("layout"))
        return _build(layout, tensors, "", path), metadata


@dataclass_transform(frozen_default=True, eq_default=False)
def state(cls: type[S]) -> type[S]:
    """Class decorator: a frozen dataclass, known by name for loading and to torch as a pytree."""
    cls = dataclasses.dataclass(frozen=True, eq=False)(cls)
    if (cls.growth == "constant") != (cls.free == ""):
        raise TypeError(f"{cls.__name__} grows {cls.growth!r} along the axes {cls.free!r}, expected both or neither")
    _KINDS[cls.__name__] = cls
    names = cls._names = tuple(field.name for field in dataclasses.fields(cls))  # type: ignore[arg-type]
    pytree.register_pytree_node(
        cls,
        lambda value: ([getattr(value, name) for name in names], None),
        lambda leaves, _: cls(**dict(zip(names, leaves, strict=True))),
        serialized_type_name=f"latte.{cls.__name__}",
    )
    return cls


def require_state(op: str, state: State | None, like: S, name: str = "state") -> S:
    """``state`` if it has the kind, sizes and device of ``like``, free axes aside; ``like`` if it is None.

    Raises:
        ValueError: a state of another mechanism, batch, width or device.
    """
    if state is None:
        return like
    if type(state) is not type(like):
        raise ValueError(f"{op}: {name} is a {type(state).__name__}, expected a {type(like).__name__}")
    mine, wanted = list(state.leaves()), {path: tensor for path, tensor, _ in like.leaves()}
    if [path for path, *_ in mine] != list(wanted):
        raise ValueError(f"{op}: {name} holds {sorted(path for path, *_ in mine)}, expected {sorted(wanted)}")
    for path, tensor, axes in mine:
        other = wanted[path]
        fixed = [size if letter == "." else None for letter, size in zip(axes, other.shape, strict=False)]
        if tensor.dim() != other.dim() or any(n not in (None, m) for n, m in zip(fixed, tensor.shape, strict=True)):
            expected = "(" + ", ".join("any" if size is None else str(int(size)) for size in fixed) + ")"
            raise ValueError(f"{op}: {name}.{path} has shape {given(tensor)}, expected {expected}")
        if tensor.device != other.device:
            raise ValueError(f"{op}: {name}.{path} is on {tensor.device}, expected {other.device}")
        if tensor.dtype != other.dtype:
            raise ValueError(f"{op}: {name}.{path} is {tensor.dtype}, expected {other.dtype}")
    return state


def _fields(value: Any) -> list[tuple[str, Any]]:
    return [(name, getattr(value, name)) for name in value._names]


def _parts(value: Any, path: str) -> Iterator[tuple[str, State]]:
    """The states in a field's value: itself, or those of a tuple."""
    if isinstance(value, State):
        yield path, value
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from _parts(item, f"{path}.{index}")


def _walk(value: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, State):
        yield from value.tensors(path + ".")
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from _walk(item, f"{path}.{index}")


def _map(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, State):
        return value.map(function)
    if isinstance(value, tuple):
        return tuple(_map(item, function) for item in value)
    return value


def _layout(value: Any) -> Any:
    if isinstance(value, Tensor):
        return "tensor"
    if isinstance(value, State):
        return {"kind": type(value).__name__, "fields": {name: _layout(item) for name, item in _fields(value)}}
    if isinstance(value, tuple):
        return [_layout(item) for item in value]
    return None


def _build(layout: Any, tensors: dict[str, Tensor], path: str, source: Path) -> Any:
    if layout == "tensor":
        if path not in tensors:
            raise ValueError(f"{source} is damaged: tensor {path} is missing")
        return tensors[path]
    if isinstance(layout, list):
        return tuple(_build(item, tensors, f"{path}.{index}", source) for index, item in enumerate(layout))
    if layout is None:
        return None
    kind = layout["kind"]
    if kind not in _KINDS:
        raise ValueError(f"{source} holds a state of kind {kind!r}, known are {sorted(_KINDS)}")
    prefix = path + "." if path else ""
    fields = {name: _build(item, tensors, prefix + name, source) for name, item in layout["fields"].items()}
    return _KINDS[kind](**fields)
