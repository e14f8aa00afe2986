"""What tokens are worth for recall, fitted by least squares to the attention that questions pay them.

Per key/value head and linear in the layer's input: the root of the most attention that a token gets from questions at
the end of the text, of any head. (The root counts what questions need; the log would count more how little the rest
gets.) What tokens are worth for prediction is fitted in :mod:`latte.extend.attention_rate`.

Attention is made for blocks of queries, and only sums over tokens (normal equations) stay: memory is linear in the
text's length, whatever number of rows is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from latte.ops import window_attention
from latte.ops.numbers import EMPTY
from latte.tokens import Tokens

if TYPE_CHECKING:
    from latte.extend.layer import ExtendedMixer
    from latte.extend.model import LatteExtendedForCausalLM

QUERIES = 128  # of a block
LEAST = 1e-7  # attention below it counts as this much


@dataclass
class ScoreSums:
    """Weighted normal equations of one layer: inputs with a constant 1 appended, and targets per key/value head."""

    gram: Tensor  # (D + 1, D + 1)
    cross: Tensor  # (D + 1, G)
    square: Tensor  # (G,)
    total: Tensor  # (G,)
    weight: Tensor  # ()

    @classmethod
    def empty(cls, width: int, kv_heads: int, device: torch.device) -> ScoreSums:
        wide = torch.float32 if device.type == "mps" else torch.float64
        shapes = ((width + 1, width + 1), (width + 1, kv_heads), (kv_heads,), (kv_heads,), ())
        return cls(*(torch.zeros(shape, dtype=wide, device=device) for shape in shapes))

    def add(self, x_ND: Tensor, target_NG: Tensor, weight_N: Tensor) -> None:
        """Add tokens."""
        wide = self.gram.dtype
        x_ND, y_NG, weight_N1 = x_ND.to(wide), target_NG.to(wide), weight_N.to(wide)[:, None]
        x_ND = torch.cat([x_ND, torch.ones_like(x_ND[:, :1])], dim=1)
        weighted_ND = weight_N1 * x_ND
        self.gram += weighted_ND.mT @ x_ND
        self.cross += weighted_ND.mT @ y_NG
        self.square += (weight_N1 * y_NG.square()).sum(dim=0)
        self.total += (weight_N1 * y_NG).sum(dim=0)
        self.weight += weight_N1.sum()

    def solve(self, ridge: float) -> tuple[Tensor, Tensor]:
        """Weights (G, D) of the scores, without the constant, which no choice depends on; and R2 per head, (G,).

        ``ridge`` is relative to each channel's mean square; the constant has none.
        """
        loaded = self.gram.clone()
        extra = ridge * loaded.diagonal()
        extra[-1] = 0
        loaded.diagonal().add_(extra.clamp(min=0) + 1e-12 * loaded.diagonal().mean().clamp(min=1e-30))
        weight_DG = torch.linalg.solve(loaded, self.cross)
        error_G = self.square - 2 * (weight_DG * self.cross).sum(0) + (weight_DG * (self.gram @ weight_DG)).sum(0)
        spread_G = self.square - self.total.square() / self.weight.clamp(min=1)
        return weight_DG[:-1].mT.contiguous(), 1 - error_G / spread_G.clamp(min=1e-30)


@torch.no_grad()
def add_asked(sums: ScoreSums, mixer: ExtendedMixer, x_BTD: Tensor, tokens: Tokens, asked: int) -> None:
    """Add a row of which the tokens from ``asked`` on are questions."""
    most_BTG, worth_BT = attention_when_asked(mixer, x_BTD, tokens, asked)
    target_NG = most_BTG[worth_BT].sqrt()
    sums.add(x_BTD[worth_BT], target_NG, torch.ones_like(target_NG[:, 0]))


def mean_attention_to_come(mixer: ExtendedMixer, x_BTD: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
    """The mean over queries and heads of :func:`attention_to_come`, at least LEAST, and the number of queries."""
    received_BTG, queries_BT = attention_to_come(mixer, x_BTD, tokens)
    heads = mixer.config.num_heads // mixer.config.kv_heads
    return received_BTG / (heads * queries_BT.clamp(min=1)[..., None]) + LEAST, queries_BT


@torch.no_grad()
def attention_to_come(mixer: ExtendedMixer, x_BTD: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
    """The attention that each token gets from beyond the window, and from how many queries.

    Returns sums over queries and the heads of each key/value head (B, T, G), and numbers of queries (B, T): 0 for
    sinks, padding, and tokens that no later query sees from beyond the window. The pretrained layer's own softmax.
    """
    received_BTG = x_BTD.new_zeros(*x_BTD.shape[:2], mixer.config.kv_heads, dtype=torch.float32)
    queries_BT = x_BTD.new_zeros(x_BTD.shape[:2], dtype=torch.float32)
    for end, weights_BGCRS, beyond_BCS in attention_blocks(mixer, x_BTD, tokens):
        received_BTG[:, :end] += torch.einsum("bgcrs,bcs->bsg", weights_BGCRS, beyond_BCS.float())
        queries_BT[:, :end] += beyond_BCS.sum(dim=1)
    return received_BTG, queries_BT


@torch.no_grad()
def attention_when_asked(mixer: ExtendedMixer, x_BTD: Tensor, tokens: Tokens, asked: int) -> tuple[Tensor, Tensor]:
    """The most attention that each token gets from the queries from ``asked`` on, and which tokens they can ask for.

    Returns maxima over queries and the heads of each key/value head (B, T, G), and (B, T): False for questions, sinks,
    padding, and tokens that no question sees from beyond the window.
    """
    most_BTG = x_BTD.new_zeros(*x_BTD.shape[:2], mixer.config.kv_heads, dtype=torch.float32)
    worth_BT = torch.zeros_like(tokens.real_BT)
    for end, weights_BGCRS, beyond_BCS in attention_blocks(mixer, x_BTD, tokens, asked):
        seen = weights_BGCRS.amax(dim=3) * beyond_BCS[:, None]
        most_BTG[:, :end] = torch.maximum(most_BTG[:, :end], seen.amax(dim=2).transpose(1, 2))
        worth_BT[:, :end] |= beyond_BCS.any(dim=1)
    worth_BT[:, asked:] = False
    return most_BTG, worth_BT


class Block(NamedTuple):
    """The pretrained attention of some queries to all tokens before ``end``."""

    end: int
    weights_BGCRS: Tensor  # R heads of each key/value head
    beyond_BCS: Tensor  # tokens that a query sees behind its window, without sinks


def attention_blocks(mixer: ExtendedMixer, x_BTD: Tensor, tokens: Tokens, first: int = 0) -> Iterator[Block]:
    """Attention of the queries from ``first`` on, some at a time."""
    window = mixer.pretrained
    q_BTHK, k_BTGK = window.queries_and_keys(x_BTD)
    q_BTHK, k_BTGK, left = mixer.turned(q_BTHK, k_BTGK, tokens)
    B, T, H, K = q_BTHK.shape
    G = k_BTGK.shape[2]
    scale = K**-0.5 if window.scale is None else window.scale
    q_BGTRK = (scale * q_BTHK).view(B, T, G, H // G, K).transpose(1, 2)
    k_BGKT = k_BTGK.permute(0, 2, 3, 1)
    place_BT, segment_BT, real_BT = tokens.place_BT, tokens.segment_BT, tokens.real_BT
    for start in range(first, T, QUERIES):
        end = min(T, start + QUERIES)
        logits = (q_BGTRK[:, :, start:end].flatten(2, 3) @ k_BGKT[..., :end]).unflatten(2, (end - start, -1))
        if window.softcap is not None:
            logits = window.softcap * torch.tanh(logits / window.softcap)
        distance_BCS = place_BT[:, start:end, None] - place_BT[:, None, :end]
        same_BCS = segment_BT[:, start:end, None] == segment_BT[:, None, :end]
        pairs_BCS = same_BCS & real_BT[:, start:end, None] & real_BT[:, None, :end]
        seen_BCS = pairs_BCS & (distance_BCS >= 0) & (distance_BCS <= left)
        weights = logits.float().masked_fill_(~seen_BCS[:, None, :, None], EMPTY).softmax(dim=-1)
        yield Block(end, weights, seen_BCS & (distance_BCS > window.size) & (place_BT >= window.sinks)[:, None, :end])


@torch.no_grad()
def captured_attention(mixer: ExtendedMixer, x_BTD: Tensor, tokens: Tokens) -> tuple[float, float]:
    """Sums over queries and heads: of the attention behind window and sinks, and of the part that kept tokens get."""
    window = mixer.pretrained
    q_BTHK, k_BTGK = window.queries_and_keys(x_BTD)
    v_BTGV = mixer.values(x_BTD)
    near_BTH, kept_BTH = (
        window.attend(q_BTHK, k_BTGK, v_BTGV, None, tokens, scores)[1]
        for scores in (None, window.scores(x_BTD, tokens))
    )
    q_BTHK, k_BTGK, left = mixer.turned(q_BTHK, k_BTGK, tokens)
    settings = {"left": left, "scale": window.scale, "softcap": window.softcap}
    all_BTH = window_attention(q_BTHK, k_BTGK, v_BTGV, **settings, tokens=tokens)[1]
    behind = tokens.real_BT & (tokens.place_BT > window.size + window.sinks)
    near, kept, every = (x[behind].double() for x in (near_BTH, kept_BTH, all_BTH))
    share = lambda x: torch.exp((x - every).clamp(max=0))  # noqa: E731
    return float((1 - share(near)).sum()), float((share(kept) - share(near)).clamp(min=0).sum())


def choose_by_attention_to_come(model: LatteExtendedForCausalLM) -> None:
    """Let a model keep the tokens that will get most attention, for comparison: no score can know that.

    It holds for texts that are read in one call.
    """
    for mixer in model.mixers:
        if mixer.pretrained.kept:
            mixer.pretrained.scores = partial(_log_attention_to_come, mixer)  # type: ignore[method-assign]


def _log_attention_to_come(mixer: ExtendedMixer, x_BTD: Tensor, tokens: Tokens) -> Tensor:
    return mean_attention_to_come(mixer, x_BTD, tokens)[0].log()


def score_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """What decides which tokens are kept, by name."""
    names = ("score_proj.weight", "score_recency", "lifetime_proj.weight", "lifetime_bias", "recall_level")
    ends = tuple(f"window.{name}" for name in names)
    return {name: value for name, value in model.named_parameters() if name.endswith(ends)}


def fixed_scores(model: nn.Module) -> list[nn.Parameter]:
    """What later stages leave alone: choosing has no gradient, a weight of scores in logits would weigh the place."""
    fixed = {*map(id, score_parameters(model).values())}
    return [x for name, x in model.named_parameters() if id(x) in fixed or name.endswith("window.score_weight")]
