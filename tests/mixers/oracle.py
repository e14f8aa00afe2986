"""What tests against models of transformers share: weights that are all in use, and float64 where theirs casts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor, nn

from tests.ops.helpers import generator, normal

VOCABULARY, T = 50, 40


def perturbed(model: nn.Module, scale: float = 0.3) -> nn.Module:
    """The model with every weight moved, so that none is 0 or 1 or equal to another."""
    g = generator(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(scale * normal(g, *parameter.shape, dtype=parameter.dtype))
    return model.eval()


def copy_weights(ours: nn.Module, theirs: nn.Module, names: Mapping[str, str]) -> None:
    """Every weight of ``theirs`` into its place in ``ours``, by name; raises KeyError where one is left out."""
    target, source = dict(ours.named_parameters()), dict(theirs.named_parameters())
    assert set(names) == set(target), set(names) ^ set(target)
    assert set(names.values()) == set(source), set(names.values()) ^ set(source)
    with torch.no_grad():
        for name, other in names.items():
            target[name].copy_(source[other].reshape(target[name].shape))


def token_ids(rows: int = 2, length: int = T) -> Tensor:
    return torch.randint(VOCABULARY, (rows, length), generator=generator(1))


@contextmanager
def float_is_double() -> Iterator[None]:
    """``x.float()`` leaves float64 as it is: models that keep a part in float32 can be followed in float64."""
    narrow = torch.Tensor.float
    with mock.patch.object(torch.Tensor, "float", lambda x: x if x.dtype == torch.float64 else narrow(x)):
        yield
