"""Whether calling a module runs its class's ``forward`` and nothing else."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.module import (
    _global_backward_hooks,
    _global_backward_pre_hooks,
    _global_forward_hooks,
    _global_forward_pre_hooks,
)


def unhooked(*modules: nn.Module) -> bool:
    """Whether calling these runs their class's ``forward`` and nothing else: no hooks, nothing put in its place."""
    for module in modules:
        own = module.__dict__
        if own["_forward_hooks"] or own["_forward_pre_hooks"] or "forward" in own or "_compiled_call_impl" in own:
            return False
    return True


def globally_hooked() -> bool:
    """Whether some hook watches every module."""
    return bool(_global_forward_hooks or _global_forward_pre_hooks)


def watched(module: nn.Module) -> bool:
    """Whether hooks see a module's output or the gradient that passes through it."""
    if not unhooked(module) or globally_hooked() or _global_backward_hooks or _global_backward_pre_hooks:
        return True
    return bool(module.__dict__["_backward_hooks"] or module.__dict__["_backward_pre_hooks"])
