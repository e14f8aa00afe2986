"""Names of models: what is on this machine is found first, and the hub is asked only if it answers at once."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from latte.errors import UserError
from latte.files import may_be_on_hub

SECONDS = 1.0  # that the hub has to answer in
PACKAGED = ("smollm2-135m",)  # models that have a name of their own, and come from a package index


def require_findable(name: str) -> None:
    """Check that a model of this name can be looked for: a path that exists, a name of ours, or one on the hub.

    Raises:
        UserError: there is no such path, and the hub can't have it or does not answer.
    """
    if Path(name).expanduser().exists() or name in PACKAGED:
        return
    what = "file" if name.endswith(".gguf") else "folder"
    if not may_be_on_hub(name):
        raise UserError(f"there is no {what} {name}: expected a run's, a model's, or a name on the hub")
    if not _cached(name) and not _answers():
        raise UserError(
            f"there is no {what} {name}, and the hub, which might have a model of that name, does not answer"
        )


def _cached(name: str) -> bool:
    home = (
        os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "huggingface"
    )
    cache = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")
    return (cache / f"models--{name.replace('/', '--')}").is_dir()


def _answers() -> bool:
    """Whether the hub answers within SECONDS; looking up its address has no time limit of its own, hence a thread."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return False
    answered = []

    def ask() -> None:
        try:
            urlopen(Request(os.environ.get("HF_ENDPOINT") or "https://huggingface.co", method="HEAD"), timeout=SECONDS)
        except HTTPError:
            pass  # an answer too
        except (OSError, ValueError):
            return
        answered.append(True)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(SECONDS)
    return bool(answered)
