"""Settings of a comparison."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from latte.errors import UserError
from latte.recipe.train import DataRecipe, ModelRecipe, TrainRecipe


@dataclass
class CompareRecipe:
    """Several models, the same text, tokens and settings."""

    out: str = "runs/compare"
    """Folder of the comparison: a run's folder for each model, and the table and plots."""
    variants: list[str] = field(default_factory=lambda: ["latte-r-swa++", "transformer++"])
    """What to compare: variants, as in model.variant, or names of mixers, which then take attention's place in a
    transformer++."""
    overrides: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Settings of single ones by name, beside model.overrides, which all of them get where they have such a setting."""
    match_parameters: bool = False
    """Give each the MLP width that brings it nearest to the parameters of match."""
    match: str | None = None
    """Whose parameters to match; the default is the largest."""
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
    """Score all validation documents as one, one after another."""
    decode_context: int = 1024
    """Tokens before the ones whose speed of writing is measured."""
    decode_tokens: int = 32
    """How many tokens to write for it."""
    sample_prompt: str = ""
    """A prompt that each model continues, for the eye."""
    sample_tokens: int = 100
    """How many tokens of it; 0 for none."""
    isolate: bool = True
    """Train each model in a process of its own, so that the memory measured is its own."""

    def __post_init__(self) -> None:
        if len(self.variants) < 1 or len(set(self.variants)) != len(self.variants):
            raise UserError(f"variants are {self.variants}, expected different names, at least one")
        for name in [*self.overrides, *([] if self.match is None else [self.match])]:
            if name not in self.variants:
                raise UserError(f"{name!r} is set but not compared, expected one of {', '.join(self.variants)}")
