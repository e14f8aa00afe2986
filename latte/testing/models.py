"""Point 10 of the contract: a model changes nothing that a mixer returned."""

from __future__ import annotations

from typing import Any

import torch

from latte.mixers import Mixer
from latte.testing.cases import Case, inputs


def check_nothing_returned_is_changed(case: Case) -> None:
    """Outputs and states of mixers are afterwards what they were, with and without gradients."""
    subject, x = case.build(torch.float32), inputs(0, 2, 9, torch.float32)
    returned: list[tuple[Any, Any]] = []

    def note(module: Any, args: Any, result: Any) -> None:
        y, state = result
        tensors = [y, *([] if state is None else [tensor for _, tensor in state.tensors()])]
        returned.extend((tensor, tensor.detach().clone()) for tensor in tensors)

    for module in subject.modules():
        if isinstance(module, Mixer):
            module.register_forward_hook(note)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            subject(x)
    assert returned
    for tensor, copy in returned:
        assert torch.equal(tensor, copy)
