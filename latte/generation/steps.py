"""Several tokens in one call, any of which can be the last one that counts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from latte.models import LatteCache
from latte.models.cache import ModelState


class Steps:
    """Logits behind each token of a call; the cache is behind the last one, and :meth:`keep` goes back to any of them.

    The decode engine keeps what every token replaced, so going back costs nothing. Where modules ran, the tokens that
    stay are read again.
    """

    def __init__(
        self, model: Any, ids_BT: Tensor, cache: LatteCache, logits_BTW: Tensor, before: tuple[ModelState | None, int]
    ) -> None:
        self.logits_BTW = logits_BTW
        self._model, self._ids_BT, self._cache, self._before = model, ids_BT, cache, before

    @torch.no_grad()
    def keep(self, tokens: int) -> None:
        """Leave the cache behind the first ``tokens`` tokens of the call, at least 1; to be called once."""
        if self._cache.take_back(self._ids_BT.shape[1] - tokens):
            return
        self._cache.rollback(self._before)
        self._model(self._ids_BT[:, :tokens], past_key_values=self._cache, use_cache=True, logits_to_keep=1)


@torch.no_grad()
def read_each(model: Any, ids_BT: Tensor, cache: LatteCache) -> Steps:
    """Read tokens behind a cache: logits behind all of them."""
    logits_BTW = model.decode_each(ids_BT, cache)
    if logits_BTW is not None:
        return Steps(model, ids_BT, cache, logits_BTW, (None, 0))
    before = cache.snapshot()
    logits_BTW = model(ids_BT, past_key_values=cache, use_cache=True).logits
    return Steps(model, ids_BT, cache, logits_BTW, before)
