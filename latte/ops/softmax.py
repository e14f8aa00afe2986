"""Full causal softmax attention with a cache of all keys and values: the quadratic baseline (equations 1-3)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from latte.ops.backends import choose_backend
from latte.ops.tokens import positions, segment_ids, zero_padding
from latte.shapes import Axes, given, require_divides
from latte.state import State, state


@state
class AttentionState(State):
    """Every key and value so far, which of them still belong to the document, and how many tokens that has."""

    keys_BSGK: Tensor
    values_BSGV: Tensor
    live_BS: Tensor
    count_B: Tensor

    @classmethod
    def empty(cls, like_BT: Tensor, kv_heads: int, key_width: int, value_width: int) -> AttentionState:
        B, device = like_BT.shape[0], like_BT.device
        return cls(
            like_BT.new_zeros(B, 0, kv_heads, key_width),
            like_BT.new_zeros(B, 0, kv_heads, value_width),
            torch.zeros(B, 0, dtype=torch.bool, device=device),
            torch.zeros(B, dtype=torch.long, device=device),
        )


def softmax_attention(
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    v_BTGV: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    state: State | None = None,
    mask: Tensor | None = None,
    reset: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, AttentionState | None]:
    """Softmax attention, equations (1) to (3), to all s <= t, or with ``causal=False`` to the whole document.

    Shapes: q (B, T, H, K), k (B, T, G, K), v (B, T, G, V), H a multiple of G; y (B, T, H, V), 0 at padding.
    The causal state grows by one key and value a token; without ``causal`` there is none.

    Raises:
        ValueError: shapes, dtypes or devices that do not agree, no tokens, a state of something else, or a state
            without ``causal``.
    """
    axes = Axes("softmax_attention")
    axes.bind("q", q_BTHK, "BTHK")
    axes.bind("k", k_BTGK, "BTGK")
    sizes = axes.bind("v", v_BTGV, "BTGV")
    axes.flags("mask", mask)
    axes.flags("reset", reset)
    require_divides("softmax_attention", sizes["G"], sizes["H"], "key/value heads", "query heads")
    if state is not None and not causal:
        raise ValueError("softmax_attention: a state was given with causal=False, expected none")
    before = require_attention_state(
        "softmax_attention", state, AttentionState.empty(q_BTHK, sizes["G"], sizes["K"], sizes["V"])
    )
    T, past = sizes["T"], before.keys_BSGK.shape[1]
    segment_BT = segment_ids(reset, q_BTHK)
    real_BT = torch.ones_like(segment_BT, dtype=torch.bool) if mask is None else mask
    _, count_B = positions(q_BTHK, mask, reset, before.count_B)
    k_BSGK = torch.cat([before.keys_BSGK, k_BTGK], dim=1)
    v_BSGV = torch.cat([before.values_BSGV, v_BTGV], dim=1)
    last_B1 = segment_BT[:, -1:]
    live_BS = torch.cat([before.live_BS & (last_B1 == 0), real_BT & (segment_BT == last_B1)], dim=1)
    after = AttentionState(k_BSGK, v_BSGV, live_BS, count_B)

    repeat = sizes["H"] // sizes["G"]
    q, k, v = (x.transpose(1, 2) for x in (q_BTHK, k_BSGK, v_BSGV))
    k, v = (x.repeat_interleave(repeat, dim=1) if repeat > 1 else x for x in (k, v))
    reference = choose_backend("softmax_attention", backend, q_BTHK) == "reference"
    if mask is None and reset is None and past == 0 and not reference:
        y_BHTV = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)
    else:
        order_TT = torch.ones(T, T, dtype=torch.bool, device=q.device)
        order_TT = order_TT.tril() if causal else order_TT
        same_BTT = order_TT & (segment_BT[:, :, None] == segment_BT[:, None, :]) & real_BT[:, None, :]
        carried_BTP = (segment_BT == 0)[:, :, None] & before.live_BS[:, None, :]
        seen_BTS = torch.cat([carried_BTP, same_BTT], dim=2)
        # A softmax over nothing is undefined: padding looks at itself, and its output is dropped below.
        alone_BTT = torch.eye(T, dtype=torch.bool, device=q.device) & ~real_BT[:, :, None]
        seen_BTS = seen_BTS | F.pad(alone_BTT, (past, 0))
        if reference:  # equations (2) and (3) as written
            logits_BHTS = (q @ k.transpose(-1, -2)) * (sizes["K"] ** -0.5 if scale is None else scale)
            y_BHTV = logits_BHTS.masked_fill(~seen_BTS[:, None], float("-inf")).softmax(dim=-1) @ v
        else:
            y_BHTV = F.scaled_dot_product_attention(q, k, v, attn_mask=seen_BTS[:, None], scale=scale)
    return zero_padding(y_BHTV.transpose(1, 2), mask), after if causal else None


def require_attention_state(op: str, state: State | None, like: AttentionState) -> AttentionState:
    """As latte.state.require_state, for a state whose length is free."""
    if state is None:
        return like
    if not isinstance(state, AttentionState):
        raise ValueError(f"{op}: state is a {type(state).__name__}, expected an AttentionState")
    for (path, tensor), (_, other) in zip(state.tensors(), like.tensors(), strict=True):
        if tensor.shape[:1] + tensor.shape[2:] != other.shape[:1] + other.shape[2:]:
            wanted = "(" + ", ".join("any" if i == 1 else str(n) for i, n in enumerate(other.shape)) + ")"
            raise ValueError(f"{op}: state.{path} has shape {given(tensor)}, expected {wanted}")
        if (tensor.device, tensor.dtype) != (other.device, other.dtype):
            raise ValueError(
                f"{op}: state.{path} is {tensor.dtype} on {tensor.device}, expected {other.dtype} on {other.device}"
            )
    return state
