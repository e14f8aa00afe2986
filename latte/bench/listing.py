"""Causal Latte as the paper's appendix lists it: a JAX scan over tokens with a running maximum.

In print the listing lost two products; they are here: the carry adds outer(e^{k - max}, v), and the output is
(p / norm) . carry. Importing this module imports JAX.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def causal_latte(p_BTHM: Any, k_BTHM: Any, v_BTHV: Any) -> Any:
    """y_t = sum_l p(l|t) sum_{s<=t} e^{k_sl - a_tl} v_s: (B, T, H, M), (B, T, H, M), (B, T, H, V) to (B, T, H, V)."""

    def step(carry: Any, token: Any) -> Any:
        top_HM, norm_HM, sum_HMV = carry
        p_HM, k_HM, v_HV = token
        new_top_HM = jnp.maximum(top_HM, k_HM)
        keep_HM, add_HM = jnp.exp(top_HM - new_top_HM), jnp.exp(k_HM - new_top_HM)
        norm_HM = norm_HM * keep_HM + add_HM
        sum_HMV = sum_HMV * keep_HM[..., None] + jnp.einsum("hm,hv->hmv", add_HM, v_HV)
        return (new_top_HM, norm_HM, sum_HMV), jnp.einsum("hm,hmv->hv", p_HM / norm_HM, sum_HMV)

    def row(p_THM: Any, k_THM: Any, v_THV: Any) -> Any:
        (H, M), V = p_THM.shape[1:], v_THV.shape[-1]
        start = (jnp.full((H, M), -1e30), jnp.zeros((H, M)), jnp.zeros((H, M, V)))
        return jax.lax.scan(step, start, (p_THM, k_THM, v_THV))[1]

    return jax.vmap(row)(p_BTHM, k_BTHM, v_BTHV)


def prepare(length: int, training: bool, heads: int, latents: int, width: int) -> Callable[[], object]:
    """A compiled call on random inputs: forward, or with the gradient to all three inputs."""
    draw = np.random.default_rng(0)
    p, k = (draw.standard_normal((1, length, heads, latents), np.float32) for _ in range(2))
    v, dy = (draw.standard_normal((1, length, heads, width), np.float32) for _ in range(2))
    inputs = tuple(jax.device_put(x) for x in (np.asarray(jax.nn.softmax(p)), k, v))
    if training:
        function = jax.jit(jax.grad(lambda *x: (causal_latte(*x) * dy).sum(), argnums=(0, 1, 2)))
    else:
        function = jax.jit(causal_latte)
    return lambda: jax.block_until_ready(function(*inputs))
