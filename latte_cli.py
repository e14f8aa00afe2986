"""The process of the ``latte`` command: it answers ``--help`` and mistakes without importing torch or transformers.

Importing any module of ``latte`` runs ``latte/__init__.py`` first. That file imports both libraries and registers the
models, as ``import latte`` promises to Python users, and takes seconds. This module lies outside the package and
postpones that file until the settings of the command are known to be good.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn


def postpone(package: str) -> Callable[[], None]:
    """Make the modules of ``package`` importable without running its ``__init__.py``; return what runs it.

    A package that is imported already stays as it is.
    """
    spec = None if package in sys.modules else importlib.util.find_spec(package)
    loader = None if spec is None else spec.loader
    if spec is None or loader is None:
        return lambda: None
    module = sys.modules[package] = importlib.util.module_from_spec(spec)
    return lambda: loader.exec_module(module)


def _interruptible() -> bool:
    return signal.getsignal(signal.SIGINT) is signal.default_int_handler


def _quit(number: int, frame: object) -> NoReturn:
    """End at once: an exception would be swallowed, or become another one, in some of the modules being imported."""
    os.write(2, b"latte: stopped\n")
    os._exit(130)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; from the first import on, ctrl-C ends it without a traceback."""
    try:
        load_package = postpone("latte")
        from latte.cli.main import main as command
        from latte.memory import keep_memory

        def load(module: str) -> None:
            keep_memory()  # before the first tensor
            before = signal.signal(signal.SIGINT, _quit) if _interruptible() else None
            load_package()
            importlib.import_module(module)
            if before is not None:
                signal.signal(signal.SIGINT, before)

        return command(arguments, load)
    except KeyboardInterrupt:
        print("latte: stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
