"""Low-rank additions to the pretrained attention projections, by peft, for as long as a stage lasts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from latte.extend.model import LatteExtendedForCausalLM
from latte.recipe import StageRecipe

ATTENTION_PROJECTIONS = r".*\.attention\.(q_proj|k_proj|v_proj|o_proj)"


@contextmanager
def low_rank(model: LatteExtendedForCausalLM, settings: StageRecipe) -> Iterator[None]:
    """The model with low-rank additions to its attention projections while the stage lasts; merged when it is done."""
    rank = getattr(settings, "lora_rank", 0)
    if not rank:
        yield
        return
    from peft import LoraConfig, LoraModel

    torch.manual_seed(0)
    tuner = LoraModel(model, LoraConfig(r=rank, lora_alpha=rank, target_modules=ATTENTION_PROJECTIONS), "default")
    yield
    tuner.merge_and_unload()


@contextmanager
def without_low_rank(model: nn.Module) -> Iterator[None]:
    """The pretrained weights without what a stage adds to them, for a while."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
