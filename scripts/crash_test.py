"""Kill training again and again, damage checkpoints again and again, and see that nothing is lost or believed.

    python scripts/crash_test.py --kills 20 --extension-kills 20 --damages 100

Each kill is SIGKILL at a random moment of a training run, or of the extension of a pretrained model with all its stages
and measurements, every second one while something is being saved; the same run is then begun again, and its final
weights must equal those of a run that nothing disturbed, bit for bit. Each damage cuts a file of a checkpoint short or
flips one of its bits; all must be noticed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from latte.files import SCRATCH, Damaged, verify_folder
from latte.recipe import (
    DataRecipe,
    DistilRecipe,
    ExtendRecipe,
    JudgeRecipe,
    ModelRecipe,
    Recipe,
    StageRecipe,
    TrainRecipe,
)

# Children are forked from a process that has imported everything, so that a restart costs no seconds of imports.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["latte.train", "latte.workflows.extension"])

Task = Recipe | ExtendRecipe


def make_text(folder: Path) -> Path:
    text = folder / "text.jsonl"
    if not text.exists():
        chance = random.Random(0)
        lines = (" ".join(chance.choices(["latte", "macchiato", "cortado", "ristretto"], k=60)) for _ in range(200))
        text.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return text


def make_extension(folder: Path, name: str, steps: int) -> ExtendRecipe:
    """Extending a small random Llama in all three stages, the second with low-rank additions."""
    pretrained = folder / "pretrained"
    if not pretrained.exists():
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        from latte.data.tokenizer import byte_tokenizer

        tokenizer = byte_tokenizer()
        torch.manual_seed(0)
        sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = LlamaConfig(vocab_size=len(tokenizer), num_key_value_heads=2, max_position_embeddings=128, **sizes)
        LlamaForCausalLM(config).save_pretrained(pretrained)
        tokenizer.save_pretrained(pretrained)
    often = {"steps": steps, "sequence_length": 48, "save_every": 3, "eval_every": 10, "eval_rows": 1}
    return ExtendRecipe(
        model=str(pretrained),
        out=str(folder / name),
        window=8,
        sinks=2,
        latents=4,
        data=DataRecipe(source=str(make_text(folder)), cache=str(folder / "cache")),
        transfer=StageRecipe(**often),
        distil=DistilRecipe(**often, lora_rank=2),
        lengthen=DistilRecipe(**{**often, "sequence_length": 160}, divergence=0.0, next_token=1.0),
        judge=JudgeRecipe(
            contexts=[32, 64],
            long_contexts=[64],
            max_tokens=400,
            retrieval_contexts=[128],
            retrieval_trials=1,
            decode_contexts=[32],
            decode_tokens=2,
        ),
    )


def make_recipe(folder: Path, name: str, steps: int) -> Recipe:
    """A model small enough to train in seconds, saving so often that many kills meet a save."""
    text = make_text(folder)
    small = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    return Recipe(
        out=str(folder / name),
        data=DataRecipe(source=str(text), cache=str(folder / "cache"), tokenizer="bytes", sequence_length=32),
        model=ModelRecipe("latte-r-swa++", overrides={**small, "num_latents": 8, "window": 8, "dropout": 0.1}),
        train=TrainRecipe(steps=steps, batch_size=4, save_every=3, eval_every=10, eval_rows=4, log_every=5),
    )


def work(recipe: Task) -> None:
    """What a child does: train or extend, quietly."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    import torch

    torch.set_num_threads(1)
    if isinstance(recipe, ExtendRecipe):
        from latte.workflows.extension import extend

        extend(recipe)
    else:
        from latte.train import train

        train(recipe)


def start(recipe: Task) -> multiprocessing.process.BaseProcess:
    process = CONTEXT.Process(target=work, args=(recipe,))
    process.start()
    return process


def finish(recipe: Task) -> bytes:
    """Run to the end and give the final weights."""
    process = start(recipe)
    process.join()
    if process.exitcode != 0:
        raise SystemExit(f"the run in {recipe.out} failed with exit code {process.exitcode}")
    inside = "model.safetensors" if isinstance(recipe, ExtendRecipe) else "model/model.safetensors"
    return (Path(recipe.out) / inside).read_bytes()


