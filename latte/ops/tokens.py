"""Where tokens stand once padding is taken out and documents are told apart."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


def segment_ids(reset_BT: Tensor | None, like_BT: Tensor) -> Tensor:
    """Number the documents of each row: 0 before the first reset (where a carried state belongs), then 1, 2, ..."""
    if reset_BT is None:
        return torch.zeros(like_BT.shape[:2], dtype=torch.long, device=like_BT.device)
    return reset_BT.long().cumsum(1)


def positions(
    like_BT: Tensor, mask_BT: Tensor | None, reset_BT: Tensor | None, start_B: Tensor
) -> tuple[Tensor, Tensor]:
    """Place of each real token in its document, and how many tokens the last document has after the row.

    ``start_B`` is the number of tokens that a carried state has read of the document that the row continues.
    Padding does not count: a token stands where it would stand with the padding removed.
    """
    B, T = like_BT.shape[:2]
    if mask_BT is None and reset_BT is None:
        return start_B[:, None] + torch.arange(T, device=start_B.device), start_B + T
    real_BT = like_BT.new_ones(B, T, dtype=torch.long) if mask_BT is None else mask_BT.long()
    read_BT = real_BT.cumsum(1)
    before_BT = -start_B[:, None].expand(B, T)
    if reset_BT is not None:
        # Counts never fall, so the latest document's start is the largest one so far.
        started_BT = torch.where(reset_BT, read_BT - real_BT, before_BT)
        before_BT = started_BT.cummax(1).values
    return read_BT - 1 - before_BT, read_BT[:, -1] - before_BT[:, -1]


class Compact(NamedTuple):
    """Rows with their real tokens moved to the front, in order; what follows them is padding."""

    order_BT: Tensor
    inverse_BT: Tensor

    def gather(self, x_BT: Tensor) -> Tensor:
        return _take(x_BT, self.order_BT)

    def scatter(self, x_BT: Tensor) -> Tensor:
        return _take(x_BT, self.inverse_BT)


def compact(mask_BT: Tensor) -> Compact:
    """The permutation that takes interior and left padding out, and its inverse.

    Mechanisms that look a number of *tokens* back (windows, convolutions) need it to be exact under any padding;
    recurrences don't, because padding is an identity step for them.
    """
    order_BT = torch.argsort((~mask_BT).to(torch.uint8), dim=1, stable=True)
    return Compact(order_BT, torch.argsort(order_BT, dim=1))


def _take(x_BT: Tensor, index_BT: Tensor) -> Tensor:
    index = index_BT.reshape(*index_BT.shape, *([1] * (x_BT.dim() - 2)))
    return torch.gather(x_BT, 1, index.expand(-1, -1, *x_BT.shape[2:]))


def take_tokens(x_BT: Tensor, index_BN: Tensor) -> Tensor:
    """Tokens ``index`` of each row: (B, S, ...) and (B, N) give (B, N, ...)."""
    return _take(x_BT, index_BN)


def whole_document(like_BT: Tensor, mask_BT: Tensor | None, segments_BT: Tensor | None) -> Tensor:
    """Which tokens belong to the document of which, (B, T, S): what a bidirectional reference sees."""
    B, T = like_BT.shape[:2]
    seen_BTS = torch.ones(B, T, T, dtype=torch.bool, device=like_BT.device)
    if segments_BT is not None:
        # Numbers need only change at a boundary; the same number further on is another document.
        document_BT = (segments_BT[:, 1:] != segments_BT[:, :-1]).long().cumsum(1)
        document_BT = torch.cat([torch.zeros_like(segments_BT[:, :1]), document_BT], dim=1)
        seen_BTS = document_BT[:, :, None] == document_BT[:, None, :]
    return seen_BTS if mask_BT is None else seen_BTS & mask_BT[:, None, :]


def zero_padding(y_BT: Tensor, mask_BT: Tensor | None) -> Tensor:
    """``y`` with exact zeros at padding, so that a pad's output says nothing and carries no gradient."""
    if mask_BT is None:
        return y_BT
    return torch.where(mask_BT.reshape(*mask_BT.shape, *([1] * (y_BT.dim() - 2))), y_BT, torch.zeros_like(y_BT))
