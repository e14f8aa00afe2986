"""Time a token with a context behind it: our state of one size, softmax attention in the same engine, and a Llama of
transformers with its growing cache, all of the same size."""

from __future__ import annotations

import torch
from torch import Tensor

from latte.bench import yardsticks
from latte.bench.figures import Contender, Figure, Plan, sweep
from latte.bench.harness import Call
from latte.bench.machine import Peaks
from latte.bench.sizes import OURS, TRANSFORMER, Size, parameters
from latte.eval.decode_timing import random_cache
from latte.models import LatteCache
from latte.models.cache import ModelState
from latte.ops import native

LLAMA = "Llama (transformers)"
TOKENS = 8  # decoded in one timed call
READ_AT_ONCE = 4096


def run(plan: Plan, peaks: Peaks, size: Size) -> list[Figure]:
    """One token at batch 1 behind every context. Contexts take turns too: what differs is the context alone.

    Plain reading takes turns with every kind of model, so that all shares of it are of the same minutes.
    """
    ours = _Ours(size, plan)
    llama = _Llama(size)
    figures: list[Figure] = []
    contexts = list(plan.lengths)
    by_context = [ours.contender(context) for context in contexts]
    alone = yardsticks.reads(ours.weight_bytes, TOKENS)
    for figure in sweep("decode", "decode", by_context, plan, peaks, [TOKENS], alone):
        if figure.name in (yardsticks.SUM, yardsticks.PRODUCT):
            figures.append(_per_token(figure, figure.name, contexts[0], {}))
            continue
        context = int(figure.name.split("@")[1])
        figures.append(_per_token(figure, OURS, context, {"state_bytes": ours.state_bytes}))
    attention = _Attention(size)
    softmax = Contender(
        TRANSFORMER,
        attention.prepare,
        ours=True,
        memory=lambda context: 2.5 * attention.token_bytes * context,
        bytes=lambda context: TOKENS * (4.0 * attention.parameters + attention.token_bytes * context),
    )
    for figure in sweep("decode", "decode", [softmax], plan, peaks, yardsticks=alone):
        if figure.name == TRANSFORMER:
            extra = {"state_bytes": attention.token_bytes * figure.length, "parameters": attention.parameters}
            figures.append(_per_token(figure, TRANSFORMER, figure.length, extra))
    peer = Contender(
        LLAMA,
        llama.prepare,
        # A new cache is made of the old one and the new token, layer by layer.
        memory=lambda context: 2.5 * llama.cache_bytes(context),
        bytes=lambda context: TOKENS * (4.0 * llama.parameters + llama.cache_bytes(context)),
    )
    for figure in sweep("decode", "decode", [peer], plan, peaks, yardsticks=alone):
        if figure.name == LLAMA:
            extra = {"state_bytes": llama.cache_bytes(figure.length), "parameters": llama.parameters}
            figures.append(_per_token(figure, LLAMA, figure.length, extra))
    return figures


def _per_token(figure: Figure, name: str, context: int, extra: dict) -> Figure:
    """The figure of TOKENS tokens as that of one, behind its context."""
    best = None if figure.best is None else figure.best / TOKENS
    median = None if figure.median is None else figure.median / TOKENS
    fields = {**figure.__dict__, "name": name, "length": context, "best": best, "median": median, "extra": extra}
    return Figure(**fields)


class _Ours:
    """Our model, and its state behind every context; the context is really read, once, in pieces."""

    def __init__(self, size: Size, plan: Plan) -> None:
        self.model = size.model(OURS).eval().requires_grad_(False)
        self.weight_bytes = 4.0 * parameters(self.model)
        self.state_bytes = 0
        self.caches: dict[int, LatteCache] = {}
        cache, random = LatteCache(), torch.Generator().manual_seed(0)
        for context in sorted(plan.lengths):
            while cache.length < context:
                tokens = min(READ_AT_ONCE, context - cache.length)
                ids = torch.randint(0, size.vocabulary, (1, tokens), generator=random)
                self.model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
            self.caches[context] = LatteCache(*cache.snapshot())
            self.state_bytes = cache.nbytes
            plan.say(f"decode: {OURS} has read {context} tokens")

    def contender(self, context: int) -> Contender:
        """TOKENS tokens behind ``context``."""

        call = _behind(self.model, self.caches[context])
        return Contender(f"{OURS}@{context}", lambda _: call, ours=True, bytes=lambda _: TOKENS * self.weight_bytes)


class _Attention:
    """Softmax attention in our engine, its keys and values random: reading a long context would take quadratic time."""

    def __init__(self, size: Size) -> None:
        self.model = size.model(TRANSFORMER).eval().requires_grad_(False)
        self.parameters = parameters(self.model)
        self.token_bytes = 2.0 * size.layers * size.width * 4.0

    def prepare(self, context: int) -> Call:
        like = torch.empty(1, 1, self.model.config.hidden_size)
        layers = []
        for block in self.model.model.layers:
            (mixer,) = block.mixers
            empty = mixer.init_state(like)
            keys, values = (torch.randn(1, context, *x.shape[2:]) for x in (empty.keys_BSGK, empty.values_BSGV))
            layers.append((type(empty)(keys, values, torch.ones(1, context, dtype=torch.bool)),))
        return _behind(self.model, LatteCache(ModelState(tuple(layers), torch.tensor([context])), context))


class _Llama:
    """transformers' Llama with the default cache, filled with random keys and values."""

    def __init__(self, size: Size) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        self.size = size
        config = LlamaConfig(
            hidden_size=size.width,
            intermediate_size=size.transformer_intermediate,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            vocab_size=size.vocabulary,
            tie_word_embeddings=True,
            max_position_embeddings=1 << 18,
        )
        self.model = LlamaForCausalLM(config).eval().requires_grad_(False)
        self.parameters = parameters(self.model)

    def cache_bytes(self, context: int) -> float:
        return 2.0 * self.size.layers * self.size.width * 4.0 * context

    def prepare(self, context: int) -> Call:
        cache = random_cache(self.model, context)

        def call() -> None:
            _decode(self.model, cache)
            cache.crop(-TOKENS)

        return call


def _behind(model: torch.nn.Module, cache: LatteCache) -> Call:
    """TOKENS tokens behind a context, which are taken back: the next call finds the same context."""
    cache.history = TOKENS
    before = None if native.available() else cache.snapshot()

    def call() -> None:
        _decode(model, cache)
        if before is not None:
            cache.rollback(before)
        elif not cache.take_back(TOKENS):
            raise RuntimeError("the decode engine can't take back its tokens")

    return call


def _decode(model: torch.nn.Module, cache: object) -> None:
    """Greedy decoding, a token at a time."""
    token_BT = torch.zeros(1, 1, dtype=torch.long)
    with torch.no_grad():
        for _ in range(TOKENS):
            logits: Tensor = model(input_ids=token_BT, past_key_values=cache, use_cache=True).logits
            token_BT = logits[:, -1:].argmax(-1)
