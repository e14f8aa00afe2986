"""The inspector in a real browser: what it shows after a click is what the model computes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from latte.report import Inspection, build_report, inspect_text, render_inspection, render_report
from tests.report.browser import Browser, browser, missing
from tests.report.support import TEXT, model, tokenizer
from tests.report.test_report import evaluation, make_run

READY = "return document.querySelector('#inspector')?.dataset.token !== undefined"


@pytest.fixture(scope="module")
def inspection() -> Inspection:
    return inspect_text(model("latte-r-swa++"), tokenizer(), TEXT, title="A small model")


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    with browser() as opened:
        yield opened


def shown(window: Browser) -> np.ndarray:
    return np.array(window.run("return [...document.querySelectorAll('.token')].map(e => Number(e.dataset.weight))"))


def chosen(window: Browser) -> tuple[int, int, int]:
    data = window.run("return {...document.querySelector('#inspector').dataset}")
    return int(data["layer"]), int(data["head"]), int(data["token"])


def expected(inspection: Inspection, place: tuple[int, int, int]) -> np.ndarray:
    weights_HTS = inspection.layers[place[0]].weights_HTS
    assert weights_HTS is not None
    return weights_HTS[place[1], place[2]]


# One test, because it is the one that a machine without a browser skips.
def test_inspector_shows_the_models_weights(
    inspection: Inspection, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    reason = missing()
    if reason is not None:
        pytest.skip(f"{reason}: the inspector is not tested in a browser here")
    window: Browser = request.getfixturevalue("window")
    page = tmp_path / "inspect.html"
    page.write_text(render_inspection(inspection), encoding="utf-8")
    window.open(page)
    window.wait(READY)

    # A click on a token: its weights are shown, they sum to 1, and they are the model's.
    window.click(".token[data-index='41']")
    window.wait("return document.querySelector('#inspector').dataset.token === '41'")
    place = chosen(window)
    assert place[2] == 41
    values = shown(window)
    assert values.sum() == pytest.approx(1, abs=1e-4)
    np.testing.assert_allclose(values, expected(inspection, place), atol=1e-3)
    assert "sums to 1.000" in window.run("return document.querySelector('.sum').textContent")
    # The list beside the text: the largest weights, largest first, as the model has them.
    listed = window.run("return [...document.querySelectorAll('.top .value')].map(e => Number(e.textContent))")
    np.testing.assert_allclose(listed, np.sort(expected(inspection, place))[::-1][: len(listed)], atol=1e-3)

    # How much comes through the window and each latent.
    slots_THM = inspection.layers[place[0]].slots_THM
    assert slots_THM is not None
    bars = window.run("return [...document.querySelectorAll('.slot')].map(e => Number(e.dataset.share))")
    np.testing.assert_allclose(bars, slots_THM[41, place[1]], atol=1e-3)
    assert sum(bars) == pytest.approx(1, abs=1e-4)

    # Only the window's part, then only the latents'.
    window_HTS = inspection.layers[place[0]].window_HTS
    assert window_HTS is not None
    near = slots_THM[41, place[1], 0] * window_HTS[place[1], 41]
    for part, wanted in (("window", near), ("latents", expected(inspection, place) - near)):
        window.run("document.querySelector(arguments[0]).click()", f"input[value='{part}']")
        np.testing.assert_allclose(shown(window), wanted, atol=1e-3)
    window.run("document.querySelector(\"input[value='all']\").click()")

    # A latent: what it reads, itself a distribution.
    window.click(".slot[data-slot='2']")
    reads = shown(window)
    assert reads.sum() == pytest.approx(1, abs=1e-4)
    np.testing.assert_allclose(reads, inspection.layers[place[0]].reads(place[1], 1, 41), atol=1e-3)
    window.click(".slot[data-slot='2']")

    # Another head, another layer.
    window.click("fieldset:nth-of-type(2) label:nth-of-type(3)")
    window.wait("return document.querySelector('#inspector').dataset.head === '2'")
    np.testing.assert_allclose(shown(window), expected(inspection, (place[0], 2, 41)), atol=1e-3)
    window.click("fieldset:nth-of-type(1) label:nth-of-type(2)")
    window.wait("return document.querySelector('#inspector').dataset.layer === '1'")
    np.testing.assert_allclose(shown(window), expected(inspection, (1, 2, 41)), atol=1e-3)

    # The keyboard: arrows move the chosen token, and the focus with it.
    window.click(".token[data-index='41']")
    window.press("right")
    assert chosen(window) == (1, 2, 42)
    window.press("left")
    window.press("left")
    assert chosen(window) == (1, 2, 40)
    np.testing.assert_allclose(shown(window), expected(inspection, (1, 2, 40)), atol=1e-3)
    assert window.run("return document.activeElement.dataset.index") == "40"
    window.press("up")
    assert chosen(window)[2] < 40

    # Pointing at a token says its weight; and nothing went wrong anywhere on the way.
    window.hover(".token[data-index='5']")
    assert "position 5" in window.run("return document.querySelector('.tip').textContent")
    assert window.console() == []
    check_report(window, tmp_path)


def check_report(window: Browser, tmp_path: Path) -> None:
    """A report of two runs: figures are drawn, answer to pointer and keyboard, and lead into the inspector."""
    for variant in ("latte-r-swa++", "transformer++"):
        evaluation(make_run(tmp_path / "both" / variant, variant))
    page = tmp_path / "report.html"
    page.write_text(render_report(build_report(tmp_path / "both", text=TEXT, measure=False, sample_tokens=4)))
    window.open(page)
    window.wait("return document.querySelector('#inspector .token.chosen')")
    window.wait("return document.querySelectorAll('.heat-cell').length === 8")
    assert window.run("return document.querySelectorAll('.plot svg').length") == 4
    assert window.run("return document.querySelectorAll('#results tbody tr').length") == 2

    # A legend's entry takes its line away and brings it back.
    drawn = "return document.querySelectorAll('#context .plot')[0].querySelectorAll('path.line').length"
    assert window.run(drawn) == 2
    window.click("#context .legend-entry")
    assert window.run(drawn) == 1
    window.click("#context .legend-entry")
    assert window.run(drawn) == 2
    # Reading a chart, by pointer and by keyboard.
    window.run("document.querySelector('#context .plot').focus()")
    window.press("right")
    assert "3.500" in window.run("return document.querySelector('.tip').textContent")

    # A click into a heat map opens the inspector at that layer and head.
    window.click(".heat-cell:nth-of-type(3) canvas")
    window.wait("return document.querySelector('#inspector > div').dataset.head === '2'")
    # The other model, which has no latents, in the same inspector.
    window.click("#inspect .picker label:nth-of-type(2)")
    window.wait("return !document.querySelector('#inspector .slots')")
    assert shown(window).sum() == pytest.approx(1, abs=1e-4)

    # Narrow screens: nothing sticks out.
    size = {"width": 420, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    window.call("POST", "/goog/cdp/execute", {"cmd": "Emulation.setDeviceMetricsOverride", "params": size})
    assert window.run("return document.documentElement.scrollWidth") <= 420
    assert window.console() == []
