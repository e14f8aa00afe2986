"""llama.cpp as a peer: npm's node-llama-cpp in a process of its own, with the same GGUF file and the same tokens."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from latte.bench.harness import Skipped

SCRIPT = Path(__file__).with_name("llama_cpp.mjs")
INSTALL = "npm install node-llama-cpp in the working folder, or set NODE_PATH to a node_modules folder that has it"


class LlamaCpp:
    """One model and one context in llama.cpp; it has read nothing yet.

    Raises:
        Skipped: there is no node, no node-llama-cpp, or it can't read the file.
    """

    def __init__(self, file: Path, context: int, threads: int) -> None:
        node = shutil.which("node")
        if node is None:
            raise Skipped(f"llama.cpp is left out: there is no node ({INSTALL})")
        self._process = subprocess.Popen(
            [node, str(SCRIPT), str(file), str(context), str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        about = self._answer()
        if "error" in about:
            self.close()
            hint = f" ({INSTALL})" if "Cannot find" in about["error"] else ""
            raise Skipped(f"llama.cpp is left out: {about['error']}{hint}")
        self.release: str = about["release"]

    def read(self, tokens: Sequence[int]) -> float:
        """Seconds that reading these tokens into an empty context takes."""
        return self._ask(tokens=list(tokens))["seconds"]

    def write(self, token: int, count: int) -> list[float]:
        """Seconds of each of ``count`` tokens behind the context, ``token`` being read first; they are taken back."""
        return self._ask(token=token, count=count)["seconds"]

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def _ask(self, **request: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise Skipped("llama.cpp ended without an answer")
        return json.loads(line)
