"""Jobs as processes: several at once, failures by name, one signal each."""

import os
import signal
import sys
import time
from pathlib import Path
from threading import Thread

import pytest

from latte.errors import Stopped, UserError
from latte.workflows.processes import Job, run_jobs

#: Notes its threads and that it started, waits for the other one, and ends when both are there.
TOGETHER = """
import os, sys, time, pathlib
mine, other = map(pathlib.Path, sys.argv[1:3])
mine.write_text(os.environ["OMP_NUM_THREADS"])
while not other.exists():
    time.sleep(0.01)
print("said by", mine.name)
print("shown by", mine.name, file=sys.stderr)
"""
#: Saves after one signal, slowly; a second one would end it before that.
SAVES = """
import pathlib, signal, sys, time
out = pathlib.Path(sys.argv[1])
def save(number, frame):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(0.3)
    out.write_text("saved")
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
out.with_suffix(".ready").touch()
time.sleep(60)
"""


def job(name, code, *words, log=None):
    return Job(name, [sys.executable, "-c", code, *map(str, words)], log)


def test_jobs_run_at_once_with_their_threads_and_logs(tmp_path):
    said: list[str] = []
    a, b = tmp_path / "a", tmp_path / "b"
    jobs = [job("a", TOGETHER, a, b, log=tmp_path / "logs" / "a.log"), job("b", TOGETHER, b, a)]
    run_jobs(jobs, at_once=2, threads=3, say=said.append)  # one after the other, the first would wait forever
    assert sorted(said) == ["said by a", "said by b"]
    assert (a.read_text(), b.read_text()) == ("3", "3")
    assert (tmp_path / "logs" / "a.log").read_text() == "shown by a\n"


def test_no_more_at_once_than_asked_for(tmp_path):
    code = "import pathlib, sys; p = pathlib.Path(sys.argv[1]); p.touch(exist_ok=False); p.unlink()"
    run_jobs([job(str(number), code, tmp_path / "alone") for number in range(3)])


def test_a_job_that_fails_leaves_the_others_alone(tmp_path):
    done, said = tmp_path / "done", []
    jobs = [
        job("bad", "import sys; sys.exit('no such rate')", log=tmp_path / "bad.log"),
        job("killed", "import os; os.kill(os.getpid(), 9)"),
        job("good", "import pathlib, sys; pathlib.Path(sys.argv[1]).touch()", done),
    ]
    with pytest.raises(UserError, match=r"bad failed: no such rate \(.*bad.log\); killed was killed by signal 9"):
        run_jobs(jobs, at_once=2, say=said.append)
    assert done.exists()
    assert any(line.startswith("bad failed") for line in said)
    with pytest.raises(UserError, match="silent failed; its own message is above"):
        run_jobs([job("silent", "raise SystemExit(1)")])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_jobs_once_each_has_saved(tmp_path, number):
    files = [tmp_path / "first", tmp_path / "second"]
    never = tmp_path / "never"
    jobs = [*(job(file.name, SAVES, file) for file in files), job("third", "pass", never)]

    def interrupt():
        while not all(file.with_suffix(".ready").exists() for file in files):
            time.sleep(0.01)
        os.kill(os.getpid(), number)
        time.sleep(0.1)
        os.kill(os.getpid(), number)  # an impatient user

    before = signal.getsignal(signal.SIGTERM)
    ignored = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    sender = Thread(target=interrupt)
    sender.start()
    try:
        with pytest.raises(Stopped, match="the same command goes on") as caught:
            run_jobs(jobs, at_once=2)
        sender.join()
    finally:
        signal.signal(signal.SIGINT, ignored)
    assert caught.value.signal_number == number
    assert [file.read_text() for file in files] == ["saved", "saved"]
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_job_that_was_stopped_stops_the_others(tmp_path):
    waiting = tmp_path / "waiting"
    ended = "import pathlib, sys, time\nwhile not pathlib.Path(sys.argv[1]).exists(): time.sleep(.01)\nsys.exit(143)"
    with pytest.raises(Stopped, match="ended was stopped and saved") as caught:
        run_jobs([job("ended", ended, waiting.with_suffix(".ready")), job("waiting", SAVES, waiting)], at_once=2)
    assert caught.value.signal_number == signal.SIGTERM
    assert Path(waiting).read_text() == "saved"
