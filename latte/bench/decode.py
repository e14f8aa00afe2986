"""Time a token with a context behind it: our state of one size, and a Llama of the same size with its growing cache."""

from __future__ import annotations

import torch
from torch import Tensor

from latte.bench import yardsticks
from latte.bench.figures import Contender, Figure, Plan, sweep
from latte.bench.harness import Call
from latte.bench.machine import Peaks
from latte.bench.sizes import OURS, Size, parameters
from latte.eval.decode_timing import random_cache
from latte.models import LatteCache

LLAMA = "Llama (transformers)"
TOKENS = 8  # decoded in one timed call
READ_AT_ONCE = 4096


def run(plan: Plan, peaks: Peaks, size: Size) -> list[Figure]:
    """One token at batch 1 behind every context. Contexts take turns too: what differs is the context alone."""
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
    peer = Contender(
        LLAMA,
        llama.prepare,
        # A new cache is made of the old one and the new token, layer by layer.
        memory=lambda context: 2.5 * llama.cache_bytes(context),
        bytes=lambda context: TOKENS * (4.0 * llama.parameters + llama.cache_bytes(context)),
    )
    for figure in sweep("decode", "decode", [peer], plan, peaks):
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
        self.snapshots = {}
        cache, random = LatteCache(), torch.Generator().manual_seed(0)
        for context in sorted(plan.lengths):
            while cache.length < context:
                tokens = min(READ_AT_ONCE, context - cache.length)
                ids = torch.randint(0, size.vocabulary, (1, tokens), generator=random)
                self.model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
            self.snapshots[context] = cache.snapshot()
            self.state_bytes = cache.nbytes
            plan.say(f"decode: {OURS} has read {context} tokens")

    def contender(self, context: int) -> Contender:
        """TOKENS tokens behind ``context``."""

        def call() -> None:
            cache = LatteCache()
            cache.rollback(self.snapshots[context])
            _decode(self.model, cache)

        return Contender(f"{OURS}@{context}", lambda _: call, ours=True, bytes=lambda _: TOKENS * self.weight_bytes)


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


def _decode(model: torch.nn.Module, cache: object) -> None:
    """Greedy decoding, a token at a time."""
    token_BT = torch.zeros(1, 1, dtype=torch.long)
    with torch.no_grad():
        for _ in range(TOKENS):
            logits: Tensor = model(input_ids=token_BT, past_key_values=cache, use_cache=True).logits
            token_BT = logits[:, -1:].argmax(-1)
