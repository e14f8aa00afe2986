"""What the trainer and casts must know of single parameters, declared by the module that owns them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn


class Mark(NamedTuple):
    """How one parameter differs from the others.

    Attributes:
        decay: weight decay; None: by the trainer's rule, which decays what has two axes or more.
        float32: stays in float32 when the model is cast to something narrower.
        learning_rate: a factor on the learning rate.
    """

    decay: bool | None = None
    float32: bool = False
    learning_rate: float = 1.0


class Marked(nn.Module):
    """A module whose ``marks`` say how its own parameters differ.

    Marks belong to names, not to tensors: loading a model puts new tensors in the place of old ones.
    """

    marks: ClassVar[Mapping[str, Mark]] = {}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        # ``to``, ``half`` and ``bfloat16`` all end here, with one function for every tensor.
        kept: set[int] = set()
        for name, mark in self.marks.items():
            parameter = self._parameters.get(name)
            if mark.float32 and parameter is not None:
                kept |= {id(parameter), id(parameter.data), id(parameter.grad)}
        if not kept:
            return super()._apply(fn, recurse)

        def careful(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            narrow = moved.is_floating_point() and moved.dtype not in (torch.float32, torch.float64)
            return tensor.to(moved.device, torch.float32) if narrow and id(tensor) in kept else moved

        return super()._apply(careful, recurse)


def marks_of(model: nn.Module) -> dict[str, Mark]:
    """The marks of all parameters that have some, by the names of ``model.named_parameters()``."""
    found = {}
    for path, module in model.named_modules():
        for name, mark in getattr(module, "marks", {}).items():
            if module._parameters.get(name) is not None:
                found[f"{path}.{name}" if path else name] = mark
    return found


def working_parameter(module: nn.Module) -> nn.Parameter | None:
    """A parameter that has the dtype and device of the module's inputs: the first that is not kept in float32."""
    for part in module.modules():
        marks = getattr(part, "marks", {})
        for name, parameter in part._parameters.items():
            if parameter is not None and not (name in marks and marks[name].float32):
                return parameter
    return None


def decays(parameter: Tensor, mark: Mark | None) -> bool:
    """Whether weight decay applies: to what has two axes or more, unless its mark says otherwise."""
    return parameter.dim() >= 2 if mark is None or mark.decay is None else mark.decay
