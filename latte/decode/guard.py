"""Notices when modules no longer do what their classes say: something wrapped, replaced, moved or hooked."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from itertools import chain, repeat
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from latte.layers.hooks import unhooked
from latte.layers.quantized import Quantized

#: Attributes of a module that are called instead of its class's forward.
REPLACED = ("forward", "_compiled_call_impl")


class Guard:
    """All that kernel arguments were read from; :meth:`holds` says whether it is still so.

    It is asked before every token, about hundreds of objects: each list is compared in one go, and of several signs of
    the same change the cheapest is looked at.

    Args:
        modules: the modules that the kernel stands for.
        parents: modules whose children must stay the same.
        weights: the tensors that the kernel reads.
        dropouts: must not drop anything.
        table: the embedding, if the kernel reads it.
    """

    def __init__(
        self,
        modules: list[nn.Module],
        parents: Iterable[nn.Module],
        weights: list[Tensor],
        dropouts: list[nn.Dropout],
        table: nn.Embedding | None,
    ) -> None:
        self.modules, self.weights, self.dropouts, self.table = modules, weights, dropouts, table
        self._classes = list(map(type, modules))
        self._attributes: list[dict[str, Any]] = [module.__dict__ for module in modules]
        self._attribute_counts: list[int] = []  # when none of them was replaced
        self._child_dicts = [parent._modules for parent in parents]
        self._children = list(chain.from_iterable(map(dict.values, self._child_dicts)))
        self._parameter_dicts = [module._parameters for module in modules if module._parameters]
        self._parameters = list(chain.from_iterable(map(dict.values, self._parameter_dicts)))
        # Weights in blocks are buffers.
        self._buffer_dicts = [module._buffers for module in modules if isinstance(module, Quantized)]
        self._buffers = list(chain.from_iterable(map(dict.values, self._buffer_dicts)))
        self._addresses = list(map(Tensor.data_ptr, weights))
        self._hooks_seen = -1  # torch's counter of hooks when these modules were last seen without one

    def holds(self) -> bool:
        """Nothing was wrapped, replaced, moved, hooked or set to drop since the arguments were read."""
        if list(map(type, self.modules)) != self._classes:
            return False
        counts = list(map(len, self._attributes))
        if counts != self._attribute_counts:
            # Looking names up in hundreds of dictionaries takes longer than asking for their sizes.
            if any(any(map(dict.__contains__, self._attributes, repeat(name))) for name in REPLACED):
                return False
            self._attribute_counts = counts
        # Torch numbers all hooks: where there is no new one anywhere, there is none here.
        hooks = RemovableHandle.next_id
        if hooks != self._hooks_seen:
            if not unhooked(*self.modules):
                return False
            self._hooks_seen = hooks
        if any(dropout.training and dropout.p for dropout in self.dropouts):
            return False
        if list(chain.from_iterable(map(dict.values, self._child_dicts))) != self._children:
            return False
        now = list(chain.from_iterable(map(dict.values, self._parameter_dicts)))
        if len(now) != len(self._parameters) or not all(map(operator.is_, now, self._parameters)):
            return False
        if not all(map(operator.is_, chain.from_iterable(map(dict.values, self._buffer_dicts)), self._buffers)):
            return False
        if self.table is not None and self.table.max_norm is not None:
            return False
        if not all(map(Tensor.is_contiguous, self.weights)):
            return False
        return list(map(Tensor.data_ptr, self.weights)) == self._addresses
