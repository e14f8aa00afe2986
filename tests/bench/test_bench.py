"""A small run of everything, and what is said about the targets."""

import importlib.util
import itertools
import json

import numpy as np
import pytest
import torch

from latte import bench
from latte.bench import acceptance, allocator, decode, layers, ops, yardsticks
from latte.bench.figures import Figure
from latte.bench.run import SUITES
from latte.bench.sizes import OURS, STANDARD, TINY, TRANSFORMER, parameters
from latte.cli.main import main
from latte.models.blocks import Block
from latte.ops import causal_latte
from latte.recipe import TIMED_SUITES
from latte.tokens import Tokens


@torch.no_grad()
def test_a_layer_read_in_pieces_is_timed_as_a_whole(monkeypatch):
    """Each look at the clock takes a second here: what is added up is a number of looks."""
    ticks = itertools.count()
    monkeypatch.setattr(layers.time, "perf_counter", lambda: float(next(ticks)))
    monkeypatch.setattr(Block, "TOKENS_AT_ONCE", 8)
    block = Block(TINY.layer_config(OURS), 0).eval()
    clock, parts = layers._Clock(block), []
    with clock:
        for tokens in (8, 24):
            x_BTD = torch.randn(1, tokens, TINY.width)
            parts.append(clock.measure(lambda x=x_BTD: block(x, None, Tokens.of(x))))
    one, three = parts
    assert one["mixing"] > 0
    assert three["mixing"] == 3 * one["mixing"]
    assert three["projections"] == 3 * one["projections"]


@pytest.mark.parametrize(
    ("suite", "lengths"), [("layers", [24, 48]), ("models", [24, 48]), ("decode", [24, 48]), ("memory", [4096])]
)
def test_a_tiny_run_writes_json_a_summary_and_plots(suite, lengths, tmp_path):
    said = []
    figures = bench.run(suite, lengths, quick=True, out=tmp_path, say=said.append, size=TINY)
    document = json.loads((tmp_path / "results.json").read_text())
    assert document["format"] == "latte-bench-1"
    assert document["machine"]["cpu"]
    assert document["peaks"]["matmul_flops"] > 0
    assert len(document["figures"]) == len(figures)
    assert {f["length"] for f in document["figures"] if f["kind"] != "bits"} == set(lengths)
    mine = [f for f in document["figures"] if f.get("ours")]
    assert mine
    assert all(f["best"] > 0 and "skipped" not in f for f in mine)
    summary = (tmp_path / "summary.md").read_text()
    assert summary.count("| 1 |") == 2  # both targets of point 1, not measured here
    plots = list(tmp_path.glob("*.png"))
    assert plots
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in plots)
    assert any(line.startswith("wrote ") for line in said)


def test_the_ops_suite_names_every_peer(tmp_path, monkeypatch):
    monkeypatch.setattr(ops, "_flex", lambda length, training: lambda: None)  # compiling takes longer than all else
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name in ("jax", "mambapy") else find(name))
    figures = bench.run("ops", [16], quick=True, out=tmp_path, say=lambda line: None)
    names = {f.name for f in figures}
    assert {ops.LATTE, ops.LATTE_TORCH, ops.LISTING, ops.NEAR, ops.FLEX, ops.SDPA, ops.BOTH} <= names
    listing = next(f for f in figures if f.name == ops.LISTING)
    assert listing.skipped == "jax is not installed (pip install 'latte-attention[bench]')"
    assert "- skipped: jax scan" in (tmp_path / "summary.md").read_text()


def test_the_listing_in_jax_is_our_causal_latte():
    pytest.importorskip("jax", reason="jax is not installed: the paper's listing cannot be compared")
    from latte.bench import listing

    random = np.random.default_rng(0)
    p, k = (random.standard_normal((2, 33, 3, 5), np.float32) for _ in range(2))
    v = random.standard_normal((2, 33, 3, 7), np.float32)
    p = torch.from_numpy(p).softmax(-1).numpy()
    expected, _ = causal_latte(*(torch.from_numpy(x).double() for x in (p, 9 * k, v)))
    got = torch.from_numpy(np.array(listing.causal_latte(p, 9 * k, v)))
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


def test_a_peer_in_its_own_process_times_itself():
    pytest.importorskip("jax", reason="jax is not installed")
    from latte.bench.harness import Seconds, Skipped
    from latte.bench.worker import Worker

    worker = Worker("latte.bench.listing", 1)
    try:
        worker.prepare(length=8, training=True, heads=1, latents=2, width=2)
        assert isinstance(worker.run(), Seconds)
        with pytest.raises(Skipped, match="TypeError"):
            worker.prepare(unknown=1)
    finally:
        worker.close()


