"""The model card of an extended model: what it is, how to use it, what was measured."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from latte import __version__
from latte.eval.extension import EXTENDED, GAP_CLOSED, ORIGINAL, SINKS, WINDOW
from latte.extend.model import LatteExtendedForCausalLM
from latte.loading import Original
from latte.recipe import ExtendRecipe

HEAD = """---
library_name: transformers
pipeline_tag: text-generation
tags: [latte, linear-attention, long-context]
{licence}---

# {name}, extended

{name} with its attention replaced by Latte-Macchiato: it reads text of any length at linear cost and writes from a
state of one size. Its own attention still sees the last {window} tokens{kept}; everything else comes
through {latents} latents a head. {new:,} of its {all:,} parameters are new; they were taught on {source}.
Before training, with a window as long as the text, its logits were within {exact:.0e} of the original's.

```python
import latte  # registers the architecture
from transformers import AutoModelForCausalLM, AutoTokenizer

model, tokenizer = AutoModelForCausalLM.from_pretrained("{folder}"), AutoTokenizer.from_pretrained("{folder}")
```

Made by latte {version}; the settings are in `recipe.yaml`, all figures in `results.json`, and drawn in
`report.html`.
"""


def model_card(
    original: Original, model: LatteExtendedForCausalLM, results: dict[str, Any], recipe: ExtendRecipe
) -> str:
    """The card, in Markdown."""
    head = HEAD.format(
        licence="" if original.licence is None else f"license: {original.licence}\n",
        name=original.name,
        window=recipe.window,
        kept=f", the first {recipe.sinks} and the {recipe.kept} with the best scores" * bool(recipe.kept)
        or f" and the first {recipe.sinks}",
        latents=recipe.latents,
        new=sum(parameter.numel() for parameter in model.new_parameters().values()),
        all=sum(parameter.numel() for parameter in model.parameters()),
        folder=recipe.out,
        version=__version__,
        source="Python's own sources" if recipe.data.source == "python-stdlib" else Path(recipe.data.source).name,
        exact=results["check"]["as_original"],
    )
    return head + "".join(perplexity_table(text, rows) for text, rows in results["perplexity"].items()) + gaps(results)


def gaps(results: dict[str, Any]) -> str:
    """What was asked for and could not be measured, as a paragraph; empty if there is nothing."""
    missing = results.get("unreached", {})
    parts = [f"{name} at {', '.join(f'{length:,}' for length in lengths)} tokens" for name, lengths in missing.items()]
    return f"\nNot measured, since the text is shorter: {'; '.join(parts)}.\n" if parts else ""


def perplexity_table(text: str, rows: dict[str, Any]) -> str:
    """Perplexity by context of one text, in Markdown."""
    names = [name for name in (ORIGINAL, WINDOW, SINKS, EXTENDED) if name in rows]
    contexts = sorted({int(context) for name in names for context in rows[name]})
    lines = [["context", *names, GAP_CLOSED], ["---"] * (len(names) + 2)]
    for context in map(str, contexts):
        cells = [
            f"{math.exp(min(rows[name][context]['loss'], 50)):.2f}" if context in rows[name] else "" for name in names
        ]
        closed = rows[GAP_CLOSED].get(context)
        lines.append([f"{int(context):,}", *cells, "" if closed is None else f"{closed:.0%}"])
    table = "".join("| " + " | ".join(line) + " |\n" for line in lines)
    return f"\n## Perplexity on {text}\n\n{table}\n{scored_tokens(rows)}\n"


def scored_tokens(rows: dict[str, Any]) -> str:
    """Which tokens the figures of one text are of, in a sentence."""
    counts = {
        name: {entry["tokens"] for entry in rows[name].values()}
        for name in (ORIGINAL, WINDOW, SINKS, EXTENDED)
        if rows.get(name)
    }
    every = set[int]().union(*counts.values())
    if len(every) == 1:
        return f"All figures are of the same {every.pop():,} tokens."
    parts = (f"{name} {', '.join(f'{count:,}' for count in sorted(found))}" for name, found in counts.items())
    return f"The figures are of different numbers of tokens: {'; '.join(parts)}."
