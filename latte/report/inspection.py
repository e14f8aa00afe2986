"""What a model attends to on a text, layer by layer and head by head: p(s|t), p(l|t) and their parts, as arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from latte.data.tokenizer import encode_documents
from latte.errors import UserError
from latte.mixers import Mixer, View
from latte.models.latents import mixer_inputs
from latte.tokens import Tokens

#: Longest text that is shown: the weights are quadratic in it.
MAX_TOKENS = 512


@dataclass(frozen=True)
class LayerView:
    """One layer's weights. Axes: H heads, T tokens that look, S tokens looked at, M slots or latents."""

    mixer: str
    causal: bool
    weights_HTS: np.ndarray | None  # of token s for token t; None where the mechanism has none
    normalised: bool = True  # the weights are p(s|t); else of any sign and size
    slots_THM: np.ndarray | None = None  # p(l|t); with a window, slot 0 is the window
    keys_THM: np.ndarray | None = None  # logits of p(s|l,t): a softmax over the s that t may see
    window_HTS: np.ndarray | None = None  # p_0(s|t), which slot 0 weighs

    @property
    def heads(self) -> int:
        return 0 if self.weights_HTS is None else self.weights_HTS.shape[0]

    def reads(self, head: int, latent: int, token: int) -> np.ndarray:
        """p(s|l,t) over all s: where latent ``latent`` (counted from 0, the window left out) reads for this token."""
        if self.keys_THM is None:
            raise ValueError(f"mixer {self.mixer!r} has no latents")
        logits = self.keys_THM[:, head, latent].astype(np.float64)
        seen = logits[: token + 1] if self.causal else logits
        weights = np.exp(seen - seen.max())
        return np.pad(weights / weights.sum(), (0, len(logits) - len(seen)))

    def window_share(self) -> np.ndarray | None:
        """p(0|t), (T, H): how much of each token's attention is the window's."""
        return None if self.window_HTS is None or self.slots_THM is None else self.slots_THM[..., 0]


@dataclass(frozen=True)
class Inspection:
    """A text as tokens, and every layer's view of it."""

    tokens: tuple[str, ...]
    layers: tuple[LayerView, ...]
    surprise: np.ndarray | None  # -log2 p(token | tokens before it), (T,), the first undefined (0); None for encoders
    dropped: int = 0  # tokens cut off at MAX_TOKENS
    title: str = ""

    @property
    def reason(self) -> str | None:
        """Why there is nothing to show, or None if there is something."""
        if any(layer.weights_HTS is not None for layer in self.layers):
            return None
        names = ", ".join(sorted({layer.mixer for layer in self.layers}))
        return (
            f"there are no weights to show: the outputs of {names} are not weighted sums of values, "
            "so no part of them belongs to any one token"
        )


def inspect_text(model: Any, tokenizer: Any, text: str, *, max_tokens: int = MAX_TOKENS, title: str = "") -> Inspection:
    """Read ``text`` with the model and keep what every layer attends to.

    The text stands after the mark of a document's first token, as in training. What is longer than ``max_tokens`` is
    cut off and counted in ``dropped``.

    Raises:
        UserError: no text, a tokenizer of another model, or a model that is not made of this project's blocks.
    """
    if not text:
        raise UserError("the text is empty: there is nothing to inspect")
    ids = encode_documents(tokenizer, [text])[0]
    if tokenizer.eos_token_id is not None:
        ids = ids[:-1]
    return inspect_ids(model, tokenizer, ids[:max_tokens], title=title, dropped=max(0, len(ids) - max_tokens))


def inspect_ids(model: Any, tokenizer: Any, ids: np.ndarray, *, title: str = "", dropped: int = 0) -> Inspection:
    """:func:`inspect_text` for a text that is tokens already, its first-token mark included."""
    mixers = [module for module in model.modules() if isinstance(module, Mixer)]
    if not mixers:
        raise UserError(f"a {type(model).__name__} is not made of mixers of this project: there is nothing to inspect")
    if ids.max() >= model.config.vocab_size:
        raise UserError(
            f"the text has token {ids.max()} but the model knows {model.config.vocab_size}: "
            "the tokenizer belongs to another model"
        )
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            ids_BT = torch.from_numpy(ids)[None].to(model.device)
            with mixer_inputs(mixers) as inputs:
                # Classifiers have no cache to leave out.
                outputs = model(ids_BT, use_cache=False) if model.can_generate() else model(ids_BT)
            layers = tuple(_look(mixer, *inputs[mixer]) for mixer in mixers)
            surprise = None
            if getattr(outputs, "logits", None) is not None and outputs.logits.dim() == 3:
                nats = F.cross_entropy(outputs.logits[0, :-1].float(), ids_BT[0, 1:], reduction="none")
                surprise = np.pad(nats.cpu().numpy() / np.log(2.0), (1, 0))
    finally:
        model.train(was_training)
    return Inspection(_texts(tokenizer, ids.tolist()), layers, surprise, dropped, title)


def _look(mixer: Mixer, x_BTD: Tensor, tokens: Tokens | None) -> LayerView:
    views = mixer.look(x_BTD, tokens)

    def array(name: str) -> np.ndarray | None:
        return _array(views[name].values[0]) if name in views else None

    weights = views.get("weights", View("weights", x_BTD, True))
    return LayerView(
        mixer.name,
        not mixer.config.bidirectional,
        array("weights"),
        weights.normalised,
        array("latents"),
        array("latent_keys"),
        array("window"),
    )


def _array(x: Tensor) -> np.ndarray:
    return x.detach().float().cpu().numpy()


def _texts(tokenizer: Any, ids: list[int]) -> tuple[str, ...]:
    """Each token as the text it stands for; bytes that are no whole character come as replacement characters."""
    names = tokenizer.convert_ids_to_tokens(ids)
    texts = []
    for index, name in zip(ids, names, strict=True):
        text = tokenizer.decode([index], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        # Tokenizers of the sentencepiece kind drop the space before a word when it stands alone.
        texts.append(" " + text if str(name).startswith("▁") and not text.startswith(" ") else text)
    return tuple(texts)
