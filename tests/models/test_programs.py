"""200 random programs of calls on small models give what a plain reading of whole rows gives.

A program reads pieces of rows in some mode, adds, reorders, forks, saves and rolls back in between. The reference keeps
no cache: it reads every row from its first token, alone and without padding, with the ops' reference forms.
"""

from __future__ import annotations

import os
import random
from contextlib import ExitStack, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from peft import LoraConfig, get_peft_model

from latte import LatteCache
from tests.models.support import VARIANTS, tiny_model

PROGRAMS, STEPS = 200, 6
#: What two orders of adding up differ by, relative to the largest logit.
CLOSE = {"float64": 1e-9, "float32": 2e-4, "autocast": 0.1}


class Program:
    """Rows of tokens, a cache that has read them, and the model in some state of dress."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.log = [f"seed {seed}"]
        self.variant = VARIANTS[seed % len(VARIANTS)]
        self.dtype = self.draw.choice(["float64", "float32", "autocast"])
        self.model = tiny_model(self.variant, max_position_embeddings=256, tie_word_embeddings=False)
        if self.dtype == "float64":
            self.model = self.model.double()
        self.log += [self.variant, self.dtype]
        self.dress()
        self.rows: list[list[int]] = [[] for _ in range(self.draw.choice([1, 2, 3]))]
        self.cache = LatteCache()
        self.kept: list[tuple[object, list[list[int]]]] = []

    def dress(self) -> None:
        """Hooks and adapters, which the reference has too."""
        choice = self.draw.choice(["plain", "hook", "head hook", "lora"])
        self.log.append(choice)
        self.base = self.model
        if choice == "hook":
            self.model.model.layers[0].register_forward_hook(lambda module, args, out: (1.1 * out[0], *out[1:]))
        elif choice == "head hook":
            self.model.lm_head.register_forward_hook(lambda module, args, out: out + 0.5)
        elif choice == "lora":
            lora = LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False)
            self.model = get_peft_model(self.model, lora).eval().to(self.base.dtype)

    @property
    def mode(self) -> ExitStack:
        stack = ExitStack()
        name = self.draw.choice(["grad", "no_grad", "inference"])
        self.log.append(name)
        stack.enter_context({"grad": nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode}[name]())
        stack.enter_context(self.precision)
        return stack

    @property
    def precision(self) -> Any:
        return torch.autocast("cpu", dtype=torch.bfloat16) if self.dtype == "autocast" else nullcontext()

    def reference(self, row: list[int]) -> torch.Tensor:
        """Logits of all tokens of a row, read at once."""
        with mock.patch.dict(os.environ, {"LATTE_BACKEND": "reference"}), torch.no_grad(), self.precision:
            return self.model(torch.tensor([row]), use_cache=False).logits[0]

    def check(self, found: torch.Tensor, row: list[int], last: int) -> None:
        wanted = self.reference(row)[-last:]
        size = wanted.abs().max()
        difference = (found.double() - wanted.double()).abs().max()
        assert difference <= CLOSE[self.dtype] * size, f"off by {difference:.1e} of {size:.1e} after {self.log}"

    def new_tokens(self, count: int) -> list[list[int]]:
        return [[self.draw.randrange(1, 97) for _ in range(count)] for _ in self.rows]

    # Steps.

    def read(self) -> None:
        """A piece of every row, padded anywhere with anything."""
        new, padded = self.new_tokens(self.draw.choice([1, 1, 3, 8])), self.draw.random() < 0.4
        columns = [[(token, 1) for token in row] for row in new]
        if padded:
            for row in columns:
                for _ in range(3):
                    row.insert(self.draw.randrange(len(row) + 1), (self.draw.randrange(1, 97), 0))
        self.log.append(f"read {len(new[0])}{' padded' if padded else ''}")
        ids, mask = (torch.tensor([[pair[i] for pair in row] for row in columns]) for i in (0, 1))
        with self.mode:
            given = {"attention_mask": mask} if padded or self.draw.random() < 0.3 else {}
            logits = self.model(ids, past_key_values=self.cache, **given).logits
        self.rows = [[*old, *row] for old, row in zip(self.rows, new, strict=True)]
        for row, read, real in zip(self.rows, logits, mask, strict=True):
            self.check(read[real.bool()].clone(), row, len(new[0]))

    def pack(self) -> None:
        """A second document behind the first; only it goes on afterwards."""
        first, second = self.new_tokens(3), self.new_tokens(4)
        self.log.append("pack")
        ids = torch.tensor([[*a, *b] for a, b in zip(first, second, strict=True)])
        reset = torch.zeros_like(ids, dtype=torch.bool)
        reset[:, 3] = True
        with self.mode:
            logits = self.model(ids, reset=reset, past_key_values=self.cache).logits
        for row, (old, a, b) in enumerate(zip(self.rows, first, second, strict=True)):
            self.check(logits[row, :3].clone(), [*old, *a], 3)
            self.check(logits[row, 3:].clone(), b, 4)
        self.rows = second

    def reorder(self) -> None:
        index = [self.draw.randrange(len(self.rows)) for _ in self.rows]
        self.log.append(f"reorder {index}")
        self.cache.reorder_cache(torch.tensor(index))
        self.rows = [self.rows[i] for i in index]

    def fork(self) -> None:
        self.log.append("fork")
        self.cache = self.cache.fork()

    def save(self) -> None:
        if self.cache.state is not None:
            self.log.append("save and load")
            self.cache.save(self.folder / "state")
            self.cache = LatteCache.load(self.folder / "state")

    def keep(self) -> None:
        self.log.append("snapshot")
        self.kept.append((self.cache.snapshot(), self.rows))

    def roll_back(self) -> None:
        if self.kept:
            self.log.append("rollback")
            snapshot, self.rows = self.draw.choice(self.kept)
            self.cache.rollback(snapshot)

    def train(self) -> None:
        """Gradients in between, of a loss that is the cross-entropy of the model's own logits."""
        self.log.append("loss")
        ids = torch.tensor(self.new_tokens(9))
        with self.precision:
            out = self.model(ids, labels=ids)
        out.loss.backward()
        wanted = torch.stack(
            [torch.nn.functional.cross_entropy(self.reference(row.tolist())[:-1].float(), row[1:]) for row in ids]
        )
        assert abs(out.loss - wanted.mean()) <= CLOSE[self.dtype] * wanted.mean().abs() + 1e-5, self.log

    def generate(self) -> None:
        """Greedy text without this cache is that of the reference, where its best two are not alike."""
        self.log.append("generate")
        prompt = self.new_tokens(4)
        found = self.model.generate(
            input_ids=torch.tensor(prompt), max_new_tokens=3, do_sample=False, pad_token_id=0, eos_token_id=None
        )
        if self.dtype == "autocast":
            return
        for text in found.tolist():
            logits = self.reference(text[:-1])
            for place in range(3, 6):
                best = logits[place].max()
                assert logits[place, text[place + 1]] >= best - 1e-3 * best.abs(), self.log


STEPS_OF = [Program.read] * 5 + [
    Program.pack,
    Program.reorder,
    Program.fork,
    Program.save,
    Program.keep,
    Program.roll_back,
    Program.train,
    Program.generate,
]


@pytest.mark.parametrize("tens", range(PROGRAMS // 10))
def test_programs_give_what_whole_rows_give(tens, tmp_path):
    for seed in range(10 * tens, 10 * tens + 10):
        program = Program(seed)
        program.folder = tmp_path
        program.read()
        for _ in range(STEPS):
            program.draw.choice(STEPS_OF)(program)
        program.read()
