"""One token in one native call: its memory, when it may not be used, and its stages in C++."""

from __future__ import annotations

from .mutant import STEP, Mutant

ENGINE = "latte/decode/engine.py"
GUARD = "latte/decode/guard.py"
MEMORY = "latte/decode/memory.py"
KEPT_H = "latte/ops/native/stages_kept.h"
ATTENTION_H = "latte/ops/native/stages_attention.h"
LATENTS_H = "latte/ops/native/stages_latents.h"
RECURRENT_H = "latte/ops/native/stages_recurrent.h"

MUTANTS = [
    Mutant(
        "tokens are taken back whose states are gone",
        MEMORY,
        "min(self._behind, count - 1 - tokens) + tokens",
        "self._behind + tokens",
        STEP,
    ),
    Mutant(
        "tokens taken back are still counted",
        MEMORY,
        "        self.read(-tokens)\n",
        "",
        STEP,
    ),
    Mutant(
        "memory grows and forgets",
        MEMORY,
        "                after[:, :, : before.shape[2]] = before\n",
        "                pass\n",
        STEP,
    ),
    Mutant(
        "rows that have read less end early",
        MEMORY,
        "x[row] = x[row].roll(missing, dims=0)",
        "x[row] = x[row].roll(-missing, dims=0)",
        STEP,
    ),
    Mutant(
        "another head is not noticed",
        ENGINE,
        "program.body() is body and program.head is head and",
        "program.body() is body and",
        STEP,
    ),
    Mutant(
        "a refusal is forever",
        ENGINE,
        "if refused is not None and refused[1]():",
        "if refused is not None:",
        STEP,
    ),
    Mutant(
        "sums of attention keep their size under a larger score",
        ATTENTION_H,
        "total_[j] *= factor, top_[j] = top;",
        "top_[j] = top;",
        STEP,
    ),
    Mutant(
        "parts of a long row count alike",
        ATTENTION_H,
        "total += factor * one[1];",
        "total += one[1];",
        STEP,
    ),
    Mutant(
        "a key is kept one slot late",
        ATTENTION_H,
        "slot = head * m.slots + place % m.slots",
        "slot = head * m.slots + (place + 1) % m.slots",
        STEP,
    ),
    Mutant(
        "sinks move away with the text",
        ATTENTION_H,
        "place = min64(f_.place(r / f_.g.B, r % f_.g.B), s_.nearest);",
        "place = f_.place(r / f_.g.B, r % f_.g.B);",
        STEP,
    ),
    Mutant(
        "a token's share of a latent is of the sum before it",
        LATENTS_H,
        "x[i] = T(double(k[i]) - sum[i]);",
        "x[i] = T(double(k[i]) - before[i]);",
        STEP,
    ),
    Mutant(
        "a fading state forgets in steps of another head",
        "latte/ops/native/stages_matrix.h",
        "double(((const T*)s_.decay)[h])",
        "double(((const T*)s_.decay)[0])",
        STEP,
    ),
    Mutant(
        "the minimum of a block of weights is left out",
        "latte/ops/native/blocks.h",
        "to[0] = to[0] * d + m, to[1] = to[1] * d + m;",
        "to[0] = to[0] * d + m, to[1] = to[1] * d;",
        STEP,
    ),
    Mutant(
        "other blocks of weights are not noticed",
        GUARD,
        "if not all(map(operator.is_, chain.from_iterable(map(dict.values, self._buffer_dicts)), self._buffers)):",
        "if len(self._buffer_dicts) < 0:",
        STEP,
    ),
    Mutant(
        "a convolution keeps its oldest input",
        RECURRENT_H,
        "memcpy(tail, past + D, size_t(kept - D) * sizeof(T));",
        "memcpy(tail, past, size_t(kept - D) * sizeof(T));",
        STEP,
    ),
    Mutant(
        "a hook registered later is not noticed",
        GUARD,
        "if hooks != self._hooks_seen:",
        "if self._hooks_seen < 0:",
        STEP,
    ),
    Mutant(
        "a weight is read where it was before",
        GUARD,
        "return list(map(Tensor.data_ptr, self.weights)) == self._addresses",
        "return len(self.weights) == len(self._addresses)",
        STEP,
    ),
    Mutant(
        "tokens of a ring are looked for in slots of another size",
        MEMORY,
        'torch.arange(R, device="cpu")) % R\n',
        'torch.arange(R, device="cpu")) % (R + 1)\n',
        STEP,
    ),
    Mutant(
        "of the worst kept tokens the earliest goes",
        KEPT_H,
        "(same && places[i * G] > places[worst * G])",
        "(same && places[i * G] < places[worst * G])",
        STEP,
    ),
    Mutant(
        "a kept token that goes out of reach is not turned back",
        KEPT_H,
        "if (s_.reach) turn_back(t, place);",
        "",
        STEP,
    ),
    Mutant(
        "the attention of the window does not make room for kept tokens",
        KEPT_H,
        "y[c] = others * y[c] + mine * mean_[c];",
        "y[c] = y[c] + mine * mean_[c];",
        STEP,
    ),
    Mutant(
        "sinks seem near although tokens are kept",
        "latte/layers/window.py",
        "return self.reach if self.kept and self.reach is not None else self.sinks + self.size",
        "return self.sinks + self.size",
        ("tests/extend/test_convert.py", "-k", "every_token_kept"),
    ),
]
