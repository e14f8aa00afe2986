"""Mixers and the layers they share."""

from __future__ import annotations

from .mutant import BOTH_WAYS, CASCADE, CHUNKED, LINEAR, MIXERS, PRODUCT, SPARSE, Mutant

FEEDS = "latte/layers/feeds.py"
MIXER = "latte/mixers/latte.py"

MUTANTS = [
    Mutant(
        "the gradient of a wide projection's weight is transposed twice",
        "latte/ops/product.py",
        "_Product.apply(a_MK.T, slope_MN.T).T.contiguous()",
        "_Product.apply(a_MK.T, slope_MN.T).reshape(b_NK.shape)",
        PRODUCT,
    ),
    Mutant(
        "a projection's gradient does not reach its input",
        "latte/ops/product.py",
        "da_MK = _Product.apply(slope_MN, b_NK.T) if",
        "da_MK = 0 * a_MK if",
        PRODUCT,
    ),
    Mutant(
        "the cascade composes keys from queries",
        "latte/mixers/hla.py",
        "keys = stage(k, k) if",
        "keys = stage(k, q) if",
        CASCADE,
    ),
    Mutant(
        "the stages of a cascade take their gates in the other order",
        "latte/mixers/hla.py",
        "return list(gates.chunk(self.stages, dim=-1))",
        "return list(gates.chunk(self.stages, dim=-1))[::-1]",
        CASCADE,
    ),
    Mutant(
        "a chunk of attention begins one token late",
        "latte/mixers/mega.py",
        "(tokens.place_BT % chunk == 0)",
        "(tokens.place_BT % chunk == 1)",
        CHUNKED,
    ),
    Mutant(
        "Laplace attention counts the tokens behind its query",
        "latte/mixers/mega.py",
        "count_BT = inside.count_BT\n",
        "count_BT = inside.count_BT - 1\n",
        CHUNKED,
    ),
    Mutant(
        "Lightning's layers all forget alike",
        "latte/mixers/lightning.py",
        "left = 1 - layer / (layers - 1 + 1e-5) + 1e-5",
        "left = 1.0",
        LINEAR,
    ),
    Mutant(
        "squares of Based features count twice",
        "latte/layers/taylor.py",
        "z.new_tensor(0.5).sqrt(), 1.0)",
        "z.new_tensor(1.0).sqrt(), 1.0)",
        LINEAR,
    ),
    Mutant(
        "a short document keeps as many blocks as the longest",
        "latte/layers/block_sparse.py",
        "(rank_M < wanted_R[:, None])",
        "(rank_M < rank_M.numel() + 0 * wanted_R[:, None])",
        SPARSE,
    ),
    Mutant(
        "linear attention reads what was kept",
        "latte/layers/block_sparse.py",
        "& ~kept_RHIJ.scatter(",
        "& kept_RHIJ.scatter(",
        SPARSE,
    ),
    Mutant(
        "tokens behind a document have weights in its last block",
        "latte/layers/block_sparse.py",
        "taken(real_RJC[:, None].expand(-1, H, -1, -1)) &",
        "torch.ones_like(taken(real_RJC[:, None].expand(-1, H, -1, -1))) &",
        SPARSE,
    ),
    Mutant(
        "the short branch of a long kernel is added at its far end",
        "latte/mixers/chela.py",
        "F.pad(self.near_weight, (self.options.long_size - self.options.short_size, 0))",
        "F.pad(self.near_weight, (0, self.options.long_size - self.options.short_size))",
        ("tests/mixers/test_chela.py",),
    ),
    Mutant(
        "gates of places ignore where a document begins",
        "latte/mixers/lina.py",
        "tokens.place_BT.clamp(min=0)",
        "torch.arange(tokens.length).expand(tokens.batch, -1)",
        ("tests/mixers/test_lina.py",),
    ),
    Mutant(
        "the RG-LRU's decay has another sign",
        FEEDS,
        "GATE_POWER * F.softplus(self",
        "GATE_POWER * F.softplus(-self",
        MIXERS,
    ),
    Mutant(
        "the feed to the left cuts documents one token late",
        FEEDS,
        "back.flip(1), None, tokens.reversed)",
        "back.flip(1), None, Tokens(*back.shape[:2], back.device, tokens.reversed.mask, "
        "None if tokens.reset is None else tokens.reset.flip(1)))",
        BOTH_WAYS,
    ),
    Mutant(
        "key/value heads are repeated in the wrong order",
        "latte/layers/linear.py",
        "x_BTGV.repeat_interleave(heads // groups, dim=2)",
        "x_BTGV.repeat(1, 1, heads // groups, 1)",
        MIXERS,
    ),
    Mutant(
        "linear attention's denominator is doubled",
        "latte/mixers/linear.py",
        "F.pad(repeat_heads(v_BTGV, heads), (0, 1), value=1.0)",
        "F.pad(repeat_heads(v_BTGV, heads), (0, 1), value=2.0)",
        MIXERS,
    ),
    Mutant("the last latent is lost to the window's slot", MIXER, "p_BTHM[..., 1:]\n", "p_BTHM[..., :-1]\n", MIXERS),
    Mutant(
        "the window reads what is fed to the latents",
        MIXER,
        "self.window(x_BTD, v_BTGV",
        "self.window(self.latent_input(x_BTD, None if state is None else state.feed, tokens)[0], v_BTGV",
        MIXERS,
    ),
    Mutant(
        "sinks are looked at from the query's own place",
        "latte/layers/window.py",
        "tokens.place_BT.clamp(max=self.farthest)",
        "tokens.place_BT",
        MIXERS,
    ),
    Mutant(
        "RetNet forgets twice as fast",
        "latte/mixers/retnet.py",
        "torch.exp2(-5 - heads)",
        "torch.exp2(-4 - heads)",
        MIXERS,
    ),
    Mutant(
        "GLA's temperature multiplies",
        "latte/mixers/gla.py",
        "/ self.options.gate_temperature",
        "* self.options.gate_temperature",
        MIXERS,
    ),
]
