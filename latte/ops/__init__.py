"""Functions of tensors, without parameters or configuration: one file per family of recurrences.

Each op has a reference (the equation, slow and obvious), a chunked form for training and a one-token step, takes a
state in and gives one out, and honours padding and documents (:class:`latte.tokens.Tokens`). ``registered_ops()`` lists
them all.
"""

from latte.ops.bonus import bonus_attention
from latte.ops.complex_scan import ComplexState, complex_scan
from latte.ops.decay import DecayState, decay_attention, document_attention
from latte.ops.delta import DeltaState, delta_attention
from latte.ops.kalman import KalmanState, kalman
from latte.ops.kept import kept_attention
from latte.ops.kept_state import Far, KeptState
from latte.ops.laplace import laplace_attention
from latte.ops.log_key import LatteState, bidirectional_latte, causal_latte
from latte.ops.log_linear import LogLinearState, log_linear_attention
from latte.ops.log_sum import LogSumState, log_sum
from latte.ops.numbers import EMPTY
from latte.ops.pointwise import rms_norm, rotate_pairs, swiglu
from latte.ops.registry import registered_ops
from latte.ops.rglru import rglru
from latte.ops.scan import ConvState, ScanState, causal_conv, diagonal_scan
from latte.ops.selective import SelectiveState, selective_scan
from latte.ops.softmax import AttentionState, softmax_attention
from latte.ops.state_space import state_space
from latte.ops.window import WindowState, window_attention
from latte.ops.wkv import WKVState, wkv

__all__ = [
    "EMPTY",
    "AttentionState",
    "ComplexState",
    "ConvState",
    "DecayState",
    "DeltaState",
    "Far",
    "KalmanState",
    "KeptState",
    "LatteState",
    "LogLinearState",
    "LogSumState",
    "ScanState",
    "SelectiveState",
    "WKVState",
    "WindowState",
    "bidirectional_latte",
    "bonus_attention",
    "causal_conv",
    "causal_latte",
    "complex_scan",
    "decay_attention",
    "delta_attention",
    "diagonal_scan",
    "document_attention",
    "kalman",
    "kept_attention",
    "laplace_attention",
    "log_linear_attention",
    "log_sum",
    "registered_ops",
    "rglru",
    "rms_norm",
    "rotate_pairs",
    "selective_scan",
    "softmax_attention",
    "state_space",
    "swiglu",
    "window_attention",
    "wkv",
]
