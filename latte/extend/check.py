"""Is a converted model what it should be? Seen on a little text before anything is taught."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from latte.errors import UserError
from latte.extend.model import convert

TOKENS = 256  # at most, and no more than the model was made for
SHORT_WINDOW = 32
#: Largest difference that rounding explains, in parts of the largest logit.
ROUNDING = 1e-3


@torch.no_grad()
def check_conversion(model: Any, options: dict[str, Any], ids: Tensor) -> dict[str, float]:
    """Largest differences between logits on one row of tokens.

    ``as_original``: the converted model with a window as long as the text, from the pretrained one; ``decoding``: half
    of the text read at once and half token by token, from all of it at once, with a short window.

    Raises:
        UserError: it is another model than it was.
    """
    whole = convert(copy.deepcopy(model), {**options, "window": TOKENS})
    ids = ids[None, : min(TOKENS, whole.own_context or TOKENS)]
    expected = model(ids).logits
    far = float((whole(ids).logits - expected).abs().max())
    short = convert(copy.deepcopy(model), {**options, "window": min(SHORT_WINDOW, options["window"])})
    at_once = short(ids).logits
    half = ids.shape[1] // 2
    step = short(ids[:, :half], use_cache=True)
    parts = [step.logits]
    for token in ids[:, half:].split(1, dim=1):
        step = short(token, past_key_values=step.past_key_values, use_cache=True)
        parts.append(step.logits)
    decoding = float((torch.cat(parts, dim=1) - at_once).abs().max())
    largest = float(expected.abs().max())
    for what, found in (("from the pretrained model's", far), ("token by token from those of one pass", decoding)):
        if not found <= ROUNDING * largest:
            raise UserError(
                f"the converted model's logits are up to {found:.2g} away {what} (which reach {largest:.3g}), expected "
                f"less than {ROUNDING * largest:.2g}: this model computes something that its family does not say"
            )
    return {"tokens": ids.shape[1], "as_original": far, "decoding": decoding}
