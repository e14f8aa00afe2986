"""``latte report``: a page about a run, or about several side by side."""

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
        prog="latte report",
        description="Write one page that needs nothing else: loss curves, quality by context, speed and memory by "
        "length, samples, heat maps of p(l|t), and a view of what each token attends to.",
    )
    parser.add_argument("folder", type=str, help="a run's folder, or a folder of runs such as latte compare makes")
    parser.add_argument("--out", type=str, help="the page to write; the default is report.html in the folder")
    parser.add_argument("--text", type=str, help="text to look inside on, instead of a piece of the validation text")
    parser.add_argument("--file", type=str, help="a file with such a text")
    parser.add_argument(
        "--measure", type=bool, default=True, help="measure speed and memory by length, if not done yet"
    )
    parser.add_argument("--sample_tokens", type=int, default=160, help="length of a sample, if the runs have none")
    settings = parser.parse_args(arguments)
    if settings.text is not None and settings.file is not None:
        raise UserError("give either --text or --file, and not both")
    text = settings.text
    if settings.file is not None:
        try:
            text = Path(settings.file).read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise UserError(f"{settings.file} can't be read: {error.strerror}") from error
    return partial(run, settings.folder, settings.out, text, settings.measure, settings.sample_tokens)


def run(folder: str, out: str | None = None, text: str | None = None, measure: bool = True, samples: int = 160) -> int:
    """Write the page and say where it is."""
    from latte.report import build_report, render_report

    console = Console(stderr=True)
    report = build_report(
        folder,
        text=text,
        measure=measure,
        sample_tokens=samples,
        say=lambda message: console.print(message, highlight=False),
    )
    path = Path(folder) / "report.html" if out is None else Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render_report(report), encoding="utf-8")
    print(f"wrote {path}")
    return 0
