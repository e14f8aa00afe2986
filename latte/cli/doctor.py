"""``latte doctor``: check this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from rich.console import Console
from rich.table import Table

from latte.cli.outcome import DONE, FAILED, Outcome
from latte.cli.settings import parse
from latte.recipe import DoctorRecipe
from latte.version import __version__

NEEDS = "latte.doctor"
DESCRIPTION = "Show versions, device, threads and backends, and run every op against its reference."


def read(arguments: Sequence[str]) -> Callable[[], Outcome]:
    return partial(run, parse("doctor", DESCRIPTION, DoctorRecipe, arguments, from_recipe=False))


def run(recipe: DoctorRecipe) -> Outcome:
    """Print the findings; it fails if an op differs from its reference."""
    import torch

    from latte import doctor, mixers

    console = Console()
    about = {
        **doctor.versions(),
        "device": doctor.device(),
        "threads": torch.get_num_threads(),
        "kernels": doctor.kernels(),
        "decoding": doctor.decoding(),
        "memory from": doctor.allocation(),
        "mixers": ", ".join(mixers.names()),
    }
    console.print(f"[bold]latte {__version__}[/bold]")
    for name, value in about.items():
        console.print(f"  {name:<14}{value}", highlight=False)
    table = Table(
        "op", "backend", "dtype", "difference", "", title="every op against its reference", title_justify="left"
    )
    checks = list(doctor.check_ops(recipe.tokens))
    for check in checks:
        verdict = "[green]same[/green]" if check.passed else "[red]DIFFERS[/red]"
        table.add_row(check.op, check.backend, str(check.dtype).removeprefix("torch."), f"{check.error:.1e}", verdict)
    console.print(table)
    passed = all(check.passed for check in checks)
    console.print("[green]all is well[/green]" if passed else "[red]this machine computes something else[/red]")
    ops = [
        {
            "op": check.op,
            "backend": check.backend,
            "dtype": str(check.dtype),
            "error": check.error,
            "passed": check.passed,
        }
        for check in checks
    ]
    return Outcome({"latte": __version__, "about": about, "ops": ops, "passed": passed}, DONE if passed else FAILED)
