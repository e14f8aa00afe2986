"""Luna: latents that pack the document and are read by every token."""

from __future__ import annotations

import math
from typing import Any

import torch

from latte.decode.program import Builder
from latte.decode.stages.decay import FEATURES
from latte.decode.stages.parts import matrix
from latte.decode.stages.registry import Out, stages_of
from latte.layers.quantized import QuantizedLinear
from latte.models.engine import Mixing, Unfit
from latte.ops import native


@stages_of("luna")
def luna(b: Builder, at: Mixing, x: str, out: Out) -> None:
    """Scores (W_q l_p) . k'_s are made as l_p . (W_q^T k'_s): the work of one token, not that of P latents."""
    mixer: Any = at.mixer
    D, H, K, P = mixer.config.hidden_size, mixer.config.num_heads, mixer.config.width, mixer.options.latents
    names = {"pack_k_proj": "packed", "q_proj": "q", "k_proj": "k"} | ({} if mixer.v_proj is None else {"v_proj": "v"})
    for name, y in names.items():
        b.product(x, D, (mixer, name, H * K, b.room(y, H * K)), beside=name != [*names][-1])
    queries = b.child(mixer, "pack_q_proj", *b.anatomy.products, QuantizedLinear)
    if queries.bias is not None:
        raise Unfit("pack_q_proj of mixer 'luna' has a bias")
    weight, number = b.numbers(queries, H * K, D)
    sizes: dict[str, Any] = {"blocks": H, "inputs": K, "outputs": D, "across": 1, "format": number}
    b.stage("Blocks", x="packed", y=b.room("wide packed", H * D), weight=weight, **sizes)
    latents = b.weight(mixer, "latents", P, D)
    b.stage("Blocks", x="wide packed", y=b.room("a", H * P), weight=latents, blocks=H, inputs=D, outputs=P, shared=1)
    scale, log_2 = K**-0.5, math.log(2)
    into, back = (b.constant(torch.full((H * P,), n, dtype=b.dtype, device="cpu")) for n in (scale * log_2, 1 / log_2))
    b.stage("Map", x="a", y="a", weight=into, width=H * P, act=native.ACTIVATIONS["softplus"])
    b.stage("Gate", x="a", y="a", weight=back, width=H * P)
    matrix(b, "keys.sum_BHKV", H, K, P, "read", v="a", query_scale=scale)
    b.stage("Features", x="read", y=b.room("share", H * P), kind=FEATURES["share"], heads=H, groups=H, width=P)
    matrix(b, "values.sum_BHKV", H, P, K, q="share", k="a", v="k" if mixer.v_proj is None else "v")
    b.product("mixed", H * K, (mixer, "o_proj", D, out.y), added=out.added)
