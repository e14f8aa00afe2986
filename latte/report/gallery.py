"""The registered mechanisms as a page of the docs: docs/mechanisms.md."""

from __future__ import annotations

import inspect
import json
import re
import sys
from pathlib import Path

import torch

from latte.mixers import Mixer, mixer_class, names
from latte.models.presets import example_layer, variants

#: What `latte bench --suite mechanisms` wrote.
RESULTS = Path("docs") / "results" / "mechanisms" / "results.json"
CONTEXT = 4096
HEADER = """# Mechanisms

Made from the registry by `python -m latte.report.gallery > docs/mechanisms.md`; a test keeps it so. One layer at the
`small` preset (width 384, 8 heads): the state of one row in KiB, for a state that grows with every token per token;
millions of flops of one token of a forward pass behind 4,096 others, in projections and in what the mechanism itself
counts beside them; whether its weights are probabilities; and tokens per second in training at 4,096 tokens, forward
and backward, as `latte bench --suite mechanisms --lengths 4096 --out docs/results/mechanisms` measured them, and how
many times as many that is as the layer of transformers with the same widths in its torch code. Where a layer is mostly
projections, as Lightning's, both are bound by the same matrix products, and no mixing is fast enough for more.

| mechanism | directions | state (KiB) | growth | Mflop a token | normalised | tokens/s | over transformers |
|---|---|---|---|---|---|---|---|
"""


def page(results: Path | None = None) -> str:
    """A table of all mechanisms, then each with its equation, source and presets."""
    measured = _measured(results)
    rows, sections = [], []
    for name in names():
        cls, layer = mixer_class(name), example_layer(name, "small")
        cells = [
            f"[`{name}`](#{name})",
            ", ".join(cls.directions),
            *_state(layer),
            f"{layer.flops_per_token(CONTEXT) / 1e6:.2f}",
            "yes" if getattr(cls, "normalised", False) else "",
            *measured.get(name, ("-", "-")),
        ]
        rows.append(f"| {' | '.join(cells)} |\n")
        sections.append(_section(name, cls))
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


def _measured(results: Path | None) -> dict[str, tuple[str, str]]:
    """Tokens per second, and how many times those of the peer."""
    if results is None or not results.is_file():
        return {}
    figures = json.loads(results.read_text(encoding="utf-8"))["figures"]
    seconds = {
        figure["name"]: figure["best"]
        for figure in figures
        if figure["suite"] == "mechanisms" and figure["length"] == CONTEXT and "best" in figure
    }

    def ratio(name: str) -> str:
        peer = f"{name} (transformers)"
        return f"{seconds[peer] / seconds[name]:.1f}" if peer in seconds else "-"

    return {name: (f"{CONTEXT / best:,.0f}", ratio(name)) for name, best in seconds.items()}


if __name__ == "__main__":
    sys.stdout.write(page(RESULTS))
