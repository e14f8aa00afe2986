"""``--json`` gives one object on standard output and nothing else; exit codes say how a command ended."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from latte.cli import main as command_line
from latte.cli.main import main
from latte.cli.outcome import DONE, FAILED, MISUSED, Outcome
from latte.errors import Stopped, UserError


@pytest.fixture
def command(monkeypatch):
    """Register a command ``try`` that reads and runs as the given functions do."""

    def register(run, read=None):
        module = SimpleNamespace(NEEDS="json", read=read or (lambda arguments: run))
        monkeypatch.setitem(sys.modules, "latte.cli.try", module)
        monkeypatch.setitem(command_line.COMMANDS, "try", "For tests.")

    return register


def fail(error):
    def run(*given):
        raise error

    return run


def test_json_is_the_only_thing_on_standard_output(command, capfd):
    def run():
        print("progress")
        return Outcome({"loss": 2.5, "worst": float("inf"), "text": "é"})

    command(run)
    assert main(["try", "--json"]) == 0
    said = capfd.readouterr()
    assert json.loads(said.out) == {"command": "try", "exit_code": 0, "loss": 2.5, "worst": None, "text": "é"}
    assert said.out.count("\n") == 1
    assert said.err == "progress\n"
    assert main(["try"]) == 0
    assert capfd.readouterr().out == "progress\n"


@pytest.mark.parametrize(
    ("ends", "code", "error"),
    [
        (lambda: 0, 0, None),
        (lambda: None, 0, None),
        (lambda: Outcome(code=1), 1, None),
        (fail(UserError("a sentence")), 1, "a sentence"),
        (fail(OSError(28, "no space")), 1, "[Errno 28] no space"),
        (fail(Stopped("saved", signal.SIGTERM)), 143, "saved"),
        (fail(KeyboardInterrupt), 130, "stopped"),
    ],
)
def test_exit_codes_of_a_run(command, capfd, ends, code, error):
    command(ends)
    assert main(["try"]) == code
    assert main(["try", "--json"]) == code
    said = capfd.readouterr()
    found = json.loads(said.out)
    assert (found["exit_code"], found.get("error")) == (code, error)
    assert len(said.err.splitlines()) == (0 if error is None else 2)


def test_a_mistake_in_the_settings_is_another_exit_code(command, capfd):
    command(None, read=fail(UserError("unknown setting")))
    assert main(["try", "--json"]) == 2
    assert json.loads(capfd.readouterr().out)["error"] == "unknown setting"
    assert main(["trry"]) == 2


def test_our_own_mistakes_show_their_traceback(command):
    command(fail(RuntimeError("a bug")))
    with pytest.raises(RuntimeError):
        main(["try"])


def test_the_page_about_the_command_line_names_every_command_and_exit_code():
    page = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    codes = {int(code) for code in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)}
    assert codes == {
        DONE,
        FAILED,
        MISUSED,
        *(128 + number for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGTERM)),
    }
    answers = page.partition("## For scripts")[2]
    assert [name for name in command_line.COMMANDS if f"`{name}`" not in answers] == []


def test_a_reader_that_leaves_early_is_no_error():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "latte_cli", "--help"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, env=environment, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


def test_doctor_answers_in_json(capfd):
    assert main(["doctor", "--tokens", "5", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["passed"]
    assert found["about"]["threads"] >= 1
    assert {"op", "backend", "error", "passed"} <= found["ops"][0].keys()
