"""What torch does with a call beside computing it: compile it, transform it, or only work out its shapes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad


def transformed() -> bool:
    """Whether a function is being transformed (torch.func: grad, vmap, jvp) or differentiated in forward mode.

    Kernels, checkpoints and writing into parts of a tensor know nothing of these; plain torch operations do.
    """
    if torch.compiler.is_compiling():
        return False
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def values_hidden(tensor: Tensor) -> bool:
    """Whether control flow can't depend on the numbers of such a tensor: there may be none, or one for each sample."""
    if torch.compiler.is_compiling() or tensor.device.type == "meta":
        return True
    return torch._C._functorch.peek_interpreter_stack() is not None or intercepted()


def readable(tensor: Tensor) -> bool:
    """Whether the numbers of a tensor can be read: nothing compiles, traces, fakes or transforms the call.

    Modes that only watch operations, such as a count of memory or FLOPs, leave them readable.
    """
    if torch.compiler.is_compiling() or tensor.device.type == "meta" or torch._C._get_tracing_state() is not None:
        return False
    keys = torch._C._TorchDispatchModeKey
    hiding = (keys.FAKE, keys.PROXY, keys.FUNCTIONAL)
    return torch._C._functorch.peek_interpreter_stack() is None and all(
        torch._C._get_dispatch_mode(key) is None for key in hiding
    )


def intercepted() -> bool:
    """Whether something replaces torch's operations, as FakeTensorMode does: what is made now may be no real tensor."""
    return torch._C._len_torch_dispatch_stack() > 0 or torch._C._get_tracing_state() is not None
