"""The registered mechanisms as a page of the docs: docs/mechanisms.md."""

from __future__ import annotations

import inspect
import json
import math
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from latte.decode.stages import STAGES
from latte.mixers import Mixer, mixer_class, names
from latte.models.presets import example_layer, variants

#: What `latte bench --suite mechanisms` wrote.
RESULTS = Path("docs") / "results" / "mechanisms" / "results.json"
CONTEXT = 4096
#: How many times as fast as the layer of transformers ours should be.
FASTER = 5
HEADER = """# Mechanisms

Made from the registry by `python -m latte.report.gallery > docs/mechanisms.md`; a test keeps it so. One layer at the
`small` preset (width 384, 8 heads): the state of one row in KiB, for a state that grows with every token per token;
millions of flops of one token of a forward pass behind 4,096 others, in projections and in what the mechanism itself
counts beside them; whether its weights are probabilities; whether the decode engine writes its tokens in one native
call ("native"; tokens of the others are read by torch's modules, layer by layer); and tokens per second in training at
4,096 tokens, forward and backward, as `latte bench --suite mechanisms --lengths 4096 --out docs/results/mechanisms`
measured them, and how many times as many that is as the layer of transformers with the same widths in its torch code
(those that loop over tokens in Python are timed with a quarter of the tokens, which is in their favour). Sections of
layers that are less than 5 times as fast as theirs, or slower than a third of `gla`, say what takes the time.

| mechanism | directions | state (KiB) | growth | Mflop a token | normalised | decoding | tokens/s | over transformers |
|---|---|---|---|---|---|---|---|---|
"""


def page(results: Path | None = None) -> str:
    """A table of all mechanisms, then each with its equation, source and presets."""
    seconds = _measured(results)
    rows, sections = [], []
    for name in names():
        cls, layer = mixer_class(name), example_layer(name, "small")
        cells = [
            f"[`{name}`](#{name})",
            ", ".join(cls.directions),
            *_state(layer),
            f"{layer.flops_per_token(CONTEXT) / 1e6:.2f}",
            "yes" if getattr(cls, "normalised", False) else "",
            "native" if name in STAGES else "",
            f"{1 / seconds[name]:,.0f}" if name in seconds else "-",
            f"{seconds[_peer(name)] / seconds[name]:.1f}" if {name, _peer(name)} <= seconds.keys() else "-",
        ]
        rows.append(f"| {' | '.join(cells)} |\n")
        sections.append(_section(name, cls) + _beside_transformers(name, seconds) + _beside_gla(name, layer, seconds))
    return HEADER + "".join(rows) + "".join(sections)


def _section(name: str, cls: type[Mixer]) -> str:
    first, _, rest = inspect.cleandoc(cls.__doc__ or "").partition("\n")
    module = inspect.getdoc(inspect.getmodule(cls)) or ""
    source = re.search(r"arXiv \d{4}\.\d{5}", f"{rest}\n{module}")
    about = module.partition("\n\n")[0].replace("\n", " ")
    built = [variant for variant, (owner, _) in variants().items() if owner is cls]
    facts = [f"`{cls.__module__.replace('.', '/')}.py`"]
    facts += [source.group()] if source else []
    facts += [f"presets {', '.join(f'`{variant}`' for variant in built)}"] if built else ["no preset of its own"]
    return f"\n## {name}\n\n{about}\n\n```\n{first}\n```\n\n{'; '.join(facts)}.\n"


def _state(layer: Mixer) -> tuple[str, str]:
    """KiB and growth."""
    if layer.config.bidirectional:
        return "", ""
    x_BTD = torch.zeros(1, 2, layer.config.hidden_size)
    size = layer.init_state(x_BTD).nbytes
    if layer.growth == "linear":
        with torch.no_grad():
            sizes = [_size(layer, x_BTD[:, :length]) for length in (1, 2)]
        size = sizes[1] - sizes[0]
    elif layer.growth == "log":
        with torch.no_grad():
            size = _size(layer, x_BTD[:, :1])
    return f"{size / 1024:.1f}", layer.growth


def _size(layer: Mixer, x_BTD: torch.Tensor) -> int:
    _, after = layer(x_BTD)
    return 0 if after is None else after.nbytes


def _beside_transformers(name: str, seconds: Mapping[str, float]) -> str:
    """What takes the time of a layer that is less than FASTER times as fast as that of transformers."""
    if not {name, _peer(name), _projections(name)} <= seconds.keys():
        return ""
    ours, theirs, products = (seconds[key] for key in (name, _peer(name), _projections(name)))
    if theirs >= FASTER * ours:
        return ""
    return (
        f"\nThe products of its projections, forward and backward, take {products / ours:.0%} of its training time: "
        f"with nothing else to do it would be {theirs / products:.1f} times as fast as the layer of transformers.\n"
    )


def _beside_gla(name: str, layer: Mixer, seconds: Mapping[str, float]) -> str:
    """Whether its arithmetic is why a causal layer trains at less than a third of GLA's tokens/s."""
    if not {name, "gla"} <= seconds.keys() or layer.config.bidirectional or 3 * seconds["gla"] >= seconds[name]:
        return ""
    share = seconds["gla"] / seconds[name]
    more = _arithmetic(layer) / _arithmetic(example_layer("gla", "small"))
    verdict = "its arithmetic demands it" if more * share >= 0.75 else "its arithmetic alone does not demand that"
    return (
        f"\nIt trains at {share:.2f} of `gla`'s tokens/s. With 4 flops for every number of its state, a token needs "
        f"{more:.1f} times as many flops as in `gla`: {verdict}.\n"
    )


def _arithmetic(layer: Mixer) -> float:
    """Flops of one token: projections, and to fade, write and read each number of the state once."""
    x_BTD = torch.zeros(1, 1, layer.config.hidden_size)
    numbers = layer.init_state(x_BTD).nbytes / x_BTD.element_size()
    if layer.growth == "log":  # blocks of doubling size, of which half are occupied on average
        with torch.no_grad():
            numbers = _size(layer, x_BTD) / x_BTD.element_size() * math.log2(CONTEXT) / 2
    return layer.flops_per_token(CONTEXT) + 4 * numbers


def _peer(name: str) -> str:
    return f"{name} (transformers)"


def _projections(name: str) -> str:
    return f"{name} (projections)"


def _measured(results: Path | None) -> dict[str, float]:
    """Seconds of a token in training, by the name of what was measured."""
    if results is None or not results.is_file():
        return {}
    figures = json.loads(results.read_text(encoding="utf-8"))["figures"]
    return {
        figure["name"]: figure["best"] / figure["length"]
        for figure in figures
        if figure["suite"] == "mechanisms" and "best" in figure
    }


if __name__ == "__main__":
    sys.stdout.write(page(RESULTS))
