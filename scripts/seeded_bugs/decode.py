"""One token in one native call: its memory, when it may not be used, and its stages in C++."""

from __future__ import annotations

from .mutant import STEP, Mutant

ENGINE = "latte/decode/engine.py"
GUARD = "latte/decode/guard.py"
MEMORY = "latte/decode/memory.py"
KEPT_H = "latte/ops/native/stages_kept.h"
ATTENTION_H = "latte/ops/native/stages_attention.h"
RECURRENT_H = "latte/ops/native/stages_recurrent.h"
LOG_SUM_H = "latte/ops/native/log_sum.h"
SCANS_H = "latte/ops/native/stages_scans.h"
MATRIX_H = "latte/ops/native/stages_matrix.h"
CHANNELS_H = "latte/ops/native/stages_channels.h"
BLOCKS = ("tests/decode/test_quantized.py",)
GGUF = ("tests/loading/test_pretrained.py", "-k", "gguf or blocks")

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
        LOG_SUM_H,
        "x[i] = T(double(k[i]) - sum[i]);",
        "x[i] = T(double(k[i]) - before[i]);",
        STEP,
    ),
    Mutant(
        "a fading state forgets in steps of another head",
        MATRIX_H,
        "((const T*)s_.decay)[h]",
        "((const T*)s_.decay)[0]",
        STEP,
    ),
    Mutant(
        "the delta rule erases what stood there before the decay",
        MATRIX_H,
        "read_[i] = kept_[i] * k[i]",
        "read_[i] = k[i]",
        STEP,
    ),
    Mutant(
        "RWKV-6 reads the state after the token",
        MATRIX_H,
        "(earlier ? old : now)",
        "now",
        STEP,
    ),
    Mutant(
        "heads that share keys take those of the first group",
        MATRIX_H,
        "(row * heads + h * heads / s_.heads) * width",
        "row * heads * width",
        STEP,
    ),
    Mutant(
        "the bonus of a head is that of the first",
        MATRIX_H,
        "*weight = (const T*)s_.weight + h * K;",
        "*weight = (const T*)s_.weight;",
        STEP,
    ),
    Mutant(
        "squares of channels count as much as pairs",
        CHANNELS_H,
        "(i == j ? half : T(1))",
        "T(1)",
        STEP,
    ),
    Mutant(
        "a blend leaves out what the token says",
        CHANNELS_H,
        "if (share) part = part + load_some(share + c, k, T(0));",
        "",
        STEP,
    ),
    Mutant(
        "a state space is turned the wrong way",
        SCANS_H,
        "im = size * ::sin(speed * step)",
        "im = -size * ::sin(speed * step)",
        STEP,
    ),
    Mutant(
        "channels convolved apart share the first ones' past",
        RECURRENT_H,
        "f_.before(t, s_.tail) + b * kept + s_.first",
        "f_.before(t, s_.tail) + b * kept",
        STEP,
    ),
    Mutant(
        "RWKV-7 takes its own values for those of the first layer",
        "latte/decode/stages/rwkv.py",
        'to=FIRST_VALUES, share="share"',
        'to="v", share="share"',
        STEP,
    ),
    Mutant(
        "latents forget at a constant pace",
        "latte/decode/stages/latte.py",
        "    if mixer.decay_proj is None:\n",
        "    if mixer.decay_proj is not None or mixer.decay_proj is None:\n",
        STEP,
    ),
    Mutant(
        "the minimum of a block of weights is left out",
        "latte/ops/native/blocks.h",
        "{ four_bits(from + 4, s[0], s[1], to, to + kSixteen); }",
        "{ four_bits(from + 4, s[0], 0, to, to + kSixteen); }",
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
        "j < n - 2 ? past + (j + 1) * C : x",
        "j < n - 2 ? past + j * C : x",
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
    Mutant(
        "a panel of blocks forgets the bias",
        "latte/ops/native/blocks.cpp",
        "bias ? sum + load_some(bias + column + c, k, 0.0f) : sum",
        "sum",
        BLOCKS,
    ),
    Mutant(
        "high and low four bits of a weight change places",
        "latte/ops/native/blocks.h",
        "{ four_bits(from + 4, s[0], s[1], to, to + kSixteen); }",
        "{ four_bits(from + 4, s[0], s[1], to + kSixteen, to); }",
        BLOCKS,
    ),
    Mutant(
        "scales of rows side by side change places",
        "latte/ops/native/product.h",
        "B::read(w + r * ld, scales + r * B::scales, weights);",
        "B::read(w + r * ld, scales + (n - 1 - r) * B::scales, weights);",
        BLOCKS,
    ),
    Mutant(
        "the end of a wide row meets the beginning of x",
        "latte/ops/native/product.h",
        "w += kBlocksAtOnce<B> * B::bytes, x += kBlocksAtOnce<B> * B::numbers) {",
        "w += kBlocksAtOnce<B> * B::bytes) {",
        BLOCKS,
    ),
    Mutant(
        "a wide row of floats repeats its first scales",
        "latte/ops/native/blocks.h",
        "read_scales<B, 1>(w, 0, blocks, scales);",
        "if (w == from) read_scales<B, 1>(w, 0, blocks, scales);",
        BLOCKS,
    ),
    Mutant(
        "a method put in the place of forward is not noticed",
        GUARD,
        "        if counts != self._attribute_counts:\n",
        "        if not self._attribute_counts:\n",
        STEP,
    ),
    Mutant(
        "blocks replace weights that were changed",
        "latte/loading/packed.py",
        "return target if torch.equal(floats, module.weight.detach().cpu().float()) else None",
        "return target",
        GGUF,
    ),
    Mutant(
        "a format of GGUF that is not known is taken for floats",
        "latte/loading/gguf.py",
        "        if kind not in KINDS:\n",
        "        if kind < 0:\n",
        GGUF,
    ),
    Mutant(
        "a draw forgets the parts before",
        "latte/generation/sampling.py",
        "wanted - (below[part - 1] if part else 0.0)",
        "wanted",
        ("tests/generation/test_sampling.py",),
    ),
    Mutant(
        "a word whose share is 0 is drawn",
        "latte/generation/sampling.py",
        'inside, wanted - (below[part - 1] if part else 0.0), side="right")',
        'inside, wanted - (below[part - 1] if part else 0.0), side="left")',
        ("tests/generation/test_sampling.py",),
    ),
    Mutant(
        "temperature is left out of a plain draw",
        "latte/generation/sampling.py",
        "    share *= np.float32(1 / sampling.temperature)\n",
        "",
        ("tests/generation/test_sampling.py",),
    ),
    Mutant(
        "the block of states after a token is the one before",
        MEMORY,
        "return before, start + first * size",
        "return before, before",
        STEP,
    ),
]
