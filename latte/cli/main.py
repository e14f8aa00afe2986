"""The ``latte`` command: finds the subcommand and runs it; help and mistakes are answered before torch is imported."""

from __future__ import annotations

import difflib
import importlib
import os
import signal
import sys
from collections.abc import Callable, Sequence

from latte.cli.outcome import MISUSED, Outcome, conclude
from latte.memory import keep_memory

#: Subcommands, each a module of this package. Its ``read`` checks the arguments and returns the call that runs them,
#: which returns an exit code or an Outcome; it imports nothing heavy, so that help and mistakes are answered at once.
#: ``NEEDS`` is the heavy module of the run.
COMMANDS = {
    "train": "Train a model from a recipe.",
    "eval": "Measure perplexity by context length, streaming.",
    "compare": "Train several variants on the same budget and put them side by side.",
    "extend": "Give a pretrained model long contexts at linear cost.",
    "generate": "Continue a prompt of any length in constant memory.",
    "chat": "Talk to a model; its state is kept between messages.",
    "read": "Read a document once and save the state, for latte chat.",
    "report": "Write a page about a run or a comparison: curves, tables, samples, heat maps.",
    "inspect": "Write a page that shows what a model attends to on a text.",
    "bench": "Time ops, layers, models and decoding beside peers, in one run.",
    "doctor": "Check this machine: versions, backends, and every op against its reference.",
}

USAGE = "usage: latte COMMAND [options]\n\nLinear-time attention as a latent-variable model.\n\ncommands:\n"


def main(arguments: Sequence[str] | None = None, load: Callable[[str], object] = importlib.import_module) -> int:
    """Run a command and return its exit code: 0 done, 1 failed, 2 a wrong command line, 128 + n ended by signal n.

    ``load`` imports what the command needs, torch included, once its settings are known to be good.
    """
    try:
        return _main(list(sys.argv[1:] if arguments is None else arguments), load)
    except BrokenPipeError:  # the reader of a pipe has left, as head does: end without a word, as other tools do
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 128 + signal.SIGPIPE


def _main(arguments: list[str], load: Callable[[str], object]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help())
        sys.stdout.flush()
        return 0
    if arguments[0] == "--version":
        from latte.version import __version__

        print(f"latte {__version__}")
        return 0
    name = arguments[0]
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        print(f"latte: unknown command {name!r}{hint}, expected one of {', '.join(COMMANDS)}", file=sys.stderr)
        return MISUSED

    def read() -> Callable[[], Outcome | int]:
        command = importlib.import_module(f"latte.cli.{name}")
        run = command.read(arguments[1:])
        load(command.NEEDS)
        return run

    return conclude(f"latte {name}", "--json" in arguments[1:], read)


def _help() -> str:
    from latte.cli.recipes import described

    lines = [f"  {name:<10} {text}" for name, text in COMMANDS.items()]
    recipes = [f"  {name:<18} {text}" for name, text in described().items()]
    return (
        USAGE
        + "\n".join(lines)
        + "\n\nrecipes that come with it (latte COMMAND --config NAME):\n"
        + "\n".join(recipes)
        + "\n\n`latte COMMAND --help` explains a command and every option it has; every command takes --json."
    )


def _load(module: str) -> None:
    keep_memory()
    importlib.import_module(module)


if __name__ == "__main__":
    sys.exit(main(load=_load))
