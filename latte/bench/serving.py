"""Many requests in one batch beside one after another, and guesses of a draft beside plain greedy decoding."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from latte.bench.machine import describe
from latte.files import write_text
from latte.generation import Batch, Draft, ModelDraft, PromptLookup, Request, Speculation, speculate

REQUESTS, SHORTEST, LONGEST = 32, 10, 2000
#: Beginnings of texts for a draft to guess; the second half repeats itself, as code, tables and quotations do.
BEGINNINGS = (
    "Once upon a time, there was a little girl named Lily. She",
    "Tom and his dog went to the park. The dog saw a big",
    "One day, a small bird wanted to fly. The bird's mother said",
    "The sun was hot and the boy was thirsty. He asked his mom",
    "Lily has a red ball. Tom has a blue ball. Lily has a red ball. Tom has a blue ball. Lily has a",
    "One, two, three, four, five. One, two, three, four, five. One, two, three,",
    '"I want to play," said Ben. "I want to play," said Sue. "I want to play," said',
    "The cat sat. The dog sat. The cow sat. The cat sat. The dog sat. The",
)


def requests(words: int, count: int = REQUESTS, longest: int = LONGEST, prompt_share: float = 0.1) -> list[Request]:
    """Requests of 10 to ``longest`` tokens, evenly spread and shuffled; so much of each, on average, is its prompt.

    Prompts are read at the same speed alone and in a batch: what is gained is gained in writing.
    """
    random = torch.Generator().manual_seed(0)
    made = []
    for index in range(count):
        total = SHORTEST + (longest - SHORTEST) * index // max(1, count - 1)
        prompt = max(1, int(total * 2 * prompt_share * torch.rand((), generator=random)))
        ids = torch.randint(0, words, (prompt,), generator=random).tolist()
        made.append(Request(ids, max(1, total - prompt)))
    return [made[index] for index in torch.randperm(count, generator=random).tolist()]


def measure_batching(model: Any, asked: Sequence[Request], rows: Sequence[int], rounds: int = 1) -> dict[str, Any]:
    """Seconds for all requests with so many rows at a time; the first entry of ``rows`` is 1, one after another.

    Numbers of rows take turns for ``rounds`` rounds; the figures are of the best of each.
    """
    seconds = dict.fromkeys(rows, math.inf)
    texts = dict[int, list[list[int]]]()
    for _ in range(rounds):
        for count in rows:
            began = time.perf_counter()
            texts[count] = [ticket.tokens for ticket in Batch(model, max_rows=count).run(asked)]
            seconds[count] = min(seconds[count], time.perf_counter() - began)
    written = sum(map(len, texts[rows[0]]))
    figures = [
        {
            "rows": count,
            "seconds": seconds[count],
            "tokens_per_second": written / seconds[count],
            "speedup": seconds[rows[0]] / seconds[count],
            "same_tokens": texts[count] == texts[rows[0]],
        }
        for count in rows
    ]
    read = sum(len(request.ids) for request in asked)
    return {"requests": len(asked), "read": read, "written": written, "rounds": rounds, "figures": figures}


def measure_speculation(
    model: Any,
    prompts: Sequence[Sequence[int]],
    drafts: dict[str, Callable[[], Draft]],
    tokens: int,
    guesses: int,
    rounds: int = 1,
) -> dict[str, Any]:
    """Seconds of plain greedy decoding and with each draft, the share of guesses that held, and whether texts agree.

    Plain decoding and the drafts take turns at every prompt for ``rounds`` rounds; a figure adds the best of each
    prompt.
    """
    plain: Callable[[Sequence[int]], Any] = lambda prompt: Batch(model).run([Request(prompt, tokens)])[0]  # noqa: E731
    ways = {"none": plain} | {
        name: partial(_speculate, model, make=make, tokens=tokens, guesses=guesses) for name, make in drafts.items()
    }
    seconds = {name: [math.inf] * len(prompts) for name in ways}
    results = {name: list[Any](prompts) for name in ways}
    for _ in range(rounds):
        for index, prompt in enumerate(prompts):
            for name, way in ways.items():
                began = time.perf_counter()
                results[name][index] = way(prompt)
                seconds[name][index] = min(seconds[name][index], time.perf_counter() - began)
    texts = {name: [each.tokens for each in found] for name, found in results.items()}
    total = {name: sum(each) for name, each in seconds.items()}
    figures: list[dict[str, Any]] = [{"draft": "none", "seconds": total["none"], "speedup": 1.0}]
    for name in drafts:
        found = results[name]
        guessed, accepted = sum(each.guessed for each in found), sum(each.accepted for each in found)
        figures.append(
            {
                "draft": name,
                "seconds": total[name],
                "speedup": total["none"] / total[name],
                "acceptance": accepted / guessed if guessed else None,
                "tokens_per_call": sum(map(len, texts[name])) / max(1, sum(each.calls for each in found)),
                "same_tokens": texts[name] == texts["none"],
            }
        )
    written = sum(map(len, texts["none"]))
    return {"prompts": len(prompts), "written": written, "guesses": guesses, "rounds": rounds, "figures": figures}


def _speculate(model: Any, prompt: Sequence[int], make: Callable[[], Draft], tokens: int, guesses: int) -> Speculation:
    return speculate(model, prompt, make(), tokens, guesses=guesses)


def run(suite: str, model: str, draft: str, quick: bool, out: Path | None, say: Callable[[str], None]) -> Path | None:
    """Measure ``batching`` or ``speculation`` of a model and write ``<suite>.json`` and ``<suite>.md``.

    ``model`` and ``draft`` are folders or names; without a model, batching is measured of presets tiny and small with
    random weights: speed does not depend on them. Speculation needs a model whose text a draft can guess.
    """
    machine = describe()
    results = _batching(model, quick, say) if suite == "batching" else _speculation(model, draft, quick, say)
    command = f"latte bench --suite {suite}" + (f" --model {Path(model).name}" if model else "")
    command += (f" --draft {Path(draft).name}" if draft else "") + (" --quick" if quick else "")
    if out is None:
        return None
    out.mkdir(parents=True, exist_ok=True)
    document = {"command": command, "machine": machine, "results": results}
    write_text(out / f"{suite}.json", json.dumps(document, indent=1) + "\n")
    write_text(out / f"{suite}.md", _markdown(suite, command, machine, results))
    say(f"wrote {out / suite}.md")
    return out / f"{suite}.md"


def _batching(model: str, quick: bool, say: Callable[[str], None]) -> dict[str, Any]:
    from latte.models import LatteForCausalLM, preset

    models: dict[str, Any] = {}
    if model:
        models[Path(model).name] = load_ours(model, say)[0]
    else:
        torch.manual_seed(0)
        for size in ("tiny",) if quick else ("tiny", "small"):
            models[f"latte-r-swa++ {size}"] = LatteForCausalLM(preset("latte-r-swa++", size)).eval()
    results = {}
    for name, loaded in models.items():
        words = loaded.get_input_embeddings().num_embeddings
        for about, share in (("a tenth of the tokens in prompts", 0.1), ("half of the tokens in prompts", 0.5)):
            asked = requests(words, 4, 60, share) if quick else requests(words, prompt_share=share)
            mix = f"{name}, {about}"
            results[mix] = measure_batching(loaded, asked, (1, 4) if quick else (1, 8, 32), rounds=1 if quick else 2)
            for figure in results[mix]["figures"]:
                say(
                    f"{mix}: {figure['rows']} rows {figure['tokens_per_second']:.0f} tokens/s, {figure['speedup']:.1f}x"
                )
    return results


def _speculation(model: str, draft: str, quick: bool, say: Callable[[str], None]) -> dict[str, Any]:
    target, tokenizer = load_ours(model, say)
    drafts: dict[str, Callable[[], Draft]] = {"prompt lookup": PromptLookup}
    if draft:
        smaller, _ = load_ours(draft, say)
        drafts[Path(draft).name] = lambda: ModelDraft(smaller)
    first = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    ids = [first + tokenizer(text, add_special_tokens=False)["input_ids"] for text in BEGINNINGS]
    tokens, results = (16 if quick else 200), {}
    for name, prompts in (("beginnings", ids[:4]), ("repetitions", ids[4:])):
        results[name] = measure_speculation(target, prompts, drafts, tokens, guesses=4, rounds=1 if quick else 3)
        for figure in results[name]["figures"]:
            say(f"{name}: {figure['draft']} {figure['seconds']:.2f} s, {figure['speedup']:.2f}x")
    return results


def load_ours(name: str, say: Callable[[str], None]) -> tuple[Any, Any]:
    """A model of latte and its tokenizer; a pretrained one is extended first, its latents untrained."""
    from latte.extend import convert
    from latte.loading import load_any
    from latte.recipe import ExtendRecipe
    from latte.workflows.extension import mixer_options

    model, tokenizer = load_any(name)
    if not hasattr(model, "decode_each"):
        say(f"{name} is extended for this, its latents untrained: they take the same time")
        model = convert(model, mixer_options(ExtendRecipe(model=name)))
    return model.eval().requires_grad_(False), tokenizer


def _markdown(suite: str, command: str, machine: dict[str, Any], results: dict[str, Any]) -> str:
    lines = [f"# {suite.capitalize()}", "", f"`{command}`, {machine['date']}.", ""]
    lines += [
        f"{machine['cpu']}, {machine['threads']} threads, {machine['kernels']}, load {machine['load_before']}.",
        "",
    ]
    for name, result in results.items():
        about = ", ".join(f"{value:,} {key}" for key, value in result.items() if key != "figures")
        lines += [f"## {name}", "", f"{about}.", ""]
        names = list(result["figures"][-1])
        lines += ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
        for figure in result["figures"]:
            lines.append("| " + " | ".join(_cell(figure.get(key)) for key in names) + " |")
        lines.append("")
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return ""
    return f"{value:,.2f}" if isinstance(value, float) else str(value)
