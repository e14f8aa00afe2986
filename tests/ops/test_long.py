"""A million tokens through the chunked op: bounded memory, and still the right answer at the end."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from latte.ops import causal_latte
from tests.ops.helpers import assert_close, generator

T = 1 << 20


class Memory(TorchDispatchMode):
    """Counts the bytes of all tensors made under it that are alive, and the most there ever were."""

    def __init__(self, *inputs: torch.Tensor) -> None:
        super().__init__()
        self.known = {x.untyped_storage()._cdata for x in inputs}
        self.live = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self.known:
                storage = tensor.untyped_storage()
                self.known.add(storage._cdata)
                weakref.finalize(storage, self.drop, storage._cdata, storage.nbytes())
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
        return result

    def drop(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.live -= size


def test_memory_counts_what_is_alive_and_only_that():
    with Memory() as memory:
        for _ in range(3):
            x = torch.zeros(1000)
            y = x.view(10, 100) + 1
            del x
        assert memory.peak == 4000 * 3
        assert memory.live == 4000
        del y
    assert memory.live == 0


def test_a_million_tokens_in_bounded_memory_end_where_a_softmax_over_all_of_them_does():
    """Beyond its output, the op holds less than the latents' states of one token in sixteen would take."""
    g = generator(0)
    p = torch.randn(1, T, 1, 4, generator=g).softmax(-1)
    k = 3 * torch.randn(1, T, 1, 4, generator=g)
    v = torch.randn(1, T, 1, 4, generator=g) + torch.linspace(0, 3, T)[:, None, None]
    v[..., 0] = 1.0
    with torch.no_grad(), Memory(p, k, v) as memory:
        y, state = causal_latte(p, k, v, backend="torch")
    # Twice the output (its pieces, then all together), two numberings of documents, and the scratch of one block.
    assert memory.peak < 2 * y.nbytes + 2 * 8 * T + T * 4 * 4 * 4 / 16
    # Weights sum to 1, so a mean of ones is one: no drift, however many chunks it passes through.
    assert_close(y[..., 0], torch.ones(1, T, 1), 1e-5)
    for t in (T // 2, T - 1):
        mean = torch.einsum("sl,sv->lv", k[0, : t + 1, 0].double().softmax(0), v[0, : t + 1, 0].double())
        assert_close(y[0, t, 0], p[0, t, 0].double() @ mean, 1e-5, what=f"token {t}")
    assert_close(state.mean_BHMV[0, 0], mean, 1e-5)
    assert_close(state.log_norm_BHM[0, 0], k[0, :, 0].double().logsumexp(0), 1e-7)
    # The state still counts: a token read now moves the mean by its share, one in a hundred million.
    _, after = causal_latte(p[:, :1], 0 * k[:, :1], 1e6 * torch.ones_like(v[:, :1]), state=state)
    share = (-after.log_norm_BHM).exp()[..., None]
    assert (share < 1e-7).all()
    moved = (after.log_norm_BHM - state.log_norm_BHM)[..., None]
    assert_close(moved, share, 1e-4)
    assert_close(after.mean_BHMV - state.mean_BHMV, (1e6 - state.mean_BHMV.double()) * share, 1e-4)
