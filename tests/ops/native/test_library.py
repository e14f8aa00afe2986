"""Which library is loaded, and what is said when there is none."""

import os
import subprocess
import sys

import pytest
import torch
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode

from latte.ops import native
from latte.ops.native import library
from tests.ops.native.support import needs_library

PROGRAM = """
import sys, torch
from latte.ops import native
torch.manual_seed(0)
p, k, v = torch.randn(1, 50, 2, 7).softmax(-1), torch.randn(1, 50, 2, 7), torch.randn(1, 50, 2, 9)
y = native.causal_latte(p, k, v)[0] + native.window_attention(k, p, v, None, None, 9)[0]
torch.save((native.describe(), y + native.decay_attention(p, k, v, -p)[0]), sys.argv[1])
"""


def test_a_missing_or_foreign_library_is_explained(monkeypatch, tmp_path):
    monkeypatch.setattr(library, "LIBRARY", tmp_path / "none.so")
    assert library.load.__wrapped__() == (None, "no native library: no compiler was found when latte was installed")
    (tmp_path / "none.so").write_text("not a library")
    assert "cannot be loaded" in library.load.__wrapped__()[1]
    monkeypatch.setattr(library, "load", lambda: (None, "a reason"))
    assert not library.available()
    assert library.describe() == "torch (a reason)"
    with pytest.raises(RuntimeError, match="a reason"):
        library.kernel.__wrapped__("latte_forward")


@needs_library
def test_every_instruction_set_of_the_machine_agrees(tmp_path):
    results = {}
    for isa in ("", "portable"):
        file = tmp_path / f"result{isa}"
        subprocess.run([sys.executable, "-c", PROGRAM, str(file)], env={**os.environ, "LATTE_ISA": isa}, check=True)
        results[isa] = torch.load(file)
    assert results[""][0] == native.describe() or os.environ.get("LATTE_ISA")
    assert results["portable"][0].startswith(("native (portable", "native (neon"))
    torch.testing.assert_close(results[""][1], results["portable"][1], rtol=1e-5, atol=1e-5)


class Spy(TorchDispatchMode):
    """Notes the names of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


@needs_library
@torch.no_grad()
@pytest.mark.parametrize("T", [1, 50])
def test_who_watches_operators_sees_them(T):
    """Without gradients kernels are called directly, but not where a mode or a profiler looks on."""
    x = torch.randn(1, T, 2, 8)
    calls = {"window_attention": lambda: native.window_attention(x, x, x, None, None, 3)}
    calls["causal_latte"] = lambda: native.causal_latte(x.softmax(-1), x, x)
    for name, call in calls.items():
        plain = call()[0]
        with Spy() as spy:
            assert torch.equal(call()[0], plain)
        assert f"latte.{name}.default" in spy.seen
        with profile() as seen:
            call()
        assert f"latte::{name}" in {event.key for event in seen.key_averages()}


@needs_library
def test_no_rows_give_no_rows():
    x = torch.zeros(0, 8, 2, 4)
    assert native.window_attention(x, x, x, None, None, 3)[0].shape == x.shape
    assert native.causal_latte(x, x, x)[0].shape == x.shape
