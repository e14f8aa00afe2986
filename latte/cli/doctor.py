"""``latte doctor``: check this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from jsonargparse import ArgumentParser
from rich.console import Console
from rich.table import Table

from latte.version import __version__

NEEDS = "latte.doctor"


def read(arguments: Sequence[str]) -> Callable[[], int]:
    parser = ArgumentParser(
        prog="latte doctor",
        description="Show versions, device, threads and backends, and run every op against its reference.",
    )
    parser.add_argument("--tokens", type=int, default=193, help="length of the rows that the ops are checked on")
    settings = parser.parse_args(arguments)
    if settings.tokens < 1:
        raise ValueError(f"--tokens is {settings.tokens}, expected at least 1")
    return partial(run, settings.tokens)


def run(tokens: int = 193) -> int:
    """Print the findings; 0 if every op agrees with its reference, 1 otherwise."""
    import torch

    from latte import doctor, mixers

    console = Console()
    console.print(f"[bold]latte {__version__}[/bold]")
    for name, version in doctor.versions().items():
        console.print(f"  {name:<14}{version}", highlight=False)
    console.print(f"  {'device':<14}{doctor.device()}", highlight=False)
    console.print(f"  {'threads':<14}{torch.get_num_threads()}", highlight=False)
    console.print(f"  {'kernels':<14}{doctor.kernels()}", highlight=False)
    console.print(f"  {'memory from':<14}{doctor.allocation()}", highlight=False)
    console.print(f"  {'mixers':<14}{', '.join(mixers.names())}", highlight=False)
    table = Table(
        "op", "backend", "dtype", "difference", "", title="every op against its reference", title_justify="left"
    )
    passed = True
    for check in doctor.check_ops(tokens):
        passed &= check.passed
        verdict = "[green]same[/green]" if check.passed else "[red]DIFFERS[/red]"
        table.add_row(check.op, check.backend, str(check.dtype).removeprefix("torch."), f"{check.error:.1e}", verdict)
    console.print(table)
    console.print("[green]all is well[/green]" if passed else "[red]this machine computes something else[/red]")
    return 0 if passed else 1
