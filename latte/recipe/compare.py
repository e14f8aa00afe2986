"""Settings of a comparison."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from latte.errors import UserError
from latte.recipe.bounds import check_numbers
from latte.recipe.train import DataRecipe, ModelRecipe, TrainRecipe


@dataclass
class CompareRecipe:
    """Several models trained on the same text and tokens with the same settings."""

    out: str = "runs/compare"
    """Folder of the comparison: a run's folder for each model, and the table and plots."""
    variants: list[str] = field(default_factory=lambda: ["latte-r-swa++", "transformer++"])
    """Variants to compare, as in model.variant, or names of mixers, which replace the attention of a
    transformer++."""
    overrides: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Overrides of single variants by name; model.overrides applies to every variant that has the setting."""
    match_parameters: bool = False
    """Choose each MLP width so that the number of parameters is nearest to that of match."""
    match: str | None = None
    """The variant whose number of parameters is matched; the default is the largest."""
    data: DataRecipe = field(default_factory=DataRecipe)
    """Text and tokens."""
    model: ModelRecipe = field(default_factory=ModelRecipe)
    """Size and overrides; its variant is not used."""
    train: TrainRecipe = field(default_factory=TrainRecipe)
    """The training, the same for all."""
    eval_tokens: int = 50_000
    """Validation tokens to score at each context length."""
    eval_contexts: list[int] = field(default_factory=list)
    """Context lengths; the default is a quarter of the training length to eight times it."""
    min_document_tokens: int = 0
    """Score only validation documents of at least this length."""
    join_documents: bool = False
    """Concatenate all validation documents and score them as one."""
    decode_context: int = 1024
    """Length of context at which decoding is timed."""
    decode_tokens: int = 32
    """Number of tokens decoded for the timing."""
    sample_prompt: str = ""
    """A prompt that each model continues, as a sample."""
    sample_tokens: int = 100
    """Number of tokens of the sample; 0 for none."""
    isolate: bool = True
    """Train each model in its own process, so that its peak memory can be measured."""

    def __post_init__(self) -> None:
        check_numbers(self, {"eval_tokens": 2, "decode_context": 2, "decode_tokens": 1})
        if len(self.variants) < 1 or len(set(self.variants)) != len(self.variants):
            raise UserError(f"variants are {self.variants}, expected different names, at least one")
        if self.model.pretrained is not None:
            raise UserError(
                f"model.pretrained is {self.model.pretrained!r}, expected none: a comparison trains new models"
            )
        for name in [*self.overrides, *([] if self.match is None else [self.match])]:
            if name not in self.variants:
                raise UserError(f"{name!r} is set but not compared, expected one of {', '.join(self.variants)}")
