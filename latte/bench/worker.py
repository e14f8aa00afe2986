"""A peer in a process of its own, timed there: its threads never meet ours."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import time
from multiprocessing.connection import Connection
from typing import Any

from latte.bench.harness import Seconds, Skipped
from latte.memory import keep_memory, keeps_memory


class Worker:
    """Runs calls that ``module.prepare(**arguments)`` makes, one at a time, in another process.

    While one side works the other waits on a pipe, so that neither disturbs the other's timing.
    """

    def __init__(self, module: str, threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(module, threads, keeps_memory(), theirs), daemon=True)
        self._process.start()
        theirs.close()

    def prepare(self, **arguments: Any) -> None:
        """Make the call that :meth:`run` runs, forgetting the one before.

        Raises:
            Skipped: it can't be made.
        """
        self._ask(("prepare", arguments))

    def run(self) -> Seconds:
        return Seconds(self._ask(("run", {})))

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join(timeout=5)
        if self._process.is_alive():
            self._process.terminate()

    def _ask(self, message: tuple[str, dict[str, Any]]) -> Any:
        try:
            self._pipe.send(message)
            answer = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise Skipped("its process ended, probably for lack of memory") from error
        if isinstance(answer, str):
            raise Skipped(answer)
        return answer


def _serve(module: str, threads: int, keep: bool, pipe: Connection) -> None:
    if keep:  # the peer gets the allocator that we are timed with
        keep_memory()
    # Read by XLA, OpenMP and MKL before they start their threads.
    os.environ.update({name: str(threads) for name in ("NPROC", "OMP_NUM_THREADS", "MKL_NUM_THREADS")})
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[:threads]))
    call = None
    while True:
        try:
            command, arguments = pipe.recv()
        except EOFError:
            return
        try:
            if command == "prepare":
                call = None
                call = importlib.import_module(module).prepare(**arguments)
                answer: Any = 0.0
            else:
                assert call is not None
                start = time.perf_counter()
                call()
                answer = time.perf_counter() - start
        except Exception as error:
            answer = f"{type(error).__name__}: {error}".splitlines()[0]
        pipe.send(answer)
