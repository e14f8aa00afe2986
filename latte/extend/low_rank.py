"""Low-rank additions (LoRA, by peft) to the pretrained attention projections during a training stage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from latte.extend.model import LatteExtendedForCausalLM
from latte.extras import installed, need

ATTENTION_PROJECTIONS = r".*\.attention\.(q_proj|k_proj|v_proj|o_proj)"


@contextmanager
def low_rank(model: LatteExtendedForCausalLM, rank: int) -> Iterator[None]:
    """Add trainable matrices of a rank to the attention projections, and merge them into the weights at the end.

    With rank 0 the model is left as it is.
    """
    if not rank:
        yield
        return
    peft = need("peft", "training with a rank")

    torch.manual_seed(0)
    tuner = peft.LoraModel(
        model, peft.LoraConfig(r=rank, lora_alpha=rank, target_modules=ATTENTION_PROJECTIONS), "default"
    )
    yield
    tuner.merge_and_unload()


@contextmanager
def without_low_rank(model: nn.Module) -> Iterator[None]:
    """Switch the low-rank additions off: the model computes with the pretrained weights alone."""
    layers = []
    if installed("peft"):  # without it nothing was added
        from peft.tuners.tuners_utils import BaseTunerLayer

        layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
