"""Higher-order linear attention against products of its masked weights, in float64."""

import pytest
import torch
import torch.nn.functional as F

from latte.mixers import MixerConfig, build
from latte.tokens import Tokens
from tests.ops.helpers import assert_close, generator, normal

pytestmark = pytest.mark.usefixtures("each_backend")
D, H = 8, 2
#: ((W W^T) . L) V, W W V and ((W W^T) . L) W V, W = L . (Q K^T), each stage faded by its own gate.
FORMULAS = {
    "hla2": lambda keys, last, qk, v: (last * (qk @ (keys * qk).mT)).tril() @ v,
    "ahla": lambda values, last, qk, v: (last * qk).tril() @ ((values * qk).tril() @ v),
    "hla3": lambda keys, values, last, qk, v: (last * (qk @ (keys * qk).mT)).tril() @ ((values * qk).tril() @ v),
}


def faded(gate_BT):
    """e^{g_{s+1} + ... + g_t} for s <= t."""
    total = gate_BT.cumsum(1)
    return (total[:, :, None] - total[:, None, :]).tril().exp().tril()


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("name", FORMULAS)
def test_it_is_a_product_of_masked_weights(name, gated):
    T = 21
    options = {"gated": gated, "rope": False, "gate_temperature": 2.0}
    module = build(name, MixerConfig(hidden_size=D, num_heads=H, options=options)).double()
    x = normal(generator(0), 2, T, D)
    q, k = (F.normalize(p(x).unflatten(-1, (H, -1)), dim=-1) for p in (module.q_proj, module.k_proj))
    v = module.v_proj(x).unflatten(-1, (H, -1))
    gates = torch.zeros(2, T, module.stages * H, dtype=torch.float64)
    if gated:
        gates = F.logsigmoid(module.gate_proj(x)) / 2.0
    y = torch.zeros_like(v)
    for h in range(H):
        fades = [faded(gates[..., stage * H + h]) for stage in range(module.stages)]
        y[:, :, h] = FORMULAS[name](*fades, (q[:, :, h] @ k[:, :, h].mT).tril(), v[:, :, h])
    y = y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    assert_close(module(x)[0], module.o_proj(y.flatten(2)))


def test_the_second_order_is_the_serial_rule_of_the_paper():
    """S, C and G of section 4 without decay: o_t = q_t^T (S_t C_t - G_t)."""
    T = 13
    config = MixerConfig(hidden_size=D, num_heads=H, options={"gated": False, "rope": False})
    module = build("hla2", config).double()
    x = normal(generator(1), 1, T, D)
    q, k = (F.normalize(p(x).unflatten(-1, (H, -1)), dim=-1) for p in (module.q_proj, module.k_proj))
    v = module.values(x)
    y, _ = module.mix_heads(x, v, None, Tokens.of(x))
    for h in range(H):
        S, C, G = (torch.zeros(4, 4, dtype=torch.float64) for _ in range(3))
        for t in range(T):
            key, query = k[0, t, h], q[0, t, h]
            G = G + torch.outer(key, key @ C)
            S, C = S + torch.outer(key, key), C + torch.outer(query, v[0, t, h])
            assert_close(y[0, t, h], query @ (S @ C - G))


def test_a_temperature_of_zero_is_refused():
    config = MixerConfig(hidden_size=D, num_heads=H, options={"gate_temperature": 0.0})
    with pytest.raises(ValueError, match=r"mixer 'hla2': gate_temperature is 0.0, expected a positive number"):
        build("hla2", config)
