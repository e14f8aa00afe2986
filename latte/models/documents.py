"""Where the documents of packed rows begin, from what packing collators of transformers and TRL give."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from latte.modes import readable
from latte.shapes import given


def document_starts(
    like_BT: Tensor,
    mask: Tensor | None,
    start_B: Tensor | None,
    reset: Tensor | None = None,
    position_ids: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
) -> Tensor | None:
    """(B, T), True at first tokens of documents; None where all that was given says that none begins in a row.

    Args:
        mask: False at padding, whose positions and numbers say nothing.
        start_B: how many tokens of its document each row has read before.
        reset: the same flags, given by the caller.
        position_ids: (B, T), (1, T) or (T,): places in documents, each from 0.
        seq_idx: (B, T) or (1, T): documents by number.
        cu_seq_lens_q: (documents + 1,): where documents end in the rows one after another, 0 first.

    Raises:
        ValueError: a shape that does not fit, positions that skip, or sources that contradict each other.
    """
    found: dict[str, Tensor] = {} if reset is None else {"reset": reset}
    if position_ids is not None:
        found["position_ids"] = _by_position(_as_BT("position_ids", position_ids, like_BT), mask, start_B)
    if seq_idx is not None:
        numbers_BT = _as_BT("seq_idx", seq_idx, like_BT)
        before_BT = _before(numbers_BT, mask, numbers_BT[:, 0])
        found["seq_idx"] = (numbers_BT != before_BT) & _columns_with_one_before(like_BT, mask)
    for name, ends in (("cu_seq_lens_q", cu_seq_lens_q), ("cu_seq_lens_k", cu_seq_lens_k)):
        if ends is not None:
            found[name] = _by_length(name, ends, like_BT)
    return _agreed(found, like_BT, mask)


def _by_position(place_BT: Tensor, mask: Tensor | None, start_B: Tensor | None) -> Tensor:
    """A token whose position does not follow its predecessor's begins a document, at position 0."""
    read_B = torch.zeros_like(place_BT[:, 0]) if start_B is None else start_B.to(place_BT)
    expected_BT = _before(place_BT, mask, read_B - 1) + 1
    starts_BT = place_BT != expected_BT
    if mask is not None:
        starts_BT = starts_BT & mask
    wrong_BT = starts_BT & (place_BT != 0)
    if readable(wrong_BT) and bool(wrong_BT.any()):
        row, column = wrong_BT.nonzero()[0].tolist()
        raise ValueError(
            f"position_ids is {int(place_BT[row, column])} in row {row}, column {column}, expected "
            f"{int(expected_BT[row, column])} as the next of its document, or 0 as the first of another"
        )
    return starts_BT


def _by_length(name: str, ends_N: Tensor, like_BT: Tensor) -> Tensor:
    B, T = like_BT.shape[:2]
    if ends_N.dim() != 1 or ends_N.is_floating_point():
        raise ValueError(f"{name} is {ends_N.dtype} of shape {given(ends_N)}, expected integers of 1 axis")
    if readable(ends_N):
        rising = bool((ends_N.diff() >= 0).all())
        if ends_N.numel() < 2 or int(ends_N[0]) != 0 or int(ends_N[-1]) != B * T or not rising:
            raise ValueError(f"{name} is {ends_N.tolist()}, expected rising numbers from 0 to the {B * T} tokens given")
    starts = torch.zeros(B * T + 1, dtype=torch.bool, device=like_BT.device)
    starts[ends_N.long()] = True
    return starts[:-1].unflatten(0, (B, T))


def _before(value_BT: Tensor, mask: Tensor | None, first_B: Tensor) -> Tensor:
    """The value at the real token before each; ``first_B`` where there is none."""
    if mask is None:
        return torch.cat([first_B[:, None], value_BT[:, :-1]], dim=1)
    place_T = torch.arange(value_BT.shape[1], device=value_BT.device)
    last_BT = torch.where(mask, place_T, -1).cummax(dim=1).values
    last_BT = F.pad(last_BT[:, :-1], (1, 0), value=-1)
    return torch.where(last_BT < 0, first_B[:, None], value_BT.gather(1, last_BT.clamp(min=0)))


def _columns_with_one_before(like_BT: Tensor, mask: Tensor | None) -> Tensor:
    """Real tokens behind another real token of their row."""
    B, T = like_BT.shape[:2]
    real_BT = torch.ones(B, T, dtype=torch.bool, device=like_BT.device) if mask is None else mask
    return real_BT & (real_BT.long().cumsum(1) > 1)


def _agreed(found: dict[str, Tensor], like_BT: Tensor, mask: Tensor | None) -> Tensor | None:
    """What all sources say; the first token of a row may begin a document by some of them alone."""
    starts_BT: Tensor | None = None
    inner_BT = _columns_with_one_before(like_BT, mask)
    for name, flags_BT in found.items():
        if starts_BT is None:
            first, starts_BT = name, flags_BT
            continue
        if readable(flags_BT):
            apart_BT = (starts_BT != flags_BT) & inner_BT
            if bool(apart_BT.any()):
                row, column = apart_BT.nonzero()[0].tolist()
                raise ValueError(f"{first} and {name} disagree whether a document begins in row {row}, column {column}")
        starts_BT = starts_BT | flags_BT
    if starts_BT is None or not readable(starts_BT) or bool(starts_BT.any()):
        return starts_BT
    return None


def _as_BT(name: str, value: Tensor, like_BT: Tensor) -> Tensor:
    B, T = like_BT.shape[:2]
    if value.is_floating_point() or value.dtype == torch.bool:
        raise ValueError(f"{name} has dtype {value.dtype}, expected integers")
    if value.dim() == 1:
        value = value[None]
    if value.dim() != 2 or value.shape[1] != T or value.shape[0] not in (1, B):
        raise ValueError(f"{name} has shape {given(value)}, expected ({B}, {T})")
    return value.to(like_BT.device).expand(B, T)
