"""Programs for one token: packs their stages as the library describes them, and runs them.

The library describes its stages and their fields itself (stages.h), and fields are packed by name: the order of the
fields stands in one place.
"""

import ctypes
import functools
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from latte.ops.native import library

#: The activation that the caller of a program gets.
OUTPUT = -2
NONE = -1
#: A layer's keys and values: addresses of keys, values, sink keys and sink values, slots, sinks.
MEMORY_FIELDS = 6
#: What a product may be followed by.
_NAMES = "identity silu gelu_tanh gelu sigmoid logsigmoid tanh softplus squared_relu negative_exp"
ACTIVATIONS = {name: number for number, name in enumerate(_NAMES.split())}


class Field(NamedTuple):
    """A field of a stage: its kind (integer, real, weight, activation or state) and where it stands."""

    kind: str
    place: int


@functools.cache
def stages() -> dict[str, tuple[int, dict[str, Field]]]:
    """Number and fields of every stage, by name; the last is the call itself.

    Raises:
        RuntimeError: there is no library.
    """
    loaded, reason = library.load()
    if loaded is None:
        raise RuntimeError(reason)
    known = {}
    for number, line in enumerate(loaded.latte_stages().decode().splitlines()):
        name, *fields = line.split()
        known[name] = (number, {text[2:]: Field(text[0], place) for place, text in enumerate(fields)})
    return known


def pack(name: str, given: Mapping[str, Any], activations: Mapping[str, int]) -> list[int]:
    """The fields of a stage as 64-bit words. What is not given is 0, or none.

    ``activations`` are the offsets of those that a field may name.

    Raises:
        ValueError: a field that the stage does not have.
    """
    fields = stages()[name][1]
    unknown = given.keys() - fields.keys()
    if unknown:
        raise ValueError(f"stage {name} was given {sorted(unknown)}, expected some of {sorted(fields)}")
    words = []
    for field, (kind, _) in fields.items():
        value = given.get(field)
        if kind == "W":
            words.append(library.pointer(value))
        elif kind == "R":
            words.append(struct.unpack("q", struct.pack("d", value or 0.0))[0])
        elif kind == "X" and isinstance(value, str):
            words.append(activations[value])
        elif kind in "XS":
            words.append(NONE if value is None else value)
        else:
            words.append(int(value or 0))
    return words


class Call:
    """The arguments of one program, in memory that the kernel reads: only what changes is written for each token."""

    def __init__(self) -> None:
        self._places = {name: field.place for name, field in stages()["Call"][1].items()}
        self._words = (ctypes.c_int64 * len(self._places))()

    def set(self, **fields: int) -> None:
        for name, value in fields.items():
            self._words[self._places[name]] = value

    def run(self) -> None:
        """Run the program. The caller has checked everything: at one token that would cost more than the work."""
        _kernel()(self._words)


@functools.cache
def _kernel() -> Any:
    library.kernel("token")  # raises where there is no library
    loaded = library.load()[0]
    assert loaded is not None
    return loaded.token


def words_of(program: Sequence[int]) -> ctypes.Array:
    """A program, or addresses, where the kernel finds them."""
    return (ctypes.c_int64 * len(program))(*program)


def memory_words(memories: Sequence[tuple[Tensor, Tensor, Tensor, Tensor]]) -> list[int]:
    """Keys (B, G, slots, K), values, sink keys (B, G, sinks, K) and sink values of layers, for a call."""
    words = []
    for keys, values, sink_keys, sink_values in memories:
        words += [tensor.data_ptr() for tensor in (keys, values, sink_keys, sink_values)]
        words += [keys.shape[2], sink_keys.shape[2]]
    return words
