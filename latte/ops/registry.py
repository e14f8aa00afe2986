"""Ops by registration: each op once, with all the forms it can be computed in and an example to try it on.

An op is declared by a function that checks its arguments and returns them in the order that every form takes::

    @operation(reference=..., chunked=..., step=..., native=..., example=...)
    def causal_latte(p, k, v, *, state=None, tokens=None): ...

What is registered is the function that users call: it checks, chooses a form and runs it. ``latte doctor``, the parity
tests, the benchmarks and the docs go over the registry, so an op that is declared is also checked, timed and listed.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from latte.modes import transformed
from latte.ops.native import library

BACKENDS = ("reference", "torch", "native")
FORMS = ("reference", "chunked", "step", "native")


class Draw(NamedTuple):
    """What an example is made of: a batch of B rows of T tokens, drawn from a generator in one dtype."""

    B: int
    T: int
    dtype: torch.dtype
    generator: torch.Generator

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=self.generator).to(self.dtype)


#: Positional and keyword arguments of a call, without state and tokens.
Example = tuple[tuple[Tensor, ...], dict[str, Any]]


@dataclass(frozen=True)
class Op:
    """One registered op.

    Attributes:
        forms: ``reference`` (the equation), ``chunked`` (torch, for training), ``step`` (one token), ``native`` (C++);
            all take the same arguments and give the same result.
        example: arguments for a trial of any length.
        causal: it takes and gives a state.
        tokens: it takes :class:`latte.tokens.Tokens`.
    """

    name: str
    call: Callable[..., Any]
    forms: Mapping[str, Callable[..., Any]]
    example: Callable[[Draw], Example]
    causal: bool
    tokens: bool

    @property
    def backends(self) -> tuple[str, ...]:
        """What can be asked for on this machine."""
        return BACKENDS if self.name in NATIVE_OPS else BACKENDS[:-1]


_REGISTRY: dict[str, Op] = {}
#: Names of the ops whose native form can be called on this machine.
NATIVE_OPS: set[str] = set()


def operation(
    *,
    reference: Callable[..., Any],
    chunked: Callable[..., Any] | None = None,
    step: Callable[..., Any] | None = None,
    native: Callable[..., Any] | None = None,
    example: Callable[[Draw], Example],
    autocast: bool = False,
) -> Callable[[Callable[..., tuple[Any, ...]]], Callable[..., Any]]:
    """Decorator that registers an op; see the module's docstring. Without ``chunked`` the reference serves training.

    The op's first argument is a tensor (B, T, ...): it decides on backend and device. There is no autocast inside
    unless ``autocast`` allows it: a recurrence adds up what narrow products round off, token after token.
    """
    forms = {"reference": reference, "chunked": chunked or reference}
    forms |= {name: form for name, form in (("step", step), ("native", native)) if form is not None}

    def register(bind: Callable[..., tuple[Any, ...]]) -> Callable[..., Any]:
        name = bind.__name__

        @functools.wraps(bind)
        def call(x: Tensor, *args: Any, backend: str | None = None, **kwargs: Any) -> Any:
            kind = x.device.type
            if autocast or not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
                return form_for(op, x, backend)(*bind(x, *args, **kwargs))
            with torch.autocast(kind, enabled=False):
                return form_for(op, x, backend)(*bind(x, *args, **kwargs))

        signature = inspect.signature(bind)
        parameters = [*signature.parameters.values()]
        parameters.append(inspect.Parameter("backend", inspect.Parameter.KEYWORD_ONLY, default=None))
        call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        op = Op(name, call, forms, example, "state" in signature.parameters, "tokens" in signature.parameters)
        _REGISTRY[name] = op
        if native is not None and library.available():
            NATIVE_OPS.add(name)
        return call

    return register


def registered_ops() -> list[Op]:
    """All ops, in the order of their names."""
    return [_REGISTRY[name] for name in sorted(_REGISTRY)]


def find_op(name: str) -> Op:
    return _REGISTRY[name]


def form_for(op: Op, x: Tensor, backend: str | None) -> Callable[..., Any]:
    """The form that serves a call of ``op`` with first argument ``x``."""
    chosen = choose_backend(op.name, backend, x)
    if backend is None and chosen != "reference" and "step" in op.forms and x.shape[1] == 1:
        return op.forms["step"]
    return op.forms["chunked" if chosen == "torch" else chosen]


def choose_backend(op: str, backend: str | None, tensor: Tensor) -> str:
    """The backend for a call of ``op`` on ``tensor``: the argument, else ``LATTE_BACKEND``, else the fastest that fits.

    Raises:
        ValueError: a name that is no backend, or ``native`` asked for by argument where it can't serve.
    """
    wanted = backend or os.environ.get("LATTE_BACKEND") or None
    if wanted is not None and wanted not in BACKENDS:
        raise ValueError(f"{op}: backend is {wanted!r}, expected one of {', '.join(BACKENDS)}")
    fits = op in NATIVE_OPS and _fits_kernels(tensor)
    if backend == "native" and not fits:
        have = f"{op} on {tensor.device.type} in {tensor.dtype}{' under a transform of torch.func' * transformed()}"
        raise ValueError(
            f"{op}: no native kernel serves {have}, expected float32 or float64 on a CPU with the kernels built"
        )
    if wanted in ("reference", "torch"):
        return wanted
    return "native" if fits else "torch"


def kernels_serve(tensor: Tensor) -> bool:
    """Whether native code may be used for such a tensor: it was built, it fits, and ``LATTE_BACKEND`` allows it."""
    return library.available() and _fits_kernels(tensor) and (os.environ.get("LATTE_BACKEND") or "native") == "native"


def _fits_kernels(tensor: Tensor) -> bool:
    if tensor.device.type != "cpu" or tensor.dtype not in (torch.float32, torch.float64):
        return False
    return not transformed()
