"""Settings of commands that show something: pages about a run, timings, and the state of this machine."""

from __future__ import annotations

from dataclasses import dataclass, field

from latte.errors import UserError
from latte.recipe.bounds import check_numbers


@dataclass
class ReportRecipe:
    """A folder, and what its page shows."""

    folder: str = ""
    """A run's folder, a folder of runs such as latte compare makes, or one that latte extend made."""
    out: str | None = None
    """The page to write; the default is report.html in the folder."""
    text: str | None = None
    """Text to look inside on, instead of a piece of the validation text."""
    file: str | None = None
    """A file with such a text."""
    measure: bool = True
    """Measure speed and memory by length, if not done yet."""
    sample_tokens: int = 160
    """Length of a sample, if the runs have none; 0 writes none."""

    def __post_init__(self) -> None:
        if self.text is not None and self.file is not None:
            raise UserError("both texts were given, expected --text or --file")
        check_numbers(self, {})


@dataclass
class InspectRecipe:
    """A model and a text to look at it with."""

    model: str = ""
    """Folder of a run or of a model."""
    text: str | None = None
    """The text to read."""
    file: str | None = None
    """A file with the text to read."""
    out: str = "inspect.html"
    """The page to write."""
    tokens: int = 512
    """Longest text; what is longer is cut."""

    def __post_init__(self) -> None:
        if self.text is not None and self.file is not None:
            raise UserError("both texts were given, expected --text or --file")
        if not 2 <= self.tokens <= 1024:
            raise UserError(f"tokens is {self.tokens}, expected 2 to 1024: the page holds the weights of all pairs")


@dataclass
class BenchRecipe:
    """What to time."""

    suite: str = "all"
    """ops, layers, models, decode, memory, allocator, registry or all of these; or by themselves mechanisms (training
    speed of each), batching (many requests in one batch) and speculation (guesses of a draft)."""
    model: str = ""
    """batching and speculation: a model's folder or name; a pretrained one is extended first."""
    draft: str = ""
    """speculation: a smaller model with the same tokens."""
    lengths: list[int] = field(default_factory=list)
    """Tokens; default: the suite's own lengths."""
    quick: bool = False
    """Small and short: to see that everything runs."""
    out: str = "docs/results/bench"
    """Folder for the results."""

    def __post_init__(self) -> None:
        check_numbers(self, {})


@dataclass
class DoctorRecipe:
    """How this machine is checked."""

    tokens: int = 193
    """Length of the rows that the ops are checked on."""

    def __post_init__(self) -> None:
        check_numbers(self, {"tokens": 1})
