"""The ``latte`` command: finds the subcommand, reads its settings, and turns mistakes into one clear sentence."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Callable, Sequence

from latte.memory import keep_memory

#: Subcommands, each a module of this package. Its ``read`` checks the arguments and returns the call that runs them; it
#: imports nothing heavy, so that help and mistakes are answered at once. ``NEEDS`` is the heavy module of the run.
COMMANDS = {
    "train": "Train a model from a recipe.",
    "eval": "Measure perplexity by context length, streaming.",
    "compare": "Train several variants on the same budget and put them side by side.",
    "extend": "Give a pretrained model long contexts at linear cost.",
    "generate": "Continue a prompt of any length in constant memory.",
    "report": "Write a page about a run or a comparison: curves, tables, samples, heat maps.",
    "inspect": "Write a page that shows what a model attends to on a text.",
    "bench": "Time ops, layers, models and decoding beside peers, in one run.",
    "doctor": "Check this machine: versions, backends, and every op against its reference.",
}

USAGE = "usage: latte COMMAND [options]\n\nLinear-time attention as a latent-variable model.\n\ncommands:\n"


def main(arguments: Sequence[str] | None = None, load: Callable[[str], object] = importlib.import_module) -> int:
    """Run a command and return its exit code: 0 done, 1 failed with a message, 2 a wrong call, 130 stopped by ctrl-C.

    ``load`` imports what the command needs, torch included, once its settings are known to be good.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE + "".join(f"  {name:<10} {text}\n" for name, text in COMMANDS.items()))
        print("`latte COMMAND --help` explains a command and every option it has.")
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
        return 2
    try:
        command = importlib.import_module(f"latte.cli.{name}")
        run = command.read([_underscored(argument) for argument in arguments[1:]])
        load(command.NEEDS)
        return run() or 0
    except KeyboardInterrupt:
        print("latte: stopped", file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:  # what users get wrong; anything else is our bug and shows its traceback
        print(f"latte {name}: {error}", file=sys.stderr)
        return 1


def _underscored(argument: str) -> str:
    """``--save-state`` as ``--save_state``: both spellings of every option are understood."""
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    return "--" + name[2:].replace("-", "_") + equals + value


def _load(module: str) -> None:
    keep_memory()
    importlib.import_module(module)


if __name__ == "__main__":
    sys.exit(main(load=_load))
