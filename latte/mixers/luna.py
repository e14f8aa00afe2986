"""Luna (Ma et al., 2021): a document is packed into a few latents by attention, and every token reads them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init  # leaves weights alone that were loaded from a file

from latte.layers.config import MixerConfig
from latte.layers.linear import Linear, split_heads
from latte.mixers.base import Mixer, Preset
from latte.mixers.registry import register
from latte.ops import EMPTY, DecayState, decay_attention
from latte.ops.numbers import compute_dtype
from latte.state import State, state
from latte.tokens import Tokens


@state
class LunaState(State):
    keys: DecayState
    values: DecayState


@register("luna")
class LunaMixer(Mixer):
    """y_t = sum_p softmax_p(q_t . k_p / sqrt(K)) v_p, k and v of z_p = sum_s softmax_s(q'_p . k'_s / sqrt(K)) v'_s.

    Two attentions: P latents pack the document into z, and tokens unpack z. A layer hands norm(latents + z) on to the
    next one, which adds latents of its own. ``tie`` takes keys and values of each attention from one projection.
    Causal, where the latents are the layer's own and k and v are projections of the tokens:

        y_t = 1/t sum_{s<=t} (c_t . a_s) v_s    c_t = softmax_p(1/t sum_{s<=t} (q_t . k_s / sqrt(K)) a_s)
        a_s = log_2(1 + 2^{q'_p . k'_s / sqrt(K)}), one number for each latent p

    Means over the tokens so far stand for the packing softmax: linear time, and a state of 2 P K numbers a head.
    Source: arXiv 2106.01540. There a causal layer counts padding; here t is the number of real tokens of the document.
    There only the first layer has learned latents, with places added, and a document shorter than P has fewer; here
    each layer has P for every document, so that it may stand behind layers of any kind.
    """

    @dataclass(frozen=True)
    class Options:
        latents: int = 16  # P
        tie: bool = True  # keys and values share a projection

    directions = ("causal", "bidirectional")
    examples = (
        {"latents": 3},
        {"latents": 2, "tie": False},
        {"latents": 3, "bidirectional": True},
        {"latents": 5, "tie": False, "bidirectional": True},
    )
    presets: ClassVar[Mapping[str, Preset] | None] = {
        "luna": lambda size: {"mixer_options": {"latents": size.latents // 4}}
    }

    def __init__(self, config: MixerConfig) -> None:
        super().__init__(config)
        if self.options.latents < 1:
            raise ValueError(f"mixer 'luna': latents is {self.options.latents}, expected at least 1")
        D, width = config.hidden_size, config.num_heads * config.width
        self.latents = nn.Parameter(torch.empty(self.options.latents, D))
        self.pack_q_proj, self.pack_k_proj = Linear(D, width), Linear(D, width)
        packed = width if config.bidirectional else D  # what k and v are made from
        self.q_proj, self.k_proj = Linear(D, width), Linear(packed, width)
        self.v_proj = None if self.options.tie else Linear(packed, width)
        self.pack_v_proj = None if self.options.tie or not config.bidirectional else Linear(D, width)
        self.o_proj = Linear(width, D, residual=True)
        self.latent_norm = None
        if config.bidirectional and config.layer_index < config.num_layers - 1:
            if width != D:
                raise ValueError(f"mixer 'luna': all heads together have width {width}, expected hidden_size {D}")
            self.latent_norm = nn.LayerNorm(D, eps=config.norm_eps)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Latents behind others start small: at first a layer uses those that it is handed."""
        init.normal_(self.latents, std=1.0 if self.config.layer_index == 0 or not self.config.bidirectional else 0.02)

    def init_state(self, like_BTD: Tensor) -> LunaState:
        H, K, P = self.config.num_heads, self.config.width, self.options.latents
        return LunaState(DecayState.empty(like_BTD, H, K, P), DecayState.empty(like_BTD, H, P, K))

    def mix_carrying(
        self, x_BTD: Tensor, state: Any, tokens: Tokens, carried: dict[str, Tensor]
    ) -> tuple[Tensor, State | None]:
        if not self.config.bidirectional:
            return self._mix_causal(x_BTD, state, tokens)
        before_RPD = carried.get("luna")  # of every document

        def attend(x_RLD: Tensor, real_RL: Tensor) -> Tensor:
            latents = self.latents if before_RPD is None else before_RPD + self.latents
            latents_RPD = latents.to(x_RLD.dtype).expand(x_RLD.shape[0], -1, -1)
            z_RPD = self._pack(latents_RPD, x_RLD, real_RL)
            if self.latent_norm is not None:
                carried["luna"] = self.latent_norm(latents_RPD + z_RPD).to(x_RLD.dtype)
            return self._unpack(x_RLD, z_RPD)

        return tokens.over_documents(attend, x_BTD), None

    def _pack(self, latents_RPD: Tensor, x_RLD: Tensor, real_RL: Tensor) -> Tensor:
        """z: each latent's mean of the document."""
        k_RLD = self.pack_k_proj(x_RLD)
        v_RLD = k_RLD if self.pack_v_proj is None else self.pack_v_proj(x_RLD)
        return self._attention(self.pack_q_proj(latents_RPD), k_RLD, v_RLD, real_RL)

    def _unpack(self, x_RLD: Tensor, z_RPD: Tensor) -> Tensor:
        """Each token's mean of z, projected."""
        k_RPD = self.k_proj(z_RPD)
        v_RPD = k_RPD if self.v_proj is None else self.v_proj(z_RPD)
        return self.o_proj(self._attention(self.q_proj(x_RLD), k_RPD, v_RPD, None))

    def _attention(self, q_RLD: Tensor, k_RSD: Tensor, v_RSD: Tensor, seen_RS: Tensor | None) -> Tensor:
        q, k, v = (split_heads(x, self.config.num_heads) for x in (q_RLD, k_RSD, v_RSD))
        logits_RHLS = torch.einsum("rlhk,rshk->rhls", q, k).to(compute_dtype(q)) * self.config.width**-0.5
        if seen_RS is not None:
            logits_RHLS = torch.where(seen_RS[:, None, None], logits_RHLS, EMPTY)
        weights_RHLS = logits_RHLS.softmax(dim=-1).to(v.dtype)
        return torch.einsum("rhls,rshv->rlhv", weights_RHLS, v).flatten(2).to(v_RSD.dtype)

    def _mix_causal(self, x_BTD: Tensor, state: LunaState, tokens: Tokens) -> tuple[Tensor, State]:
        H, scale, dtype = self.config.num_heads, self.config.width**-0.5, compute_dtype(x_BTD)
        latent_PHK = split_heads(self.pack_q_proj(self.latents.to(x_BTD.dtype)), H)
        c_BTHK, q, k = (split_heads(p(x_BTD), H) for p in (self.pack_k_proj, self.q_proj, self.k_proj))
        v = k if self.v_proj is None else split_heads(self.v_proj(x_BTD), H)
        score_BTHP = torch.einsum("phk,bthk->bthp", latent_PHK, c_BTHK).to(dtype) * scale
        a_BTHP = F.softplus(score_BTHP * math.log(2)) / math.log(2)
        count_BT11 = tokens.count_BT.clamp(min=1).to(dtype)[..., None, None]
        q, k, v = (x.to(dtype) for x in (q, k, v))
        read_BTHP, keys = decay_attention(q * scale, k, a_BTHP, state=state.keys, tokens=tokens)
        share_BTHP = (read_BTHP / count_BT11).softmax(dim=-1)
        y_BTHK, values = decay_attention(share_BTHP, a_BTHP, v, state=state.values, tokens=tokens)
        return self.o_proj((y_BTHK / count_BT11).flatten(2).to(x_BTD.dtype)), LunaState(keys, values)

    def flops_per_token(self, context: int) -> int:
        """As packed: a token enters every latent and reads every latent; causal layers compute a beside that."""
        latents = self.options.latents * self.config.num_heads * self.config.width
        projections = super().flops_per_token(context) - 2 * self.latents.numel()
        return projections + (8 if self.config.bidirectional else 10) * latents
