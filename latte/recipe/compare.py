"""Settings of a comparison."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from latte.errors import UserError
from latte.recipe.bounds import check_numbers
from latte.recipe.tasks import ClassifyRecipe, RecallRecipe, TaskName
from latte.recipe.train import DataRecipe, ModelRecipe, TrainRecipe


@dataclass
class CompareRecipe:
    """Several models trained on the same text and tokens with the same settings."""

    out: str = "runs/compare"
    """Folder of the comparison: a run's folder for each model, and the table and plots."""
    variants: list[str] = field(default_factory=lambda: ["latte-r-swa++", "transformer++"])
    """Models to compare: variants as in model.variant, or names of mixers, which replace the attention of a
    transformer++, or names of bases. The first is the one that the others are held against."""
    only: list[str] = field(default_factory=list)
    """Compare these of the variants alone; a later call with all of them reads what is done from the folders."""
    bases: dict[str, str] = field(default_factory=dict)
    """Names of your own for variants that are compared with other overrides, and which variant each is, such as
    {latte-forgets: latte-r-swa++}."""
    overrides: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Overrides of single variants by name; model.overrides applies to every variant that has the setting."""
    match_parameters: bool = False
    """Bring all models to the same number of parameters: by the MLP's width, a multiple of 8, at the preset's depth and
    hidden size. A model without MLPs, or whose MLP would be narrower than its hidden size, gets another number of
    layers, and if no number will do, the nearest hidden size with which one does."""
    match: str | None = None
    """The variant whose number of parameters is matched, compared or not; the default is the largest."""
    match_within: float = 0.02
    """Largest relative distance from the matched number; a model that can't be brought so near is refused."""
    learning_rates: list[float] = field(default_factory=list)
    """Learning rates to choose from: each model is trained with each of them for search_steps, and its training uses
    the one with the lowest validation loss. Empty: train.learning_rate for all."""
    search_steps: int | None = None
    """Steps of each of these short runs, with a whole schedule of that length; by default a fifth of train.steps."""
    data: DataRecipe = field(default_factory=DataRecipe)
    """Text and tokens."""
    model: ModelRecipe = field(default_factory=ModelRecipe)
    """Size and overrides; its variant is not used."""
    train: TrainRecipe = field(default_factory=TrainRecipe)
    """The training, the same for all."""
    task: TaskName = "language"
    """language (predict the next token of a text), recall (values that were stated with keys) or classify."""
    recall: RecallRecipe = field(default_factory=RecallRecipe)
    """Examples of task recall."""
    classify: ClassifyRecipe = field(default_factory=ClassifyRecipe)
    """Examples of task classify."""
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
    """Number of tokens decoded in each round of the timing."""
    timing_rounds: int = 3
    """Rounds in which all models are timed in turns, after the last training: one optimiser step and decode_tokens
    each. The fastest round of each model counts."""
    time_again: bool = False
    """Time all models again, although an earlier call has: for a time when the machine has nothing else to do."""
    sample_prompt: str = ""
    """A prompt that each model continues, as a sample."""
    sample_tokens: int = 100
    """Number of tokens of the sample; 0 for none."""
    isolate: bool = True
    """Train each model in its own process, so that its peak memory can be measured."""
    jobs: int = 1
    """Models that are trained at once, each in a process with its share of the cores. Speeds are timed afterwards, one
    model after another."""

    def __post_init__(self) -> None:
        least = {"eval_tokens": 2, "decode_context": 2, "decode_tokens": 1, "timing_rounds": 1, "search_steps": 1}
        least |= {"jobs": 1}
        check_numbers(self, {**least, "learning_rates": 0}, most={"match_within": 1})
        if len(self.variants) < 1 or len(set(self.variants)) != len(self.variants):
            raise UserError(f"variants are {self.variants}, expected different names, at least one")
        if self.model.pretrained is not None:
            raise UserError(
                f"model.pretrained is {self.model.pretrained!r}, expected none: a comparison trains new models"
            )
        for name in [*self.overrides, *self.bases]:
            if name not in self.variants:
                raise UserError(
                    f"{name!r} is set but not compared, expected one of {', '.join(self.variants)} (--only compares "
                    "some of a recipe's variants)"
                )
        for name in self.only:
            if name not in self.variants:
                raise UserError(f"only has {name!r}, expected some of variants: {', '.join(self.variants)}")
        for name in self.variants:
            if name in ("", ".", "..") or "/" in name or "\\" in name:
                raise UserError(f"{name!r} is among variants, expected names that a folder can have")
        rates = self.learning_rates
        if len(rates) == 1 or 0 in rates or sorted(set(rates)) != rates:
            raise UserError(f"learning_rates are {rates}, expected none or several positive numbers in rising order")

    @property
    def steps_of_search(self) -> int:
        """Steps of a short run."""
        return self.search_steps or max(1, self.train.steps // 5)