def test_both_models_are_of_one_size():
    with torch.device("meta"):
        ours, theirs = (parameters(STANDARD.model(variant)) for variant in (OURS, TRANSFORMER))
    assert ours == pytest.approx(30e6, rel=0.07)
    assert ours == pytest.approx(theirs, rel=0.02)


def times(suite, kind, name, seconds, **rest):
    return [Figure(suite, kind, name, length, best=best, **rest) for length, best in seconds.items()]


def test_targets_are_met_or_not_by_ratios_of_one_run():
    figures = [
        *times("ops", "forward", ops.LATTE, {16384: 0.02}),
        *times("ops", "forward", ops.LISTING, {16384: 0.15}),
        *times("ops", "forward", ops.NEAR, {4096: 0.02}, median=0.03, repeats=3),
        *times("ops", "forward", ops.FLEX, {4096: 0.06}, median=0.12, repeats=3),
        *times("models", "training", OURS, {1024: 2.0, 2048: 1.0, 4096: 2.0}),
        *times("models", "training", TRANSFORMER, {1024: 1.0, 2048: 1.1, 4096: 4.0}),
        *times("decode", "decode", OURS, {1024: 0.010, 131072: 0.0104}, share_of_bandwidth=0.5, median=0.012),
        *times("decode", "decode", yardsticks.SUM, {1024: 0.005}, share_of_bandwidth=1.0, median=0.009),
        *times("decode", "decode", decode.LLAMA, {1024: 0.020}),
        *times("memory", "memory", OURS, {1024: 100.0, 2048: 199.0, 4096: 500.0}),
        *times("memory", "memory", TRANSFORMER, {2048: 200.0, 4096: 700.0}),
        *times("allocator", "forward", allocator.KEPT, {16384: 0.020}, median=0.025),
        *times("allocator", "forward", allocator.DEFAULT, {16384: 0.020}, median=0.070),
        Figure("layers", "share", OURS, 512, best=1.0, extra={"share": 0.5}),
        Figure("layers", "share", OURS, 1024, best=1.0, extra={"share": 0.15}),
    ]
    table = acceptance.rows(figures)
    found = {(row.point, row.text.split(":")[0].split(";")[0]): row for row in table}
    assert found["1", "causal Latte, T = 16384, forward"].met is True
    assert found["1", "causal Latte, T = 16384, forward"].measured == "7.5x"
    assert found["1", "causal Latte, T = 4096, with gradient"].met is None
    near = found["2", "window 128, T = 4096, forward"]
    assert near.met is False, "the best decide, though the medians are 4x"
    assert near.measured == "3.0x (medians: 4.0x)"
    assert found["3", "largest share of mixing in a layer's forward pass"].measured == "15.0% at T = 1024"
    assert found["4", "training, transformer++'s time over ours, at its smallest"].measured == "1.10x at T = 2048"
    assert found["5", "decoding at context 131072 against 1024"].met is True
    reads = found["5", "weights read at batch 1, share of memory bandwidth"]
    assert reads.met is False
    assert reads.measured == "50.0% at context 131072 (medians: 75.0%)"
    assert "Llama takes 2.00x as long" in reads.text
    assert found["6", "peak memory of training when T doubles, at its largest"].measured == "2.51x to T = 4096"
    assert found["6", "peak memory of training over transformer++'s, at its largest"].met is True
    fresh = found["7", "causal Latte, T = 16384, forward"]
    assert fresh.met is True
    assert fresh.measured == "1.25x (with glibc's defaults: 3.50x)"


def test_the_command_knows_the_suites_that_there_are():
    assert set(TIMED_SUITES) == set(SUITES)


def test_mistakes_are_one_sentence(capsys):
    """Before anything heavy is imported: a wrong command line, exit code 2."""
    assert main(["bench", "--suite", "opps"]) == 2
    names = "ops, layers, models, decode, race, memory, allocator, registry, mechanisms, batching, speculation, all"
    assert capsys.readouterr().err == (
        f"latte bench: unknown suite 'opps' (did you mean 'ops'?), expected one of {names}\n"
    )
    for arguments, sentence in (
        (["--suite", "speculation"], "suite speculation needs a --model whose text a draft can guess"),
        (["--suite", "batching", "--lengths", "64"], "lengths were given, but suite batching has requests of its own"),
        (["--suite", "ops", "--model", "x"], "a model was given, but suite ops measures models of its own"),
        (["--suite", "race", "--model", "x.gguf"], "there is no file x.gguf: the race needs a .gguf file"),
        (["--suite", "batching", "--draft", "x"], "a draft was given, but suite batching has none"),
    ):
        assert main(["bench", *arguments]) == 2
        assert sentence in capsys.readouterr().err
    with pytest.raises(ValueError, match="expected one or more numbers of tokens"):
        bench.run("ops", [0])
