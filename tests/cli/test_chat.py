"""``latte chat`` and ``latte read`` as a user meets them: on a terminal, in a pipe, with mistakes."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from latte.cli.main import main
from tests.eval.test_chat import make_model, tokenizer_with

DEADLINE = 120  # seconds until a terminal that says nothing more is given up
# Runs a command with its standard input as the terminal that ctrl-C comes from.
CONTROLLED = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model that writes letters without end."""
    path = tmp_path_factory.mktemp("models") / "letters"
    make_model("latte-r-swa++").save_pretrained(path)
    tokenizer_with().save_pretrained(path)
    return path


class Terminal:
    """A process on a pseudo-terminal."""

    def __init__(self, *arguments):
        self.master, slave = pty.openpty()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "TERM": "dumb"}
        command = [sys.executable, "-m", "latte_cli", *map(str, arguments)]
        self.process = subprocess.Popen(
            [sys.executable, "-c", CONTROLLED, *command],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment,
            start_new_session=True,
        )
        os.close(slave)
        self.said = ""

    def until(self, pattern):
        """Wait for a pattern in what was said since the last one; what was said up to its end."""
        deadline = time.monotonic() + DEADLINE
        while (found := re.search(pattern, self.said)) is None:
            if not select.select([self.master], [], [], max(0, deadline - time.monotonic()))[0]:
                raise AssertionError(f"no {pattern!r} in {self.said!r}")
            try:
                self.said += os.read(self.master, 4096).decode()
            except OSError as error:  # the other end is closed
                raise AssertionError(f"no {pattern!r} in {self.said!r} at the end") from error
        before, self.said = self.said[: found.end()], self.said[found.end() :]
        return before

    def type(self, text):
        os.write(self.master, text.encode())

    def waits(self):
        """Wait until the process sleeps: Python's input does not see a signal between its prompt and its wait."""
        deadline, asleep = time.monotonic() + DEADLINE, 0
        while asleep < 3:
            assert time.monotonic() < deadline, "the process does not wait for input"
            state = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0]
            asleep = asleep + 1 if state == "S" else 0
            time.sleep(0.02)

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.master)


@pytest.fixture
def terminal(request):
    def start(*arguments):
        made = Terminal(*arguments)
        request.addfinalizer(made.close)
        return made

    return start


def test_a_conversation_on_a_terminal(folder, tmp_path, terminal):
    chat = terminal("chat", folder, "--max-new-tokens", "1000000", "--temperature", "0")
    assert "/help lists the commands" in chat.until(r"\n> $")
    chat.type("Hello\n")
    chat.until(r"Hello\r\n[A-Za-z]{20}")  # letters arrive while the answer is written
    assert chat.process.poll() is None
    chat.type("\x03")
    assert re.fullmatch(r"[A-Za-z]*(\^C)?[A-Za-z]*\r\n> ", chat.until(r"\n> $"))
    chat.waits()
    chat.type("\x03")  # at the prompt: another prompt
    chat.until(r"\n> $")
    chat.type(f"/save {tmp_path / 'state'}\n")
    assert re.search(r"saved the state after \d+ tokens", chat.until(r"\n> $"))
    assert (tmp_path / "state" / "state.safetensors").is_file()
    chat.type("/sav\n")
    assert "unknown command /sav, expected one of /help" in chat.until(r"\n> $")
    chat.type("/help\n")
    assert "/load FOLDER" in chat.until(r"\n> $")
    chat.type("\x04")
    assert chat.process.wait(DEADLINE) == 0

    again = terminal("chat", folder, "--state", tmp_path / "state", "--max-new-tokens", "30")
    again.until(r"\n> $")
    again.type("more\n")
    again.until(r"more\r\n[A-Za-z]{30}\r\n> $")
    again.type("/quit\n")
    assert again.process.wait(DEADLINE) == 0


