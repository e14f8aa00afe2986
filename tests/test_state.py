"""States as values: size, copies, rows, files, and what is refused."""

import json

import pytest
import safetensors.torch
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from latte.ops import ConvState, LatteState, ScanState
from latte.state import State, require_state, state


@state
class Leaf(State):
    a_B2: Tensor
    n_B: Tensor


@state
class Tree(State):
    first: Leaf
    rest: tuple[Leaf, ...]
    nothing: Leaf | None


def leaf(offset: float, rows: int = 3) -> Leaf:
    return Leaf(torch.arange(2.0 * rows).reshape(rows, 2) + offset, torch.arange(rows) + int(offset))


def tree(rows: int = 3) -> Tree:
    return Tree(leaf(0.5, rows), (leaf(10, rows), leaf(20, rows)), None)


def assert_same(a: State, b: State) -> None:
    assert type(a) is type(b)
    mine, other = dict(a.tensors()), dict(b.tensors())
    assert mine.keys() == other.keys()
    for path, tensor in mine.items():
        assert tensor.dtype == other[path].dtype, path
        assert torch.equal(tensor, other[path]), path


def test_tensors_have_dotted_paths_in_a_fixed_order():
    paths = [path for path, _ in tree().tensors()]
    assert paths == ["first.a_B2", "first.n_B", "rest.0.a_B2", "rest.0.n_B", "rest.1.a_B2", "rest.1.n_B"]


def test_size_counts_every_tensor():
    assert tree().nbytes == 3 * (3 * 2 * 4 + 3 * 8)
    assert tree(5).batch_size == 5
    assert tree().device == torch.device("cpu")


def test_a_fork_shares_no_memory():
    original = tree()
    fork = original.fork()
    assert_same(fork, original)
    for _, tensor in fork.tensors():
        tensor.zero_()
    assert_same(original, tree())


def test_select_takes_rows_of_the_batch_in_the_order_asked_for():
    index = torch.tensor([2, 0, 0, 1])
    selected = tree().select(index)
    assert selected.rest[1].a_B2.tolist() == [[24, 25], [20, 21], [20, 21], [22, 23]]
    assert selected.first.n_B.tolist() == [2, 0, 0, 1]
    assert selected.nothing is None


def test_repeat_puts_copies_of_a_row_side_by_side():
    assert tree().repeat(2).first.n_B.tolist() == [0, 0, 1, 1, 2, 2]


def test_detach_keeps_the_numbers_and_cuts_the_graph():
    a = torch.ones(1, 2, requires_grad=True)
    cut = Leaf(2 * a, torch.zeros(1)).detach()
    assert cut.a_B2.tolist() == [[2, 2]]
    assert not cut.a_B2.requires_grad


def test_to_moves_every_tensor():
    assert {tensor.device.type for _, tensor in tree().to("meta").tensors()} == {"meta"}


def test_a_state_cannot_be_changed_in_place():
    with pytest.raises(AttributeError):
        tree().first = leaf(1)  # type: ignore[misc]


def test_states_are_pytrees():
    leaves, spec = pytree.tree_flatten(tree())
    assert len(leaves) == 7  # six tensors and the None
    assert_same(pytree.tree_unflatten(leaves, spec), tree())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_saving_and_loading_keeps_every_bit(tmp_path, dtype):
    values = torch.tensor([[0.1, -torch.inf], [torch.nan, 1e-40], [-0.0, 1e30]]).to(dtype)
    saved = Tree(Leaf(values, torch.tensor([1, 2, 3])), (leaf(1),), None)
    saved.save(tmp_path / "x.state")
    loaded = State.load(tmp_path / "x.state")
    assert isinstance(loaded, Tree)
    assert loaded.first.a_B2.dtype == dtype
    bits = torch.int64 if dtype == torch.float64 else torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(loaded.first.a_B2.view(bits), values.view(bits))
    assert_same(loaded.rest[0], leaf(1))
    assert loaded.nothing is None
    assert [path.name for path in tmp_path.iterdir()] == ["x.state"]


def test_views_and_shared_tensors_are_saved_whole(tmp_path):
    wide = torch.arange(12.0).reshape(2, 6)
    saved = Leaf(wide[:, ::3], wide[:, 0])
    saved.save(tmp_path / "x")
    assert_same(State.load(tmp_path / "x"), Leaf(wide[:, ::3].clone(), wide[:, 0].clone()))


def test_saving_replaces_an_older_file(tmp_path):
    leaf(0).save(tmp_path / "x")
    leaf(5).save(tmp_path / "x")
    assert_same(State.load(tmp_path / "x"), leaf(5))


def test_loading_refuses_what_is_no_state(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no state file at .*nowhere"):
        State.load(tmp_path / "nowhere")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(ValueError, match="text is not a readable safetensors file"):
        State.load(tmp_path / "text")
    safetensors.torch.save_file({"a": torch.ones(1)}, tmp_path / "other")
    with pytest.raises(ValueError, match="its format is None, expected 'latte-state-2'"):
        State.load(tmp_path / "other")


def test_loading_refuses_a_truncated_file(tmp_path):
    tree().save(tmp_path / "x")
    whole = (tmp_path / "x").read_bytes()
    (tmp_path / "x").write_bytes(whole[:-8])
    with pytest.raises(ValueError, match="x is not a readable safetensors file"):
        State.load(tmp_path / "x")


def test_loading_refuses_missing_tensors_and_unknown_kinds(tmp_path):
    def write(layout: object) -> None:
        metadata = {"format": "latte-state-2", "layout": json.dumps(layout)}
        safetensors.torch.save_file({"a_B2": torch.ones(1, 2)}, tmp_path / "x", metadata=metadata)

    write({"kind": "Leaf", "fields": {"a_B2": "tensor", "n_B": "tensor"}})
    with pytest.raises(ValueError, match="x is damaged: tensor n_B is missing"):
        State.load(tmp_path / "x")
    write({"kind": "Elsewhere", "fields": {"a_B2": "tensor"}})
    with pytest.raises(ValueError, match=r"holds a state of kind 'Elsewhere', known are .*'Leaf'"):
        State.load(tmp_path / "x")


def test_a_state_is_refused_unless_it_fits():
    like = leaf(0)
    assert require_state("op", None, like) is like
    other = leaf(7)
    assert require_state("op", other, like) is other
    refused = {
        "state is a Tree, expected a Leaf": tree(),
        r"state.a_B2 has shape \(4, 2\), expected \(3, 2\)": leaf(0, rows=4),
        "state.a_B2 is torch.float64, expected torch.float32": Leaf(like.a_B2.double(), like.n_B),
        "state.a_B2 is on meta, expected cpu": like.to("meta"),
    }
    for message, wrong in refused.items():
        with pytest.raises(ValueError, match=f"op: {message}"):
            require_state("op", wrong, like)
    with pytest.raises(ValueError, match=r"state holds \[.*'rest.1.a_B2'.*\], expected \["):
        require_state("op", tree(), Tree(leaf(0), (leaf(1),), None))


def test_empty_states_are_wide_enough_for_long_rows():
    """Recurrences never run below float32, log-normalisers in float64."""
    x = torch.zeros(2, 3, dtype=torch.bfloat16)
    assert ScanState.empty(x, 4).h_BD.dtype == torch.float32
    assert LatteState.empty(x, 1, 2, 3).mean_BHMV.dtype == torch.float32
    assert LatteState.empty(x, 1, 2, 3).log_norm_BHM.dtype == torch.float64
    assert ConvState.empty(x, 3, 4).tail_BKD.dtype == torch.bfloat16