def folders(recipe: Task) -> list[Path]:
    """All that a run writes to."""
    return [Path(recipe.out), Path(f"{recipe.out}-run")]


def remove(recipe: Task) -> None:
    for folder in folders(recipe):
        shutil.rmtree(folder, ignore_errors=True)


def found(recipe: Task, pattern: str) -> list[Path]:
    return [path for folder in folders(recipe) for path in folder.rglob(pattern)]


def kill_once(recipe: Task, chance: random.Random, duration: float, during_save: bool) -> str:
    """Start, wait for the moment, kill; says what was hit."""
    while True:
        process = start(recipe)
        moment = time.monotonic() + chance.uniform(0.2, 0.9) * duration
        while process.is_alive() and time.monotonic() < moment:
            time.sleep(0.002)
        while during_save and process.is_alive() and not found(recipe, f"{SCRATCH}*"):
            pass
        if during_save:
            time.sleep(chance.uniform(0, 0.01))
        process.kill()
        process.join()
        if process.exitcode == -signal.SIGKILL:
            break
        remove(recipe)  # it was faster than we: try again
    half = found(recipe, f"{SCRATCH}*")
    whole = sorted((path for path in found(recipe, "step-*") if path.is_dir()), key=lambda path: path.stat().st_mtime)
    where = "killed before any checkpoint"
    if whole:
        last = f"{whole[-1].parent.parent.name} {whole[-1].name}"
        where = f"killed with {len(whole)} checkpoints, the newest {last}"
    return where + (", in the middle of a save" if half else "")


def kills(make: Callable[[Path, str, int], Task], folder: Path, count: int, steps: int, chance: random.Random) -> int:
    """How many of ``count`` killed and resumed runs end with other weights than the undisturbed one."""
    reference = make(folder, "undisturbed", steps)
    finish(make(folder, "warm-up", 3))  # the token files, once
    began = time.monotonic()
    expected = finish(reference)
    duration = time.monotonic() - began
    print(f"undisturbed: {steps} steps in {duration:.1f} s", flush=True)
    wrong = met_saves = 0
    for number in range(1, count + 1):
        recipe = make(folder, f"killed-{number}", steps)
        said = kill_once(recipe, chance, duration, during_save=number % 2 == 0)
        met_saves += "in the middle" in said
        same = finish(recipe) == expected
        wrong += not same
        print(f"kill {number:3d}: {said}; resumed: {'bitwise equal' if same else 'DIFFERENT'}", flush=True)
        remove(recipe)
    print(f"{count - wrong} of {count} bitwise equal; {met_saves} kills left something half-written behind")
    return wrong


def damages(folder: Path, count: int, chance: random.Random) -> int:
    """How many of ``count`` truncations and flipped bits of a checkpoint go unnoticed."""
    checkpoint = sorted((folder / "undisturbed" / "checkpoints").glob("step-*"))[-1]
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file())
    verify_folder(checkpoint)
    missed = 0
    for _ in range(count):
        path = chance.choice(files)
        whole = path.read_bytes()
        place = chance.randrange(len(whole))
        flip = chance.random() < 0.5
        changed = whole[:place]
        if flip:
            changed += bytes([whole[place] ^ (1 << chance.randrange(8))]) + whole[place + 1 :]
        path.write_bytes(changed)
        try:
            verify_folder(checkpoint)
            missed += 1
            print(f"MISSED: {path.name} {'flipped' if flip else 'cut'} at byte {place}")
        except Damaged:
            pass
        path.write_bytes(whole)
    verify_folder(checkpoint)
    print(f"{count - missed} of {count} truncations and flipped bits noticed")
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--extension-kills", type=int, default=20)
    parser.add_argument("--damages", type=int, default=100)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    settings = parser.parse_args()
    chance = random.Random(settings.seed)
    with tempfile.TemporaryDirectory(prefix="latte-crash-") as name:
        training, extension = Path(name, "training"), Path(name, "extension")
        training.mkdir()
        extension.mkdir()
        failures = 0
        if settings.kills or settings.damages:
            failures += kills(make_recipe, training, settings.kills, settings.steps, chance)
            failures += damages(training, settings.damages, chance)
        if settings.extension_kills:
            failures += kills(make_extension, extension, settings.extension_kills, settings.steps // 4, chance)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
