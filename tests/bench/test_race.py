"""The race with llama.cpp: what is exported is the same model, and without llama.cpp a line says so."""

from __future__ import annotations

import shutil

import pytest
import torch

from latte.bench import race
from latte.bench.export import write_gguf
from latte.bench.figures import Plan
from latte.bench.harness import Skipped
from latte.bench.llama_cpp import LlamaCpp
from latte.bench.sizes import TINY, TRANSFORMER
from latte.loading import read_gguf
from latte.loading.packed import packed_model
from latte.ops import native

pytest.importorskip("gguf")


@torch.no_grad()
def test_an_exported_transformer_comes_back_bit_by_bit(tmp_path):
    model = TINY.model(TRANSFORMER).eval().quantize("int8")
    write_gguf(model, tmp_path / "t.gguf")
    again = packed_model(read_gguf(tmp_path / "t.gguf"))
    ids = torch.arange(40)[None] % TINY.vocabulary
    assert torch.equal(again.lm_head.blocks, model.lm_head.blocks)
    torch.testing.assert_close(again(ids).logits, model(ids).logits, rtol=0, atol=0)


def test_without_node_a_line_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Skipped, match=r"llama\.cpp is left out: there is no node \(npm install node-llama-cpp"):
        LlamaCpp(tmp_path / "t.gguf", 64, 1)


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no node")
def test_without_the_package_a_line_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NODE_PATH", raising=False)
    with pytest.raises(Skipped, match=r"Cannot find module 'node-llama-cpp' \(npm install node-llama-cpp"):
        LlamaCpp(tmp_path / "t.gguf", 64, 1)


@pytest.mark.skipif(not native.available(), reason=native.describe())
def test_everybody_reads_and_writes_at_every_context(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    figures = race.run(Plan((8, 24), repeats=1, budget=0.0, say=said.append), TINY, quick=True)
    ours = {(f.kind, f.name, f.length) for f in figures if f.ours}
    both = {
        (kind, name, length) for kind in ("read", "write") for name in ("extended", "original") for length in (8, 24)
    }
    assert ours == both | {("read", race.EXPORTED, 24), ("write", race.EXPORTED, 24)}
    assert all(f.best and f.best > 0 for f in figures)
    assert {f.repeats for f in figures if f.kind == "write"} == {race.TOKENS}
    assert any(line.startswith("race     24 extended") for line in said)
