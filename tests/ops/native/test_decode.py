"""Products of a few rows, and what the library says of its stages."""

import pytest
import torch

from latte.ops import native
from tests.ops.native.support import needs_library, relative

pytestmark = needs_library


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("B", [1, 3])
@pytest.mark.parametrize("K", [1, 7, 16, 130])
def test_products(B, K, dtype):
    random = torch.Generator().manual_seed(K)
    x = torch.randn(B, 2 * K, generator=random).to(dtype)[:, :K]
    weights = [torch.randn(n, K, generator=random).to(dtype) for n in (1, 5, 8, 33)]
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    for got, weight in zip(native.products(x, weights), weights, strict=True):
        assert relative(got, x.double() @ weight.double().T) < tolerance


def test_threads_share_out_the_rows_of_a_large_product():
    x, weight = torch.randn(2, 512), torch.randn(3001, 512)
    (alone,), (shared,) = (native.products(x, [weight], threads) for threads in (1, 3))
    assert torch.equal(alone, shared)
    assert relative(shared, x.double() @ weight.double().T) < 1e-5


def test_stages_are_packed_by_name():
    number, fields = native.stages()["Norm"]
    assert number == list(native.stages()).index("Norm")
    weight = torch.ones(4)
    words = native.pack("Norm", {"eps": 1.0, "y": "there", "weight": weight, "width": 4}, {"there": 48})
    assert len(words) == len(fields)
    found = {name: words[field.place] for name, field in fields.items()}
    assert found["y"] == 48
    assert found["x"] == -1  # none was given
    assert found["weight"] == weight.data_ptr()
    assert found["bias"] == 0
    assert found["width"] == 4
    assert found["eps"] == 0x3FF0000000000000
    with pytest.raises(ValueError, match=r"stage Norm was given \['colour'\]"):
        native.pack("Norm", {"colour": 1}, {})
