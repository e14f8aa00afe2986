"""Loads the shared library of kernels and passes tensors to it."""

import ctypes
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ABI = 20
LIBRARY = Path(__file__).with_name("_kernels.so")
FLOATS = (torch.float32, torch.float64)


@functools.cache
def load() -> tuple[ctypes.CDLL | None, str]:
    """Return the library, or None and the reason why there is none."""
    if not LIBRARY.exists():
        return None, "no native library: no compiler was found when latte was installed"
    try:
        library = ctypes.CDLL(str(LIBRARY))
        abi = library.latte_abi()
    except (OSError, AttributeError) as error:
        return None, f"the native library cannot be loaded: {error}"
    if abi != ABI:
        return None, f"the native library is of another version ({abi}, expected {ABI}): install latte again"
    library.latte_isa.restype = library.latte_stages.restype = ctypes.c_char_p
    return library, ""


def available() -> bool:
    """Whether the native kernels can be called."""
    return load()[0] is not None


def describe() -> str:
    """Name the kernels in use, such as "native (avx2)", or say why torch serves instead."""
    library, reason = load()
    if library is None:
        return f"torch ({reason})"
    threads = "" if library.latte_openmp() else ", one thread: built without OpenMP"
    return f"native ({library.latte_isa().decode()}{threads})"


@functools.cache
def kernel(name: str) -> Callable[[Sequence[int]], None]:
    """Return a function that calls a kernel with its block of 64-bit fields."""
    library, reason = load()
    if library is None:
        raise RuntimeError(reason)
    function = library[name]
    function.restype = None
    function.argtypes = [ctypes.c_void_p]

    def call(fields: Sequence[int]) -> None:
        function((ctypes.c_int64 * len(fields))(*fields))

    return call


def rows(x: Tensor) -> Tensor:
    """Return x, or a copy whose innermost dimension is contiguous; the kernels take any other strides."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def view(x: Tensor) -> tuple[int, ...]:
    """Address and strides of a (batch, tokens, heads, width) tensor."""
    return (x.data_ptr(), *x.stride()[:3])


def flat_view(x: Tensor) -> tuple[int, ...]:
    """Address and strides of a (batch, tokens, width) tensor, as one head."""
    return (x.data_ptr(), *x.stride()[:2], 0)


def pointer(x: Tensor | None) -> int:
    """Address of a contiguous tensor, 0 for none."""
    return 0 if x is None else x.data_ptr()


def tokens(name: str, x: Tensor | None, batch: int, length: int) -> None:
    """Check a (batch, tokens) mask. Raises ValueError."""
    if x is not None and (x.dtype != torch.bool or x.shape != (batch, length)):
        raise ValueError(f"{name}: expected bool of shape {(batch, length)}, got {x.dtype} of shape {tuple(x.shape)}")


def same_kind(**tensors: Tensor) -> torch.dtype:
    """Check that all are on the CPU and of one dtype, float32 or float64. Raises ValueError."""
    first = next(iter(tensors.values()))
    for name, x in tensors.items():
        if x.dtype not in FLOATS or x.dtype != first.dtype:
            raise ValueError(f"{name}: expected all inputs float32 or all float64, got {x.dtype}")
        if x.device.type != "cpu":
            raise ValueError(f"{name}: native kernels take CPU tensors, got {x.device}")
    return first.dtype


def shape(name: str, x: Tensor, *expected: int) -> None:
    """Check a shape. Raises ValueError."""
    if x.shape != expected:
        raise ValueError(f"{name}: expected shape {expected}, got {tuple(x.shape)}")


def header(x: Tensor) -> tuple[int, int]:
    """Open every block of fields: double precision or not, and the number of threads torch uses."""
    return int(x.dtype == torch.float64), torch.get_num_threads()


def direct(*tensors: Tensor | None) -> bool:
    """Whether a call may skip the operator: nothing traces or watches, nothing needs a gradient.

    At one token the dispatcher would cost more than the kernel.
    """
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or torch.autograd._profiler_enabled():
        return False
    if torch._C._get_tracing_state() is not None or torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    grad = torch.is_grad_enabled()
    for x in tensors:
        if x is not None and (type(x) not in (Tensor, torch.nn.Parameter) or (grad and x.requires_grad)):
            return False
    return True


def register_gradients(op: str, gradients: Callable[..., Any], save: Callable[..., None]) -> None:
    """Make an operator differentiable once, by the operator ``op``_backward that ``gradients`` calls.

    Derivatives of higher order are refused: without this they would be 0 or whatever torch makes of a missing kernel.
    """

    def refuse(ctx: Any, *slopes: Tensor) -> None:
        raise NotImplementedError(
            f"latte::{op}: native kernels have first derivatives only, expected LATTE_BACKEND=torch for higher ones"
        )

    torch.library.register_autograd(f"latte::{op}", gradients, setup_context=save)
    torch.library.register_autograd(f"latte::{op}_backward", refuse)
