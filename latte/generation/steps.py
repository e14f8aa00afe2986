"""Several tokens in one call, with the state after any of them to come back to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from latte.models import LatteCache
from latte.models.cache import ModelState


class Steps:
    """Logits behind each token of a call, and the state after each.

    The decode engine keeps every state, which costs nothing. Where modules ran, only the last one is there: an earlier
    one is made by reading the tokens before it again.
    """

    def __init__(
        self, model: Any, ids_BT: Tensor, before: LatteCache, logits_BTW: Tensor, states: dict[int, ModelState]
    ) -> None:
        self.logits_BTW = logits_BTW
        self._model, self._ids_BT, self._before, self._states = model, ids_BT, before, states

    @torch.no_grad()
    def after(self, tokens: int) -> ModelState:
        """The state after the first ``tokens`` tokens of the call, at least 1."""
        if tokens not in self._states:
            cache = LatteCache(*self._before.snapshot())
            self._model(self._ids_BT[:, :tokens], past_key_values=cache, use_cache=True, logits_to_keep=1)
            assert cache.state is not None
            self._states[tokens] = cache.state
        return self._states[tokens]


@torch.no_grad()
def read_each(model: Any, ids_BT: Tensor, cache: LatteCache, every: bool = True) -> Steps:
    """Read tokens behind a cache, which stays as it is; ``every``: logits behind all of them, not only the last."""
    if every:
        read = model.decode_each(ids_BT, cache)
        if read is not None:
            logits_BTW, states = read
            return Steps(model, ids_BT, cache, logits_BTW, dict(enumerate(states, 1)))
    after = LatteCache(*cache.snapshot())
    logits_BTW = model(ids_BT, past_key_values=after, use_cache=True, logits_to_keep=0 if every else 1).logits
    assert after.state is not None
    return Steps(model, ids_BT, cache, logits_BTW, {ids_BT.shape[1]: after.state})
