"""The page and plots of an extension: they hold the figures, need nothing else, and bear with what is missing."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from latte.recipe import ExtendRecipe
from latte.report.extension import lead, render_results
from latte.report.extension_charts import layer_chart, perplexity_chart, position_chart
from latte.report.extension_plots import write_plots
from latte.report.model_card import perplexity_table
from tests.report.browser import Browser, browser, missing
from tests.report.test_report import page_data

CONTEXTS = (256, 1024, 4096, 16384)
#: Loss at each context; the pretrained model was made for 256 tokens and is not given more than 4,096.
LOSSES = {
    "original": (1.401, 3.912, 7.093),
    "window": (1.533, 4.105, 6.211),
    "window and sinks": (1.472, 1.468, 1.467, 1.466),
    "extended": (1.412, 1.371, 1.352, 1.349),
}


def example(texts: tuple[str, ...] = ("validation", "stories")) -> dict[str, Any]:
    """Figures in the shape of results.json, of a small model on short stories."""
    perplexity: dict[str, Any] = {}
    positions: dict[str, Any] = {}
    for shift, text in enumerate(texts):
        perplexity[text], positions[text] = {}, {}
        for name, losses in LOSSES.items():
            perplexity[text][name] = {
                str(context): at_context(name, context, loss + shift / 4)
                for context, loss in zip(CONTEXTS, losses, strict=False)
            }
            longest = CONTEXTS[len(losses) - 1]
            edges = [2**power for power in range(int(math.log2(longest)) + 1)]
            positions[text][name] = [
                {
                    "first": first,
                    "last": 2 * first - 1,
                    "tokens": 100,
                    "loss": losses[0 if first <= 256 else -1] + 4 / first,
                }
                for first in edges
            ]
        perplexity[text]["gap closed"] = {"256": 0.845 - shift / 10}
    recipe = asdict(ExtendRecipe(model="stories15m", out="runs/stories15m-extended"))
    recall = {"original": (1.0,), "window and sinks": (0.25, 0.125), "extended": (0.75, 0.5)}
    cost = {"original": lambda n: (4.1 + n / 200, 36864 * n), "extended": lambda n: (3.9, 5 * 2**20)}
    return {
        "recipe": recipe,
        "name": "stories15m",
        "layers": {
            "transfer": {
                "layers_before": [0.00638, 0.019123, 0.016287, 0.018235, 0.028443, 0.020193],
                "layers": [0.0011, 0.0042, 0.0031, 0.0037, 0.0081, 0.0052],
            },
            "distil": {"layers": [0.0014, 0.0049, 0.0035, 0.0044, 0.0089, 0.0063]},
        },
        "perplexity": perplexity,
        "positions": positions,
        "retrieval": {
            name: {
                str(context): {
                    depth: {"recall": share * scale, "log_probability": -2.31 - 3 * (1 - share)}
                    for depth, scale in (("0.1", 0.5), ("0.5", 0.75), ("0.9", 1.0))
                }
                for context, share in zip(CONTEXTS, shares, strict=False)
            }
            for name, shares in recall.items()
        }
        | {"window": {}},
        "decoding": {
            name: {
                str(context): {"seconds_per_token": of(context)[0] / 1e3, "state_bytes": of(context)[1]}
                for context in (256, 4096, 65536)
            }
            for name, of in cost.items()
        },
        "own_context": 256,
    }


def at_context(name: str, context: int, loss: float) -> dict[str, float]:
    return {
        "context": context,
        "tokens": 40959,
        "loss": loss,
        "perplexity": math.exp(loss),
        "bits_per_byte": loss / math.log(2) / 4,
        "tokens_per_second": 5123.4,
        "state_bytes": 36864 * context if name == "original" else 5 * 2**20,
    }


def test_the_page_holds_the_figures_and_loads_nothing() -> None:
    results = example()
    page = render_results(results)
    assert re.findall(r'(?:src|href)="([^"]*)"', page) == ["data:,"]
    assert "http://" not in page
    assert "https://" not in page
    assert "<h1>stories15m, extended</h1>" in page
    data = page_data(page)
    assert [text["name"] for text in data["texts"]] == ["validation", "stories"]
    first = data["texts"][0]
    lines = {line["name"]: line["points"] for line in first["perplexity"]["lines"]}
    assert lines["original"] == [
        [context, float(f"{math.exp(loss):.6g}")] for context, loss in zip(CONTEXTS, LOSSES["original"], strict=False)
    ]
    assert [x for x, _ in lines["extended"]] == list(CONTEXTS)
    assert first["closed"] == [[256, 0.845]]
    assert [(row["contender"], row["context"]) for row in first["rows"][:2]] == [("extended", 256), ("extended", 1024)]
    assert first["rows"][0]["bits_per_byte"] == pytest.approx(1.412 / math.log(2) / 4, rel=1e-5)
    assert [line["name"] for line in data["layers"]["lines"]] == ["before", "after transfer", "after distil"]
    assert data["layers"]["lines"][0]["points"][0] == [1, 0.00638]
    assert data["time"]["lines"][0]["points"][-1] == [65536, 3.9]
    assert data["state"]["lines"][1]["points"][-1] == pytest.approx([65536, 36864 * 65536], rel=1e-5)
    assert data["own"] == 256
    assert "num_latents" not in data["settings"]
    assert "latents: 16" in data["settings"]


def test_the_lead_says_how_it_came_out() -> None:
    text = lead(example())
    assert "On validation at 256 tokens its perplexity is 4.10, the original’s 4.06" in text
    assert "At 16,384 tokens it is 3.85." in text
    assert "After 65,536 tokens it writes the next in 3.9 ms from 5 MiB, the original in 332 ms from 2.25 GiB." in text


def test_tables_say_which_tokens_they_are_of() -> None:
    rows = example()["perplexity"]["validation"]
    assert "All figures are of the same 40,959 tokens." in perplexity_table("validation", rows)
    rows["original"]["256"]["tokens"] = 255
    assert "different numbers of tokens: original 255" in perplexity_table("validation", rows)
    assert "All figures are of the same 40,959 tokens." in render_results(example())


def test_lines_that_leave_do_not_flatten_the_others() -> None:
    chart = perplexity_chart(example(), "validation")
    assert chart.top == pytest.approx(2 * math.exp(1.472))
    assert page_data(render_results(example()))["texts"][0]["perplexity"]["note"] == (
        "Above the frame: original, 1,204 at 4,096 tokens; window, 498.2 at 4,096 tokens."
    )
    calm = example()
    for rows in calm["perplexity"]["validation"], calm["positions"]["validation"]:
        del rows["original"], rows["window"]
    assert perplexity_chart(calm, "validation").top is None
    # The first tokens of a text stand above the frame as well, and nobody has to be told.
    assert position_chart(calm, "validation").top is not None
    assert page_data(render_results(calm))["texts"][0]["positions"]["note"] is None


def test_retrieval_is_a_grid_with_holes() -> None:
    found = page_data(render_results(example()))["retrieval"]
    assert found["contexts"] == [256, 1024]
    assert found["depths"] == [0.1, 0.5, 0.9]
    cells = {entry["name"]: entry["cells"] for entry in found["contenders"]}
    assert list(cells) == ["extended", "original", "window and sinks"]
    assert cells["original"][2] == [[1.0, -2.31], None]
    assert cells["extended"][1] == [[0.5625, -3.06], [0.375, -3.81]]


def bare() -> dict[str, Any]:
    """As little as a recipe can ask for: one text, one context, nothing else."""
    results = example(("validation",))
    results["perplexity"]["validation"] = {
        "extended": {"256": at_context("extended", 256, 1.4)},
        "gap closed": {},
    }
    results["positions"] = {}
    results["retrieval"] = {name: {} for name in LOSSES}
    results["decoding"] = {"original": {}, "extended": {}}
    results["layers"] = {}
    results["own_context"] = 0
    return results


def broken() -> dict[str, Any]:
    """A model that came to nothing: losses that are no numbers, distances of zero."""
    results = example(("validation",))
    rows = results["perplexity"]["validation"]
    rows["extended"]["4096"].update(loss=math.nan, perplexity=math.nan)
    rows["original"]["4096"].update(loss=800.0, perplexity=math.exp(700))
    rows["gap closed"] = {"256": -0.4, "1024": math.nan}
    results["layers"]["transfer"]["layers"] = [0.0, math.inf, 0.1]
    results["retrieval"]["extended"]["256"]["0.5"]["log_probability"] = -math.inf
    results["name"] = "a </script><b>{{data}}"
    return results


@pytest.mark.parametrize("results", [bare(), broken(), {}], ids=["bare", "broken", "nothing"])
def test_odd_figures_still_make_a_page(results: dict[str, Any], tmp_path: Path) -> None:
    before = copy.deepcopy(results)
    data = page_data(render_results(results))
    assert json.dumps(results) == json.dumps(before)
    assert "NaN" not in json.dumps(data)
    written = {path.name for path in write_plots(results, tmp_path)}
    assert ("perplexity.png" in written) == ("perplexity" in results)
    if not results.get("positions"):
        assert "positions.png" not in written
        assert data["retrieval"] is None


def test_a_broken_models_figures_are_left_out_and_not_drawn() -> None:
    results = broken()
    chart = perplexity_chart(results, "validation")
    assert [x for x, _ in chart.lines["extended"]] == [256, 1024, 16384]
    assert layer_chart(results).lines["after transfer"] == [(3, 0.1)]
    data = page_data(render_results(results))
    assert data["texts"][0]["closed"] == [[256, -0.4]]
    assert [row["loss"] for row in data["texts"][0]["rows"]][2] is None
    assert "<b>{{" not in render_results(results)


def test_plots_are_written_where_there_is_something_to_draw(tmp_path: Path) -> None:
    paths = write_plots(example(), tmp_path)
    assert [path.name for path in paths] == ["perplexity.png", "positions.png", "layers.png", "decoding.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
    alone = tmp_path / "alone"
    alone.mkdir()
    assert [path.name for path in write_plots(bare(), alone)] == ["perplexity.png"]


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    with browser() as opened:
        yield opened


# One test, because it is the one that a machine without a browser skips.
def test_the_page_in_a_browser(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    reason = missing()
    if reason is not None:
        pytest.skip(f"{reason}: the page is not tested in a browser here")
    window: Browser = request.getfixturevalue("window")
    page = tmp_path / "report.html"
    page.write_text(render_results(example()), encoding="utf-8")
    window.open(page)
    window.wait("return document.querySelector('.contents a')")
    assert window.run("return document.querySelectorAll('.plot svg').length") == 7
    titles = window.run("return [...document.querySelectorAll('.contents a')].map(e => e.textContent)")
    assert titles == ["Perplexity", "Context", "Training", "Retrieval", "Time and memory", "Figures", "Settings"]

    # The table: a row for each text and context, what is missing as a dash, the best marked.
    cells = (
        "return [...document.querySelectorAll('#results tbody tr')].map(r => [...r.children].map(c => c.textContent))"
    )
    rows = window.run(cells)
    assert rows[0] == ["validation"]
    assert rows[1] == ["256", "4.104", "4.059", "4.358", "4.632", "85%"]
    assert rows[4] == ["16,384", "3.854", "–", "4.332", "–", "–"]
    assert window.run("return document.querySelector('#results td.best').textContent") == "4.059"

    # The original leaves the frame and is told of; alone with window, it gets all the room.
    ticks = """return [...document.querySelectorAll('#context .card:first-child .tick')]
        .map(e => Number(e.textContent.replace(',', '')))"""
    assert "1,204 at 4,096" in window.run("return document.querySelector('#context .key').textContent")
    assert 8 in window.run(ticks)
    assert 1000 not in window.run(ticks)
    for entry in (1, 3):
        window.click(f"#context .legend-entry:nth-of-type({entry})")
    assert 1000 in window.run(ticks)
    for entry in (1, 3):
        window.click(f"#context .legend-entry:nth-of-type({entry})")
    # Reading a chart by keyboard; its own context is marked.
    window.run("document.querySelector('#context .plot').focus()")
    window.press("right")
    assert "4.104" in window.run("return document.querySelector('.tip').textContent")
    assert window.run("return document.querySelector('#context .mark-name').textContent") == "made for 256"

    recall = window.run("return [...document.querySelectorAll('.recall')].map(e => e.querySelectorAll('td').length)")
    assert recall == [6, 6, 6]
    assert window.run("return document.querySelectorAll('.bar-track').length") == 2

    # Narrow screens: nothing sticks out. And pages of odd figures are drawn without a complaint.
    size = {"width": 420, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    window.call("POST", "/goog/cdp/execute", {"cmd": "Emulation.setDeviceMetricsOverride", "params": size})
    assert window.run("return document.documentElement.scrollWidth") <= 420
    for results in (bare(), broken(), {}):
        page.write_text(render_results(results), encoding="utf-8")
        window.open(page)
        window.wait("return document.querySelector('#settings')")
        assert window.run("return document.documentElement.scrollWidth") <= 420
        assert not window.run("return /NaN|undefined|Infinity/.test(document.getElementById('page').innerText)")
    assert window.console() == []


def frontier() -> dict[str, Any]:
    def row(way: str, tokens: int | None, size: int, closed: float, recall: float) -> dict[str, Any]:
        texts = {"validation": {"loss": 3.5 - closed, "losses": [], "gap_closed": closed, "standard_error": 0.02}}
        cells = {"0.1": {"recall": recall - 0.1}, "0.9": {"recall": recall + 0.1}}
        return {"way": way, "tokens": tokens, "bytes": size, "texts": texts, "recall": cells}

    rows = [
        row("original", None, 9 * 2**20, 1.0, 0.9),
        row("window and sinks", 132, 2**18, 0.0, 0.2),
        row("window", 388, 10**6, 0.5, 0.2),
        row("kept", 388, 10**6, 0.75, 0.6),
        row("kept", 644, 2 * 10**6, 0.85, 0.8),
        row("all together", 388, 2**20 + 100, 0.8, 0.7),
    ]
    return {"context": 4096, "documents": {"validation": 16}, "rows": rows}


def test_the_frontier_and_the_kept_tokens_are_shown(tmp_path: Path) -> None:
    results = example()
    assert page_data(render_results(results))["frontier"] is None
    results["recipe"]["kept"] = 256
    results["frontier"] = frontier()
    results["remember"] = [{"layer": index, "explained": 0.5 + index / 10, "captured": 0.4} for index in range(3)]
    page = render_results(results)
    data = page_data(page)
    assert "the first 4 and the 256 best-scored" in page
    assert [chart["name"] for chart in data["frontier"]["charts"]] == ["gap closed, validation", "one fact recalled"]
    kept = {line["name"]: line["points"] for line in data["frontier"]["charts"][0]["lines"]}["kept"]
    assert kept == [[1e6, 0.75], [2e6, 0.85]]
    recalled = {line["name"]: line["points"] for line in data["frontier"]["charts"][1]["lines"]}
    assert recalled["window"] == [[1e6, 0.2]]
    assert data["frontier"]["rows"][3]["error"] == 0.02
    lines = {line["name"]: line["points"] for line in data["remember"]["lines"]}
    assert lines == {
        "attention captured": [[1, 0.4], [2, 0.4], [3, 0.4]],
        "deviance explained by scores": [[1, 0.5], [2, 0.6], [3, 0.7]],
    }
    written = {path.name for path in write_plots(results, tmp_path)}
    assert {"frontier.png", "remember.png"} <= written
