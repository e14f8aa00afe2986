"""Independent commands as processes, several at once; a signal ends all of them, each with what it has saved."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

from latte.errors import Stopped, UserError

POLL = 0.1  # seconds between looks at the processes


@dataclass(frozen=True)
class Job:
    """A command with a name; lines of its standard output are said, and ``log`` gets its standard error."""

    name: str
    command: list[str]
    log: Path | None = None


#: A job's process, and the thread that says what it prints.
_Running = tuple[Job, subprocess.Popen[str], Thread]


def run_jobs(
    jobs: Sequence[Job],
    at_once: int = 1,
    threads: int | None = None,
    say: Callable[[str], None] = lambda message: None,
) -> None:
    """Run all jobs, ``at_once`` of them at a time. One that fails leaves the others alone.

    SIGINT and SIGTERM reach this process only: it sends each job one SIGTERM, waits until all have ended, and runs no
    more of them. So a training is never ended by a second signal before it has saved.

    Args:
        threads: of torch in each job; by default what the environment says.

    Raises:
        UserError: some jobs failed; the sentence names them.
        Stopped: a signal came.
    """
    waiting, running = list(jobs), dict[str, _Running]()
    failed: list[str] = []
    with _termination_raises():
        try:
            while waiting or running:
                while waiting and len(running) < at_once:
                    job = waiting.pop(0)
                    running[job.name] = (job, *_start(job, threads, say))
                time.sleep(POLL)
                for name in [name for name, (_, process, _) in running.items() if process.poll() is not None]:
                    job, process, reader = running.pop(name)
                    reader.join()
                    number = _signal_of(process.returncode)
                    if number in (signal.SIGINT, signal.SIGTERM):
                        raise Stopped(f"{name} was stopped and saved: the same command goes on", number)
                    if process.returncode:
                        failed.append(f"{name} was killed by signal {number}" if number else _failure(job))
                        say(failed[-1])
        except (KeyboardInterrupt, Stopped) as error:
            _stop(running)
            number = error.signal_number if isinstance(error, Stopped) else int(signal.SIGINT)
            raise Stopped(str(error) or "stopped and saved: the same command goes on", number) from None
        except BaseException:
            _stop(running)
            raise
    if failed:
        raise UserError("; ".join(failed))


def _start(job: Job, threads: int | None, say: Callable[[str], None]) -> tuple[subprocess.Popen[str], Thread]:
    environment = dict(os.environ)
    if threads is not None:
        environment |= {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    if job.log is not None:
        job.log.parent.mkdir(parents=True, exist_ok=True)
    # A session of its own: ctrl-C would reach it beside the signal that it gets from here.
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True, "env": environment, "start_new_session": True}
    if job.log is None:
        process = subprocess.Popen(job.command, **options)
    else:
        with job.log.open("a", encoding="utf-8") as log:
            process = subprocess.Popen(job.command, stderr=log, **options)
    reader = Thread(target=_say_lines, args=(process, say), daemon=True)
    reader.start()
    return process, reader


def _signal_of(code: int) -> int:
    """The signal that ended a process, also where the process says so as shells do; 0 if none did."""
    return -code if code < 0 else max(0, code - 128)


def _say_lines(process: subprocess.Popen[str], say: Callable[[str], None]) -> None:
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            say(line.rstrip("\n"))


def _stop(running: dict[str, _Running]) -> None:
    """Ask all to end, and wait until they have saved; a signal that comes meanwhile does not cut that short."""
    for _, process, _ in running.values():
        process.terminate()
    for _, process, reader in running.values():
        while process.poll() is None or reader.is_alive():
            try:
                process.wait()
                reader.join()
            except (KeyboardInterrupt, Stopped):
                continue


def _failure(job: Job) -> str:
    """Why a job failed: its own last sentence, which a log has; without one it was printed."""
    lines = [] if job.log is None else job.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return f"{job.name} failed: {lines[-1]} ({job.log})" if lines else f"{job.name} failed; its own message is above"


@contextmanager
def _termination_raises() -> Iterator[None]:
    """SIGTERM raises Stopped here, as SIGINT raises KeyboardInterrupt: left alone it would leave the jobs behind."""

    def stop(number: int, frame: Any) -> None:
        raise Stopped("stopped and saved: the same command goes on", number)

    try:
        before = signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not the main thread: the caller handles signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
