"""LOTFormer (2025): attention as two plans of optimal transport, from queries to pivots and from these to keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import initialization as init  # leaves weights alone that were loaded from a file

from latte.layers.config import MixerConfig
from latte.layers.linear import Linear, repeat_heads, split_heads
from latte.mixers.base import Preset
from latte.mixers.heads import HeadMixer
from latte.mixers.registry import register
from latte.ops import EMPTY
from latte.ops.numbers import compute_dtype
from latte.state import State
from latte.tokens import Tokens


@register("lotformer")
class LOTFormerMixer(HeadMixer):
    """y = n Gamma_1 diag(1 / m) Gamma_2 v, with plans of entropic transport between n tokens and P pivots of masses m.

    Gamma_1 moves the queries' masses, 1/n each, to the pivots with scores q . z / (e sqrt(K)), and Gamma_2 the pivots'
    to the keys, 1/n each, with z . k / (e sqrt(K)); z are learned, and e is the temperature. Both are found by
    Sinkhorn's rounds on logarithms, linear in n. The weights of each token sum to 1 after any number of rounds; the
    weights that each token is given sum to 1 as the rounds converge.

    Source: arXiv 2509.23436. Padding has no mass; some of its files add to scores instead, which attracts mass, and one
    scales y by 1 / P^2. It counts half rounds and may end on either side; here the last half round is the one that
    makes the weights of a token sum to 1.
    """

    @dataclass(frozen=True)
    class Options:
        pivots: int = 32  # P, per head
        temperature: float = 0.1
        rounds: int = 10
        learned_masses: bool = False  # else all pivots have 1/P

    linear_in_values = normalised = True
    directions = ("bidirectional",)
    examples = (
        {"pivots": 3, "rounds": 3, "bidirectional": True},
        {"pivots": 4, "temperature": 1.0, "rounds": 2, "learned_masses": True, "bidirectional": True},
        {"pivots": 2, "temperature": 2.0, "rounds": 0, "num_key_value_heads": 1, "bidirectional": True},
    )
    presets: ClassVar[Mapping[str, Preset] | None] = {
        "lotformer": lambda size: {"position_embedding": "learned"},
    }

    def __init__(self, config: MixerConfig) -> None:
        super().__init__(config)
        options = self.options
        for name, least in (("pivots", 1), ("rounds", 0)):
            if getattr(options, name) < least:
                raise ValueError(f"mixer 'lotformer': {name} is {getattr(options, name)}, expected at least {least}")
        if options.temperature <= 0:
            raise ValueError(f"mixer 'lotformer': temperature is {options.temperature}, expected a positive number")
        self.q_proj = Linear(config.hidden_size, config.num_heads * config.width)
        self.k_proj = Linear(config.hidden_size, config.kv_heads * config.width)
        self.pivots = nn.Parameter(torch.empty(config.num_heads, options.pivots, config.width))
        # Without rounds the queries' plan does not depend on the masses, nor does the keys'.
        learned = options.learned_masses and options.rounds > 0
        self.mass_logits = nn.Parameter(torch.empty(config.num_heads, options.pivots)) if learned else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        init.normal_(self.pivots, std=self.config.width**-0.5)
        if self.mass_logits is not None:
            init.zeros_(self.mass_logits)

    def mix_heads(self, x_BTD: Tensor, v_BTGV: Tensor, state: Any, tokens: Tokens) -> tuple[Tensor, State | None]:
        heads = self.config.num_heads
        q_BTHK = split_heads(self.q_proj(x_BTD), heads)
        k_BTHK = repeat_heads(split_heads(self.k_proj(x_BTD), self.config.kv_heads), heads)
        return tokens.over_documents(self._transport, q_BTHK, k_BTHK, repeat_heads(v_BTGV, heads)), None

    def _transport(self, q_RLHK: Tensor, k_RLHK: Tensor, v_RLHV: Tensor, real_RL: Tensor) -> Tensor:
        """Documents as rows: n Gamma_1 is a softmax over pivots, diag(1/m) Gamma_2 one over tokens."""
        # Scores are divided by the temperature and then exponents: float32 would lose as many digits as that is small.
        dtype = torch.float64 if q_RLHK.device.type == "cpu" else compute_dtype(q_RLHK)
        scale = self.config.width**-0.5 / self.options.temperature
        q_score, k_score = (
            torch.einsum("rlhk,hpk->rhlp", x.to(dtype), self.pivots.to(dtype)) * scale for x in (q_RLHK, k_RLHK)
        )
        log_mass_HP = torch.zeros(k_score.shape[1::2], dtype=dtype, device=k_score.device)
        if self.mass_logits is not None:
            log_mass_HP = self.mass_logits.to(dtype)
        log_mass_HP = log_mass_HP.log_softmax(dim=-1)
        log_n_R1 = real_RL.sum(dim=1, keepdim=True).clamp(min=1).to(dtype).log()
        log_part_RL = torch.where(real_RL, -log_n_R1, EMPTY)
        pivot_R1P, _ = self._potentials(q_score, log_mass_HP, log_part_RL)
        _, token_RL1 = self._potentials(k_score, log_mass_HP, log_part_RL)
        read_RHLP = (q_score + pivot_R1P).softmax(dim=-1)
        write_RHLP = (k_score + token_RL1).softmax(dim=-2)
        z_RHPV = torch.einsum("rhlp,rlhv->rhpv", write_RHLP, v_RLHV.to(dtype))
        return torch.einsum("rhlp,rhpv->rlhv", read_RHLP, z_RHPV).to(v_RLHV.dtype)

    def _potentials(self, score_RHLP: Tensor, log_mass_HP: Tensor, log_part_RL: Tensor) -> tuple[Tensor, Tensor]:
        """Logarithms of the factors of pivots (R, H, 1, P) and tokens (R, H, L, 1) after Sinkhorn's rounds."""
        pivot_RH1P = torch.zeros_like(score_RHLP[:, :, :1])
        part_R1L1 = log_part_RL[:, None, :, None]
        token_RHL1 = part_R1L1.expand(*score_RHLP.shape[:3], 1)
        for _ in range(self.options.rounds):
            token_RHL1 = part_R1L1 - (score_RHLP + pivot_RH1P).logsumexp(dim=-1, keepdim=True)
            pivot_RH1P = log_mass_HP[:, None] - (score_RHLP + token_RHL1).logsumexp(dim=-2, keepdim=True)
        return pivot_RH1P, token_RHL1

    def flops_per_token(self, context: int) -> int:
        pivots = self.options.pivots * self.config.num_heads
        projections = super().flops_per_token(context) - 2 * self.pivots.numel()
        if self.mass_logits is not None:
            projections -= 2 * self.mass_logits.numel()
        return projections + pivots * (8 * self.config.width + 16 * self.options.rounds)
