"""How a command ends: its exit code, and with ``--json`` one object on standard output instead of text."""

from __future__ import annotations

import json
import math
import signal
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import Any

from latte.errors import Stopped

#: Exit codes. A command that a signal ended has 128 plus the signal's number: 130 for ctrl-C, 143 for SIGTERM.
DONE, FAILED, MISUSED = 0, 1, 2


@dataclass(frozen=True)
class Outcome:
    """What a command found, for ``--json``, and its exit code."""

    values: dict[str, Any] = field(default_factory=dict)
    code: int = DONE


def conclude(name: str, as_json: bool, read: Callable[[], Callable[[], Outcome | int]]) -> int:
    """Read a command's settings, run it, and report its end: mistakes as one sentence on standard error.

    With ``as_json`` everything that the command prints goes to standard error, and standard output gets one object:
    ``command``, ``exit_code``, ``error`` if there is one, and the command's own values.

    Args:
        read: checks the settings and returns the call that runs the command.
    """
    stdout = sys.stdout
    outcome, error, code = Outcome(), None, MISUSED  # the code of a mistake until the settings are read
    try:
        with redirect_stdout(sys.stderr if as_json else stdout):
            run = read()
            code = FAILED
            ended = run()
            outcome = Outcome(code=ended or DONE) if isinstance(ended, int | None) else ended
            code = outcome.code
    except KeyboardInterrupt:
        name, error, code = "latte", "stopped", 128 + signal.SIGINT
    except Stopped as stopped:
        error, code = str(stopped), 128 + stopped.signal_number
    except BrokenPipeError:
        raise
    except (ValueError, OSError) as mistake:  # what users get wrong; anything else is our bug and shows its traceback
        error = str(mistake)
    if error is not None:
        print(f"{name}: {error}", file=sys.stderr)
    if as_json:
        about = {"command": name.removeprefix("latte "), "exit_code": code}
        values = {**about, **({} if error is None else {"error": error}), **outcome.values}
        print(json.dumps(plain(values), ensure_ascii=False), file=stdout)
    return code


def plain(value: Any) -> Any:
    """A value as JSON has it: dataclasses as objects, paths as strings, numbers that are not finite as null."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, dict):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Path):
        return str(value)
    return value
