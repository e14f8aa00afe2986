"""200 random programs of calls on small models give what a plain reading of whole rows gives.

Models are of every mechanism, and pretrained ones of every family that were extended. A program reads pieces of rows in
some mode, adds, reorders, forks, saves, takes back and rolls back in between. The reference keeps no cache: it reads
every row from its first token, alone and without padding, with the ops' reference forms.
"""

from __future__ import annotations

import os
import random
from contextlib import ExitStack, nullcontext
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from peft import LoraConfig, get_peft_model

from latte import LatteCache
from latte.extend import convert
from tests.extend.families import FAMILIES, small_model
from tests.models.support import VARIANTS, tiny_model

PROGRAMS, STEPS = 200, 6
MODELS = [*VARIANTS, *FAMILIES]
#: What two orders of adding up differ by, relative to the largest logit.
CLOSE = {"float64": 1e-9, "float32": 2e-4, "autocast": 0.1}


def make(name: str) -> Any:
    """A small model by the name of its mechanism, or of the family that is extended."""
    if name in VARIANTS:
        return tiny_model(name, max_position_embeddings=256, tie_word_embeddings=False)
    model = convert(small_model(name, tie_word_embeddings=False), {"window": 5, "num_latents": 2, "feed": "rglru"})
    for mixer in model.mixers:
        torch.nn.init.zeros_(mixer.slot0_bias)  # the latents get weight
    return model.eval()


def louder(module: torch.nn.Module, inputs: Any, output: Any) -> Any:
    """A hook on a layer, of ours or of a pretrained model."""
    return 1.1 * output if isinstance(output, torch.Tensor) else (1.1 * output[0], *output[1:])


class Column(NamedTuple):
    """What a cache has read of a row in one column."""

    token: int
    real: bool = True
    begins: bool = False  # a document


class Program:
    """Rows of columns, a cache that has read them, and the model in some state of dress."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.log = [f"seed {seed}"]
        self.variant = MODELS[seed % len(MODELS)]
        self.dtype = self.draw.choice(["float64", "float32", "autocast"])
        self.model = make(self.variant)
        if self.dtype == "float64":
            self.model = self.model.double()
        self.words = self.model.get_input_embeddings().num_embeddings
        self.log += [self.variant, self.dtype]
        self.dress()
        self.columns: list[list[Column]] = [[] for _ in range(self.draw.choice([1, 2, 3]))]
        self.cache = LatteCache()
        self.recorded: int | None = None  # columns that can be taken back
        self.kept: list[tuple[object, list[list[Column]]]] = []

    @property
    def rows(self) -> list[list[int]]:
        """The tokens of each row's present document."""
        rows = []
        for columns in self.columns:
            start = max((index for index, column in enumerate(columns) if column.begins), default=0)
            rows.append([column.token for column in columns[start:] if column.real])
        return rows

    def add(self, new: list[list[Column]]) -> None:
        self.columns = [[*old, *more] for old, more in zip(self.columns, new, strict=True)]
        if self.recorded is not None:
            self.recorded += len(new[0])

    def dress(self) -> None:
        """Hooks and adapters, which the reference has too."""
        choice = self.draw.choice(["plain", "hook", "head hook", "lora"])
        self.log.append(choice)
        self.base = self.model
        if choice == "hook":
            self.model.body.layers[0].register_forward_hook(louder)
        elif choice == "head hook":
            self.model.get_output_embeddings().register_forward_hook(lambda module, args, out: out + 0.5)
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
        return [[self.draw.randrange(1, self.words) for _ in range(count)] for _ in self.columns]

    # Steps.

    def read(self) -> None:
        """A piece of every row, padded anywhere with anything."""
        new, padded = self.new_tokens(self.draw.choice([1, 1, 3, 8])), self.draw.random() < 0.4
        columns = [[Column(token) for token in row] for row in new]
        if padded:
            for row in columns:
                for _ in range(3):
                    row.insert(self.draw.randrange(len(row) + 1), Column(self.draw.randrange(1, self.words), False))
        self.log.append(f"read {len(new[0])}{' padded' if padded else ''}")
        ids = torch.tensor([[column.token for column in row] for row in columns])
        mask = torch.tensor([[int(column.real) for column in row] for row in columns])
        with self.mode:
            given = {"attention_mask": mask} if padded or self.draw.random() < 0.3 else {}
            logits = self.model(ids, past_key_values=self.cache, **given).logits
        self.add(columns)
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
        self.add([[Column(token, begins=at == 3) for at, token in enumerate(row)] for row in ids.tolist()])

    def record(self) -> None:
        """From now on columns can be taken back."""
        self.log.append("record")
        self.cache.activate_past_recording()
        self.recorded = self.recorded or 0

    def crop(self) -> None:
        """Take columns back, or too many, which is refused and changes nothing."""
        length, recorded = len(self.columns[0]), self.recorded or 0
        count = self.draw.randrange(min(length, recorded + 2) + 1)
        self.log.append(f"crop {count} of {recorded}")
        if count > recorded:
            with pytest.raises(ValueError, match=f"{recorded} were recorded"):
                self.cache.crop(-count)
            return
        self.cache.crop(-count)
        self.columns = [row[: length - count] for row in self.columns]
        self.recorded = None if self.recorded is None else 0
        assert self.cache.get_seq_length() == length - count

    def reorder(self) -> None:
        index = [self.draw.randrange(len(self.columns)) for _ in self.columns]
        self.log.append(f"reorder {index}")
        self.cache.reorder_cache(torch.tensor(index))
        self.columns = [self.columns[i] for i in index]
        self.recorded = None if self.recorded is None else 0

    def fork(self) -> None:
        self.log.append("fork")
        self.cache, self.recorded = self.cache.fork(), None

    def save(self) -> None:
        if self.cache.state is not None:
            self.log.append("save and load")
            self.cache.save(self.folder / "state")
            self.cache, self.recorded = LatteCache.load(self.folder / "state"), None

    def keep(self) -> None:
        self.log.append("snapshot")
        self.kept.append((self.cache.snapshot(), self.columns))

    def roll_back(self) -> None:
        if self.kept:
            self.log.append("rollback")
            snapshot, self.columns = self.draw.choice(self.kept)
            self.cache.rollback(snapshot)
            self.recorded = None if self.recorded is None else 0

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
    Program.record,
    Program.crop,
    Program.crop,
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
