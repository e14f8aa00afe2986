"""Blocks, marks on parameters, and training."""

from __future__ import annotations

from .mutant import BLOCK, CARRIED, DECAYED, MARKS, UNCHANGED, Mutant

BLOCKS = "latte/models/blocks.py"
MARKS_PY = "latte/layers/marks.py"

MUTANTS = [
    Mutant(
        "a block adds to what the mixer returned",
        BLOCKS,
        "x_BTD = x_BTD + self.dropout(change_BTD)",
        "x_BTD = change_BTD.add_(x_BTD)",
        UNCHANGED,
    ),
    Mutant(
        "the second mixer of a block gets the state of the first",
        BLOCKS,
        "sublayer(norm(x_BTD), next(before), tokens, carried)",
        "sublayer(norm(x_BTD), (states or (None,))[0], tokens, carried)",
        BLOCK,
    ),
    Mutant(
        "a cast narrows what is marked",
        MARKS_PY,
        "return tensor.to(moved.device, torch.float32) if narrow and id(tensor) in kept else moved",
        "return moved",
        MARKS,
    ),
    Mutant(
        "what is marked is narrowed and widened again",
        MARKS_PY,
        "return tensor.to(moved.device, torch.float32) if narrow",
        "return moved.float() if narrow",
        MARKS,
    ),
    Mutant(
        "weight decay is by the number of axes alone",
        MARKS_PY,
        "return parameter.dim() >= 2 if mark is None or mark.decay is None else mark.decay",
        "return parameter.dim() >= 2",
        DECAYED,
    ),
    Mutant(
        "the trainer decays what is marked",
        "latte/train/trainer.py",
        "if decays(parameter, marks.get(name))]",
        "if decays(parameter, None)]",
        DECAYED,
    ),
    Mutant(
        "pieces of a row get the first piece's values",
        BLOCKS,
        "value[:, start : start + part.length]",
        "value[:, : part.length]",
        CARRIED,
    ),
    Mutant(
        "what a layer adds is not handed on",
        BLOCKS,
        "if self.causal else None, carried\n",
        "if self.causal else None, {}\n",
        CARRIED,
    ),
]
