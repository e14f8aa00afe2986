"""``latte inspect``: a page that shows what a model attends to on a text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from jsonargparse import ArgumentParser
from rich.console import Console

from latte.errors import UserError

NEEDS = "latte.report"


def read(arguments: Sequence[str]) -> Callable[[], int]:
    parser = ArgumentParser(
        prog="latte inspect",
        description="Write a page on which you choose a token and see which positions it attends to: how much through "
        "the window, and how much through each latent.",
    )
    parser.add_argument("model", type=str, help="folder of a run or of a model")
    parser.add_argument("--text", type=str, help="the text to read")
    parser.add_argument("--file", type=str, help="a file with the text to read")
    parser.add_argument("--out", type=str, default="inspect.html", help="the page to write")
    parser.add_argument("--tokens", type=int, default=512, help="longest text; what is longer is cut")
    settings = parser.parse_args(arguments)
    if (settings.text is None) == (settings.file is None):
        raise UserError("give either --text or --file, and not both")
    if not 2 <= settings.tokens <= 1024:
        raise UserError(f"--tokens is {settings.tokens}, expected 2 to 1024: the page holds the weights of all pairs")
    text = settings.text if settings.file is None else _read(Path(settings.file))
    return partial(run, settings.model, text, Path(settings.out), settings.tokens)


def run(model: str, text: str, out: Path, tokens: int = 512) -> int:
    """Write the page and say where it is."""
    from latte.loading import load_folder as load  # heavy: after the settings are known to be good
    from latte.report import inspect_text, render_inspection

    console = Console()
    loaded, tokenizer = load(model)
    inspection = inspect_text(loaded, tokenizer, text, max_tokens=tokens, title=Path(model).resolve().name)
    if inspection.reason is not None:
        raise UserError(f"{model}: {inspection.reason}")
    if inspection.dropped:
        console.print(
            f"the text is cut to its first {tokens} tokens: {inspection.dropped} more are not shown", highlight=False
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(render_inspection(inspection), encoding="utf-8")
    console.print(f"wrote {out}", highlight=False, soft_wrap=True)
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"{path} can't be read: {error.strerror}") from error
