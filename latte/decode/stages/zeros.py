"""ZeroS: linear attention under weights that sum to zero."""

from __future__ import annotations

from typing import Any

from latte.decode.program import Builder
from latte.decode.stages.parts import project, turn
from latte.decode.stages.registry import Out, stages_of
from latte.mixers.zeros import NORM_EPS
from latte.models.engine import Mixing


@stages_of("zeros")
def zeros(b: Builder, at: Mixing, x: str, out: Out) -> None:
    mixer: Any = at.mixer
    H, K, D = mixer.config.num_heads, mixer.config.width, mixer.config.hidden_size
    project(b, mixer, x, dict.fromkeys("qkvu", H * K))
    b.product(x, D, (mixer, "gate_proj", 2 * H, b.room("gates", 2 * H)), act="sigmoid")
    if mixer.rotary is not None:
        turn(b, mixer, K)
    parts = {"direction": "direction.h_BD", "logits": "logits.h_BD", "log_norm": "log_sum.log_norm_BD"}
    parts |= {"soft": "softmax.sum_BHKV", "plain": "plain.sum_BHKV"}
    fields: dict[str, Any] = {name: b.part(path) for name, path in parts.items()}
    fields |= {"mu": b.weight(mixer, "mu", H, K), "tau": b.weight(mixer, "tau", H), "heads": H, "width": K}
    b.stage("ZeroSum", q="q", k="k", v="v", u="u", gates="gates", y=b.room("mixed", H * K), least=1e-6, **fields)
    b.stage("Norm", x="mixed", y="mixed", width=K, groups=H, eps=NORM_EPS, centred=True)
    b.product("mixed", H * K, (mixer, "o_proj", D, out.y), added=out.added)
