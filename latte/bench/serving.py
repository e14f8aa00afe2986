"""Many requests in one batch beside one after another, and guesses of a draft beside plain greedy decoding."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from latte.bench.machine import describe
from latte.files import write_text
from latte.generation import Batch, Draft, ModelDraft, PromptLookup, Request, speculate

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


def measure_batching(model: Any, asked: Sequence[Request], rows: Sequence[int]) -> dict[str, Any]:
    """Seconds for all requests with so many rows at a time; the first entry of ``rows`` is 1, one after another."""
    figures, texts = [], dict[int, list[list[int]]]()
    for count in rows:
        began = time.perf_counter()
        texts[count] = [ticket.tokens for ticket in Batch(model, max_rows=count).run(asked)]
        figures.append({"rows": count, "seconds": time.perf_counter() - began})
    written = sum(map(len, texts[rows[0]]))
    for figure in figures:
        figure["tokens_per_second"] = written / figure["seconds"]
        figure["speedup"] = figures[0]["seconds"] / figure["seconds"]
        figure["same_tokens"] = texts[int(figure["rows"])] == texts[rows[0]]
    read = sum(len(request.ids) for request in asked)
    return {"requests": len(asked), "read": read, "written": written, "figures": figures}


def measure_speculation(
    model: Any, prompts: Sequence[Sequence[int]], drafts: dict[str, Callable[[], Draft]], tokens: int, guesses: int
) -> dict[str, Any]:
    """Seconds of plain greedy decoding and with each draft, the share of guesses that held, and whether texts agree."""
    began = time.perf_counter()
    plain = [Batch(model).run([Request(prompt, tokens)])[0].tokens for prompt in prompts]
    greedy = time.perf_counter() - began
    figures: list[dict[str, Any]] = [{"draft": "none", "seconds": greedy, "speedup": 1.0}]
    for name, make in drafts.items():
        began = time.perf_counter()
        results = [speculate(model, prompt, make(), tokens, guesses=guesses) for prompt in prompts]
        seconds = time.perf_counter() - began
        guessed, accepted = sum(each.guessed for each in results), sum(each.accepted for each in results)
        figures.append(
            {
                "draft": name,
                "seconds": seconds,
                "speedup": greedy / seconds,
                "acceptance": accepted / guessed if guessed else None,
                "tokens_per_call": sum(len(each.tokens) for each in results) / sum(each.calls for each in results),
                "same_tokens": [each.tokens for each in results] == plain,
            }
        )
    return {"prompts": len(prompts), "written": sum(map(len, plain)), "guesses": guesses, "figures": figures}


def run(suite: str, model: str, draft: str, quick: bool, out: Path | None, say: Callable[[str], None]) -> Path | None:
    """Measure ``batching`` or ``speculation`` of a model and write ``<suite>.json`` and ``<suite>.md``.

    ``model`` and ``draft`` are folders or names; without a model, batching is measured of presets tiny and small with
    random weights: speed does not depend on them.

    Raises:
        UserError: speculation without a model.
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
            results[mix] = measure_batching(loaded, asked, (1, 4) if quick else (1, 8, 32))
            for figure in results[mix]["figures"]:
                say(
                    f"{mix}: {figure['rows']} rows {figure['tokens_per_second']:.0f} tokens/s, {figure['speedup']:.1f}x"
                )
    return results


def _speculation(model: str, draft: str, quick: bool, say: Callable[[str], None]) -> dict[str, Any]:
    from latte.errors import UserError

    if not model:
        raise UserError("suite speculation needs a --model whose text a draft can guess")
    target, tokenizer = load_ours(model, say)
    drafts: dict[str, Callable[[], Draft]] = {"prompt lookup": PromptLookup}
    if draft:
        smaller, _ = load_ours(draft, say)
        drafts[Path(draft).name] = lambda: ModelDraft(smaller)
    first = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    ids = [first + tokenizer(text, add_special_tokens=False)["input_ids"] for text in BEGINNINGS]
    tokens, results = (16 if quick else 200), {}
    for name, prompts in (("beginnings", ids[:4]), ("repetitions", ids[4:])):
        results[name] = measure_speculation(target, prompts, drafts, tokens, guesses=4)
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
