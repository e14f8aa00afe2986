"""Where latents begin: as what stands for the pretrained attention behind the window, by clustering and least squares.

Attention to what lies far away is sum_s e^{q_t k_s} v_s / Z. Replacing each query by the centre c_l of its cluster
makes it a mixture of latents, with p(s|l,t) from the scores c_l k_s, p(l|t) from how near the query is to each centre,
and slot 0's share from how much of Z lies in the window. All three are (nearly) linear in the layer's input, so the new
weights are found on a few thousand tokens without a gradient step; training starts from there.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from latte.layers.feeds import ConvFeed
from latte.mixers.latte import Windowed
from latte.ops import window_attention
from latte.tokens import Tokens

if TYPE_CHECKING:
    from latte.extend.layer import ExtendedMixer

ROUNDS = 15  # of clustering
SPREAD = 1.5  # standard deviation of the latents' logits within a head
RIDGE, SHARE_RIDGE = 1e-4, 0.1  # of the input's mean square; slot 0's share is only roughly linear in the input
LESS = (0.0, 0.5, 1.0, 2.0, 4.0)  # what may be added to a head's slot 0, if the latents serve it badly as yet


@torch.no_grad()
def fit_latents(mixer: ExtendedMixer, x_BTD: Tensor, tokens: Tokens, share: float | None) -> None:
    """Set the new weights of a layer from its inputs.

    ``share`` is what the latents get of each head's weight; None: what the pretrained attention gives to all that lies
    behind the window and the sinks, if the text is long enough to see it.
    """
    window, heads = mixer.pretrained, mixer.config.num_heads
    q_BTHK, k_BTGK = window.queries_and_keys(x_BTD)
    v_BTGV = mixer.values(x_BTD)
    windowed = Windowed(*window.attend(q_BTHK, k_BTGK, v_BTGV, None, tokens, window.scores(x_BTD, tokens)))
    here_BTH = windowed.log_norm_BTH
    if isinstance(mixer.feed, ConvFeed):
        mixer.feed.weight.zero_()
        mixer.feed.weight[:, -1] = 1.0  # the present token: the convolution learns to look around from here
    z_ND = mixer.latent_input(x_BTD, None, tokens)[0].flatten(0, 1)

    slow_K = _slow_channels(window.rotary.frequencies, x_BTD) if window.rope else 1.0
    q_HNK = (q_BTHK * slow_K).flatten(0, 1).transpose(0, 1)
    k_HNK = k_BTGK.flatten(0, 1).repeat_interleave(heads // k_BTGK.shape[2], dim=1).transpose(0, 1)
    centre_HLK = _centres(q_HNK, mixer.latents_per_head)
    scale = k_BTGK.shape[-1] ** -0.5 if window.scale is None else window.scale
    key_NHL = (scale * k_HNK @ centre_HLK.mT).transpose(0, 1)
    query_NHL = (q_HNK @ (centre_HLK - q_HNK.mean(dim=1, keepdim=True)).mT).transpose(0, 1)
    query_NHL = query_NHL - query_NHL.mean(dim=-1, keepdim=True)
    query_NHL = query_NHL * (SPREAD / query_NHL.std(dim=(0, 2), keepdim=True).clamp(min=1e-6))

    rows = mixer.latent_q_proj.weight.unflatten(0, (heads, -1))
    rows[:, 1:] = _least_squares(z_ND, query_NHL, RIDGE)
    rows[:, 0] = 0
    mixer.latent_k_proj.weight.unflatten(0, (heads, -1)).copy_(_least_squares(z_ND, key_NHL, RIDGE))

    assert mixer.slot0_bias is not None
    away_BTH = (z_ND @ rows[:, 1:].flatten(0, 1).T).unflatten(-1, (heads, -1)).logsumexp(-1).view_as(here_BTH)
    behind_BT = tokens.place_BT > window.size + window.sinks + window.kept
    if share is not None or not bool(behind_BT.any()):
        part = 0.1 if share is None else share
        coupled_BTH = here_BTH if mixer.options.coupled else torch.zeros_like(here_BTH)
        mixer.slot0_bias.copy_((away_BTH - coupled_BTH).mean(dim=(0, 1)) + math.log(1 / part - 1))
        return
    target_BTHV, all_BTH = mixer.original(x_BTD, tokens), _log_normalisers(mixer, q_BTHK, k_BTGK, v_BTGV, tokens)
    far_BTH = all_BTH + torch.log1p(-torch.exp((here_BTH - all_BTH).clamp(max=-1e-4)))
    if not mixer.options.coupled:
        far_BTH = far_BTH - here_BTH
    wanted_NH = (away_BTH - far_BTH)[behind_BT]
    mean_H = wanted_NH.mean(dim=0)
    rows[:, 0] = _least_squares(z_ND[behind_BT.flatten()], (wanted_NH - mean_H)[..., None], SHARE_RIDGE)[:, 0]

    errors = []
    for less in LESS:
        mixer.slot0_bias.copy_(mean_H + less)
        y_BTHV, _, _ = mixer.add_latents(x_BTD, v_BTGV, windowed, None, tokens)
        errors.append((y_BTHV - target_BTHV).square().sum(dim=(0, 1, 3)))
    best_H = torch.stack(errors).argmin(dim=0)
    mixer.slot0_bias.copy_(mean_H + torch.tensor(LESS, device=mean_H.device, dtype=mean_H.dtype)[best_H])


def _slow_channels(frequencies: tuple[float, ...], x_BTD: Tensor) -> Tensor:
    """1 for channel pairs that a text of this length turns by no more than half a circle, and for the slowest pair.

    The latents know no places: scores of the quicker pairs average out over the distances.
    """
    turn = torch.tensor(frequencies, device=x_BTD.device) * x_BTD.shape[1]
    slow = (turn <= math.pi) | (turn == turn.min())
    return slow.repeat(2).to(x_BTD.dtype)


def _centres(x_HNK: Tensor, count: int) -> Tensor:
    """Centres of ``count`` clusters in each head, by Lloyd's rounds from points spread evenly over the text."""
    points = x_HNK.shape[1]
    start = torch.arange(count, device=x_HNK.device) * points // count
    centre_HLK = x_HNK[:, start].clone()
    for _ in range(ROUNDS):
        nearest_HN = torch.cdist(x_HNK, centre_HLK).argmin(dim=-1)
        member_HNL = torch.nn.functional.one_hot(nearest_HN, count).to(x_HNK.dtype)
        size_HL1 = member_HNL.sum(dim=1)[..., None]
        mean_HLK = member_HNL.mT @ x_HNK / size_HL1.clamp(min=1)
        centre_HLK = torch.where(size_HL1 > 0, mean_HLK, centre_HLK)
    return centre_HLK


def _least_squares(x_ND: Tensor, y_NHL: Tensor, ridge: float) -> Tensor:
    """Weights (H, L, D) of the map from x that comes nearest to y."""
    wide = torch.float32 if x_ND.device.type == "mps" else torch.float64
    x, y = x_ND.to(wide), y_NHL.flatten(1).to(wide)
    gram = x.mT @ x
    gram.diagonal().add_(ridge * gram.diagonal().mean().clamp(min=1e-30))
    weight = torch.linalg.solve(gram, x.mT @ y)
    return weight.T.unflatten(0, y_NHL.shape[1:]).to(x_ND.dtype)


def _log_normalisers(mixer: ExtendedMixer, q_BTHK: Tensor, k_BTGK: Tensor, v_BTGV: Tensor, tokens: Tokens) -> Tensor:
    """log sum_s e^score over all that the pretrained layer saw: (B, T, H)."""
    q_BTHK, k_BTGK, left = mixer.turned(q_BTHK, k_BTGK, tokens)
    scale, softcap = mixer.pretrained.scale, mixer.pretrained.softcap
    return window_attention(q_BTHK, k_BTGK, v_BTGV, left=left, scale=scale, softcap=softcap, tokens=tokens)[1]
