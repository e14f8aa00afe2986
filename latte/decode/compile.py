"""From a model to its program."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from latte.decode.guard import Guard
from latte.decode.program import Builder, Layout, Program
from latte.decode.stages import STAGES, Out
from latte.layers.hooks import unhooked
from latte.layers.quantized import QuantizedEmbedding, QuantizedLinear
from latte.models.engine import Anatomy, Mixing, Mlp, Sublayer, Unfit
from latte.ops import native


def compile_model(anatomy: Anatomy, body: Any, head: Any) -> Program:
    """The program of ``body``'s layers and norm; with a head also of its embedding, from ids to logits.

    Raises:
        Unfit: the model holds something that has no stages.
    """
    b = Builder(anatomy, next(body.parameters()).dtype)
    try:
        return _compile(b, body, head)
    except Unfit as unfit:
        still = unfit.still or Guard(b.modules, b.parents, b.weights, b.dropouts, None).holds
        raise Unfit(unfit.why, still) from None


def _compile(b: Builder, body: Any, head: Any) -> Program:
    anatomy, dtype = b.anatomy, b.dtype
    if not anatomy.allows(dtype):
        raise Unfit(f"its layers compute otherwise than in {dtype}", lambda: next(body.parameters()).dtype == dtype)
    norm = b.child(body, "norm")
    scale = norm._parameters.get("weight")
    if scale is None:
        raise Unfit(f"the last norm is a {type(norm).__name__}", lambda: body._modules.get("norm") is norm)
    width = scale.shape[0]
    b.layout = Layout(dtype, width)
    stream, table = b.room("stream", width), None
    if head is None:
        b.stage("Given", y=stream, width=width)
    else:
        table = _embed(b, body, head, width)
    like_B1D = torch.empty(1, 1, width, dtype=dtype, device="cpu")
    blocks = b.child(body, "layers")
    for index in range(len(blocks)):
        mixers = []
        for sublayer in anatomy.sublayers(b.child(blocks, str(index)), b):
            if isinstance(sublayer.part, Mixing):
                b.begin_mixer(sublayer.part.mixer, like_B1D)
                _sublayer(b, sublayer, width)
                mixers.append(b.end_mixer())
            else:
                _sublayer(b, sublayer, width)
        b.layout.layers.append(mixers)
    output = width
    if head is None:
        b.norm(norm, stream, native.OUTPUT, width)
    else:
        output = head.out_features
        b.norm(norm, stream, b.room("normed", width), width)
        fields = {f"{field}0": value for field, value in b.matrix(head, output, width).items()}
        b.stage("Product", x="normed", width=width, y0=native.OUTPUT, **fields)
    words, room = b.finish()
    guard = Guard(b.modules, b.parents, b.weights, b.dropouts, table)
    vocabulary = 0 if table is None else table.num_embeddings
    keeps = (b.constants, words)
    program = Program(
        weakref.ref(body), head, b.layout, keeps, room, output, b.partial, b.work, vocabulary, b.places, guard
    )
    hooked = [module for module in b.modules if not unhooked(module)]
    if hooked:
        raise Unfit(f"a {type(hooked[0]).__name__} has hooks", lambda: not unhooked(hooked[0]))
    return program


def _embed(b: Builder, body: Any, head: Any, width: int) -> nn.Embedding:
    """Stages from the ids to the stream, and their table."""
    kinds = (type(body), type(head))
    if not b.anatomy.body_is_plain(body) or kinds[1] not in (*b.anatomy.products, QuantizedLinear):
        raise Unfit(
            f"its body is a {kinds[0].__name__} and its head a {kinds[1].__name__}",
            lambda: (type(body), type(head)) == kinds,
        )
    b.note(body)
    b.note(head)
    table = b.child(body, "embed_tokens")
    scale = table.scale if type(table) is QuantizedEmbedding else b.anatomy.embedding_scale(table)
    (weight, number), positions = b.numbers(table, table.num_embeddings, width), None
    if body._modules.get("embed_positions") is not None:
        learned = b.child(body, "embed_positions", nn.Embedding)
        positions = b.weight(learned, "weight", learned.num_embeddings, width)
        b.end_at(learned.num_embeddings)
        if learned.max_norm is not None:
            raise Unfit("learned positions have a max_norm", lambda: learned.max_norm is not None)
    b.stage("Embed", y="stream", table=weight, format=number, positions=positions, width=width, scale=scale)
    if body._modules.get("embed_norm") is not None:
        b.norm(b.child(body, "embed_norm"), "stream", "stream", width)
    if "dropout" in body._modules:
        b.child(body, "dropout", nn.Dropout)
    return table


def _sublayer(b: Builder, sublayer: Sublayer, width: int) -> None:
    """x + part(norm(x)), the stream changed in place."""
    b.norm(sublayer.norm, "stream", b.room("normed", width), width)
    out = Out("stream", True) if sublayer.after is None else Out(b.room("change", width), False)
    if isinstance(sublayer.part, Mlp):
        _mlp(b, sublayer.part, width, out)
    else:
        name = sublayer.part.mixer.name
        if name not in STAGES:
            raise Unfit(f"mixer {name!r} has no stages")
        STAGES[name](b, sublayer.part, "normed", out)
    if sublayer.after is not None:
        b.norm(sublayer.after, out.y, "stream", width, added=True)


def _mlp(b: Builder, mlp: Mlp, width: int, out: Out) -> None:
    module, first = mlp.module, "gate_proj" if mlp.gated else "up_proj"
    inside = b.child(module, first, *b.anatomy.products, QuantizedLinear).out_features
    wide = b.room("wide", inside)
    parts = [(module, name, inside, wide) for name in ((first, "up_proj") if mlp.gated else (first,))]
    b.product("normed", width, *parts, act=mlp.activation, gated=mlp.gated)
    b.product(wide, inside, (module, "down_proj", width, out.y), added=out.added)
