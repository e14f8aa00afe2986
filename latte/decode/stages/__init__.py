"""The stages of every mixer's token, by the mixer's name; one file for each family of mechanisms."""

from latte.decode.stages import decay, delta, gated, griffin, latte, luna, mamba, rwkv, softmax, spaces, zeros  # noqa: F401  (each registers its mixers)
from latte.decode.stages.registry import STAGES, Out, stages_of

__all__ = ["STAGES", "Out", "stages_of"]
