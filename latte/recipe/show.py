"""Settings of commands that show something: pages about a run, timings, and the state of this machine."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from pathlib import Path

from latte.errors import UserError
from latte.recipe.bounds import check_numbers

#: Suites of ``latte bench``: those with lengths, and those that measure the serving of requests.
TIMED_SUITES = ("ops", "layers", "models", "decode", "race", "memory", "allocator", "registry", "mechanisms")
SERVING_SUITES = ("batching", "speculation")
#: Those that llama.cpp takes part in.
RACES = ("decode", "race")


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
    """ops, layers, models, decode (which ends with race: llama.cpp beside ours on one GGUF file), memory, allocator,
    registry or all of these; or by themselves mechanisms (training speed of each), batching (many requests in one
    batch) and speculation (guesses of a draft)."""
    model: str = ""
    """batching and speculation: a model's folder or name; a pretrained one is extended first. decode and race: a GGUF
    file of Llama's architecture, by default SmolLM2-135M's."""
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
        known = (*TIMED_SUITES, *SERVING_SUITES, "all")
        if self.suite not in known:
            close = difflib.get_close_matches(self.suite, known, n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise UserError(f"unknown suite {self.suite!r}{hint}, expected one of {', '.join(known)}")
        if self.suite == "speculation" and not self.model:
            raise UserError("suite speculation needs a --model whose text a draft can guess")
        if self.lengths and self.suite in SERVING_SUITES:
            raise UserError(f"lengths were given, but suite {self.suite} has requests of its own lengths")
        raced = self.suite in RACES
        if raced and self.model and not Path(self.model).is_file():
            raise UserError(f"there is no file {self.model}: the race needs a .gguf file")
        if self.model and not raced and self.suite not in SERVING_SUITES:
            raise UserError(f"a model was given, but suite {self.suite} measures models of its own")
        if self.draft and self.suite != "speculation":
            raise UserError(f"a draft was given, but suite {self.suite} has none, expected --suite speculation")


@dataclass
class DoctorRecipe:
    """How this machine is checked."""

    tokens: int = 193
    """Length of the rows that the ops are checked on."""

    def __post_init__(self) -> None:
        check_numbers(self, {"tokens": 1})