def call(monkeypatch, capsys, arguments, stdin=""):
    """The command in this process, with lines on standard input: exit code, output, messages."""
    given = stdin if isinstance(stdin, bytes) else stdin.encode()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(given)))
    code = main([str(argument) for argument in arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_lines_of_a_pipe_are_messages(folder, tmp_path, monkeypatch, capsys):
    common = ["chat", folder, "--max-new-tokens", "8", "--temperature", "0"]
    code, out, err = call(monkeypatch, capsys, common, f"hi\n\nthere\n/save {tmp_path / 's'}\nlast\n")
    first, second, third = out.splitlines()
    assert code == 0
    assert [len(line) for line in (first, second, third)] == [8, 8, 8]
    assert err.startswith("saved the state after ")
    code, out, _ = call(monkeypatch, capsys, [*common, "--state", tmp_path / "s"], "last")
    assert (code, out) == (0, f"{third}\n")
    code, out, _ = call(monkeypatch, capsys, common, f"/load {tmp_path / 's'}\nlast\n/reset\nhi\n/retry\n")
    assert (code, out.splitlines()) == (0, [third, first, first])


def test_answers_as_json(folder, monkeypatch, capsys):
    arguments = ["chat", folder, "--max-new-tokens", "8", "--temperature", "0"]
    plain = call(monkeypatch, capsys, arguments, "hi\n/wrong\nthere\n")
    code, out, _ = call(monkeypatch, capsys, [*arguments, "--json"], "hi\n/wrong\nthere\n")
    found = json.loads(out)
    assert (code, found["exit_code"], plain[0]) == (1, 1, 1)
    assert [turn["message"] for turn in found["turns"]] == ["hi", "there"]
    assert [turn["answer"] for turn in found["turns"]] == plain[1].splitlines()


def test_a_document_is_read_by_one_command_and_asked_by_others(folder, tmp_path, monkeypatch, capsys):
    (tmp_path / "doc.txt").write_text("All there is to know.\n" * 100)
    arguments = ["read", folder, "--file", tmp_path / "doc.txt", "--out", tmp_path / "state"]
    code, out, _ = call(monkeypatch, capsys, arguments)
    assert code == 0
    assert re.fullmatch(r".*state: 2,2\d\d tokens read, \d+ KiB\n", out)
    common = ["chat", folder, "--max-new-tokens", "8", "--temperature", "0"]
    asked = [call(monkeypatch, capsys, [*common, "--state", tmp_path / "state"], "What?\n") for _ in range(2)]
    assert asked[0] == asked[1]
    by_command = call(monkeypatch, capsys, common, f"/read {tmp_path / 'doc.txt'}\nWhat?\n")
    assert by_command[1] == asked[0][1]
    assert by_command[2] == "read 2,206 tokens\n"


def test_the_plain_layout_is_said_once(folder, tmp_path, monkeypatch, capsys):
    make_model("llama").save_pretrained(tmp_path / "plain")
    tokenizer_with(None).save_pretrained(tmp_path / "plain")
    arguments = ["chat", tmp_path / "plain", "--max-new-tokens", "40"]
    code, out, err = call(monkeypatch, capsys, arguments, "a\nb\n")
    assert (code, len(out.splitlines())) == (0, 2)
    assert err.count("has no chat template: messages are laid out as User: and Assistant:") == 1


def test_a_conversation_longer_than_the_model_was_trained_for_is_said_once(tmp_path, monkeypatch, capsys):
    model = make_model("llama")
    model.config.max_position_embeddings = 32
    model.save_pretrained(tmp_path / "short")
    tokenizer_with().save_pretrained(tmp_path / "short")
    code, _, err = call(monkeypatch, capsys, ["chat", tmp_path / "short", "--max-new-tokens", "9"], "aaaa\nb\nc\n")
    assert code == 0
    assert err.count("the model was trained for 32: its answers may get worse") == 1


@pytest.mark.parametrize(
    ("arguments", "stdin", "sentence"),
    [
        (["chat", "FOLDER", "--state", "nowhere"], "", "there is no saved state nowhere"),
        (["chat", "nowhere/at/all"], "", "there is no folder nowhere/at/all"),
        (["chat", "FOLDER", "--max-new-tokens", "0"], "", "max_new_tokens is 0, expected at least 1"),
        (["chat", "FOLDER"], "/load nowhere\n", "there is no saved state nowhere"),
        (["chat", "FOLDER"], "/save\n", "/save needs a name: /save FOLDER"),
        (["chat", "FOLDER"], "/save FOLDER\n", "exists and is not a saved state"),
        (["chat", "FOLDER"], "/save new\n", "the state can't be saved: nothing was read yet"),
        (["chat", "FOLDER"], "/read nowhere.txt\n", "there is no file nowhere.txt"),
        (["chat", "FOLDER"], "/retry\n", "there is no message yet"),
        (["chat", "FOLDER"], b"\xff\xfe\n", "line 1 of standard input is not UTF-8"),
        (["read", "FOLDER"], "", "there is nothing to read: give --file"),
        (["read", "FOLDER", "--file", "nowhere.txt"], "", "there is no file nowhere.txt"),
        (["read", "FOLDER", "--file", "-", "--out", "FOLDER"], "", "exists and is not a saved state"),
    ],
)
def test_mistakes_are_one_sentence(folder, tmp_path, monkeypatch, capsys, arguments, stdin, sentence):
    monkeypatch.chdir(tmp_path)
    given = [str(folder) if argument == "FOLDER" else argument for argument in arguments]
    stdin = stdin.replace("FOLDER", str(folder)) if isinstance(stdin, str) else stdin
    code, out, err = call(monkeypatch, capsys, given, stdin)
    assert code == (2 if any(part in sentence for part in ("expected at least", "--file", "at/all")) else 1)
    assert out == ""
    assert sentence in err
    assert len(err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
