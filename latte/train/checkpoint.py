"""Checkpoints: everything needed to resume a run, written atomically, verified on reading, and never pickled.

A checkpoint contains unsharded tensors under the model's parameter names, so that any number of
processes can resume a run.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from latte.errors import UserError
from latte.files import remove, remove_scratch, whole_folder
from latte.loading.layout import CHECKPOINTS
from latte.loading.weights import CHECKPOINT_KIND, whole_checkpoint
from latte.loading.weights import checkpoint_path as path_of
from latte.loading.weights import checkpoint_steps as all_steps

MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
SEPARATOR = "|"  # between a parameter's name and the name of its optimiser state


def newest(folder: Path, say: Callable[[str], None]) -> int | None:
    """The step of the newest checkpoint that matches its checksums; None if there is no checkpoint at all.

    Only for the process that locked the run's folder: it also removes files that a killed process left unfinished.

    Raises:
        UserError: all checkpoints are damaged.
    """
    remove_scratch(folder / CHECKPOINTS)
    step = whole_checkpoint(folder, say)
    steps = all_steps(folder)
    if step is None and steps:
        raise UserError(
            f"no checkpoint of {folder} is whole ({len(steps)} damaged, the newest at step {steps[-1]}): remove "
            f"{folder / CHECKPOINTS} to start again from step 0, or bring back a copy of it"
        )
    return step


def model_state(model: nn.Module) -> dict[str, Tensor]:
    """The model's tensors, each once, on the CPU; empty on all processes but the first. A collective call."""
    state: Any = get_model_state_dict(model, options=WHOLE)
    seen: set[int] = set()
    own = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        # A tied tensor has two names; files store it under the first, as in transformers.
        name = name.removeprefix("module.")
        if id(tensor) not in seen and name in state:
            own[name] = state[name].contiguous()
        seen.add(id(tensor))
    return own


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The optimiser's tensors by parameter name, and its settings as JSON values. A collective call."""
    state: Any = get_optimizer_state_dict(model, optimizer, options=WHOLE)
    tensors = {
        f"{name}{SEPARATOR}{key}": value.contiguous()
        for name, entry in state.get("state", {}).items()
        for key, value in entry.items()
    }
    return tensors, {"param_groups": state.get("param_groups", [])}


def write_model(folder: Path, model: Any, state: dict[str, Tensor]) -> None:
    """Weights and configuration, as ``from_pretrained`` reads them."""
    model.config.architectures = [type(model).__name__.removeprefix("FSDP")]
    model.config.save_pretrained(folder)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(folder)
    safetensors.torch.save_file(state, folder / MODEL, metadata={"format": "pt"})


def save(
    folder: Path,
    step: int,
    model: Any,
    weights: dict[str, Tensor],
    optimizer: tuple[dict[str, Tensor], dict[str, Any]],
    progress: dict[str, Any],
    keep: int,
) -> None:
    """Write a checkpoint atomically, then remove the oldest so that ``keep`` remain.

    Raises:
        UserError: it could not be written; earlier checkpoints are unchanged.
    """
    try:
        with whole_folder(path_of(folder, step), kind=CHECKPOINT_KIND, step=step) as scratch:
            write_model(scratch, model, weights)
            safetensors.torch.save_file(optimizer[0], scratch / OPTIMIZER)
            (scratch / "optimizer.json").write_text(json.dumps(optimizer[1]), encoding="utf-8")
            for name, value in progress.items():
                (scratch / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
    except (OSError, safetensors.SafetensorError) as error:
        kept = [earlier for earlier in all_steps(folder) if earlier != step]
        last = f"the checkpoint at step {kept[-1]} stands" if kept else "there is no earlier one"
        raise UserError(f"the checkpoint at step {step} could not be written ({_reason(error)}): {last}") from error
    for old in all_steps(folder)[:-keep]:
        remove(path_of(folder, old))


def load_model(path: Path, model: nn.Module) -> None:
    """Load a checkpoint's weights into a model of the same architecture, sharded or not.

    Raises:
        UserError: the checkpoint is of another architecture.
    """
    state: dict[str, Any] = safetensors.torch.load_file(path / MODEL)
    own = {name.removeprefix("module."): tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for name, tensor in state.items():
        if own.get(name) != tuple(tensor.shape):
            raise UserError(
                f"checkpoint {path} is of another architecture: its {name} is {tuple(tensor.shape)}, "
                f"the model's {own.get(name, 'does not exist')}"
            )
    missing = own.keys() - state.keys() - _tied(model)
    if missing:
        raise UserError(f"checkpoint {path} is of another architecture: it has no {sorted(missing)[0]}")
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, strict=False))


def load_optimizer(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load a checkpoint's optimiser state."""
    state: Any = {}
    for name, tensor in safetensors.torch.load_file(path / OPTIMIZER).items():
        parameter, key = name.rsplit(SEPARATOR, 1)
        state.setdefault(parameter, {})[key] = tensor
    groups = read(path, "optimizer")["param_groups"]
    for group in groups:  # JSON has no tuples
        group["betas"] = tuple(group["betas"])
    set_optimizer_state_dict(
        model,
        optimizer,
        {"state": state, "param_groups": groups},
        options=StateDictOptions(full_state_dict=True),
    )


def read(path: Path, name: str) -> Any:
    return json.loads((path / f"{name}.json").read_text(encoding="utf-8"))


def _tied(model: nn.Module) -> set[str]:
    """Names of tensors that are tied to an earlier one."""
    seen: set[int] = set()
    tied = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in seen:
            tied.add(name.removeprefix("module."))
        seen.add(id(tensor))
    return tied


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error).strip().splitlines()[0]
