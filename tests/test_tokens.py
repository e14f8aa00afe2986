"""Tokens: what is simplified, and what follows from masks, documents and counts."""

import pytest
import torch

from latte.models import LatteForCausalLM, preset
from latte.ops import registered_ops
from latte.ops.registry import Draw, form_for
from latte.tokens import Tokens


def flags(*rows: str) -> torch.Tensor:
    return torch.tensor([[mark == "x" for mark in row] for row in rows])


def test_what_says_nothing_is_dropped():
    x = torch.zeros(2, 4, 1)
    assert Tokens.of(x, mask=flags("xxxx", "xxxx")).mask is None
    assert Tokens.of(x, reset=flags("x...", "x...")).reset is None
    assert Tokens.of(x, reset=flags("....", "x...")).from_start
    # Behind left padding the first real token begins a document anyway.
    assert Tokens.of(x, mask=flags(".xxx", "xxxx"), reset=flags(".x..", "x...")).reset is None
    kept = Tokens.of(x, reset=flags("x.x.", "x..."))
    assert torch.equal(kept.reset, flags("..x.", "...."))
    # Behind a state a row's first token begins a document only if it says so.
    first = flags("x...", "....")
    assert torch.equal(Tokens.of(x, reset=first, start=torch.tensor([3, 3])).reset, first)


def test_places_count_real_tokens_of_the_document():
    x = torch.zeros(2, 6, 1)
    tokens = Tokens.of(x, mask=flags(".xx.xx", "xxxxxx"), reset=flags("....x.", "..x..."), start=torch.tensor([5, 0]))
    assert tokens.place_BT[0, [1, 2, 4, 5]].tolist() == [5, 6, 0, 1]
    assert tokens.place_BT[1].tolist() == [0, 1, 0, 1, 2, 3]
    assert tokens.count_B.tolist() == [2, 4]
    assert tokens.read_B.tolist() == [4, 6]
    assert tokens.segment_BT[0].tolist() == [0, 0, 0, 0, 1, 1]


@pytest.mark.parametrize("cut", range(1, 8))
def test_parts_go_on_where_the_part_before_ended(cut):
    g = torch.Generator().manual_seed(cut)
    mask, reset = (torch.rand(3, 8, generator=g) < share for share in (0.7, 0.3))
    whole = Tokens.of(torch.zeros(3, 8), mask=mask, reset=reset, start=torch.tensor([0, 2, 9]))
    one, two = whole.part(0, cut), whole.part(cut, 8)
    assert torch.equal(one.count_B, two.start_B)
    assert torch.equal(torch.cat([one.place_BT, two.place_BT], 1)[mask], whole.place_BT[mask])
    assert torch.equal(two.count_B, whole.count_B)


def test_a_count_that_nobody_gave_is_asked_for():
    tokens = Tokens.default(torch.zeros(2, 3), state=object())
    assert tokens.plain
    assert not tokens.from_start
    with pytest.raises(ValueError, match="without the number of tokens it has read, expected tokens="):
        _ = tokens.place_BT


@pytest.mark.parametrize("variant", ["latte-r-swa++", "transformer++"])
def test_a_reset_at_the_first_token_takes_the_path_without_one(variant):
    """What ``latte train`` gives and what a row without documents gives: the same numbers to the last bit."""
    torch.manual_seed(0)
    model = LatteForCausalLM(preset(variant, "tiny", num_hidden_layers=2, vocab_size=50))
    ids = torch.randint(50, (2, 40))
    reset = torch.zeros(2, 40, dtype=torch.bool)
    reset[:, 0] = True
    gradients = []
    for documents in (None, reset):
        model.zero_grad()
        model(ids, labels=ids, reset=documents).loss.backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(torch.equal(one, two) for one, two in zip(*gradients, strict=True))


@pytest.mark.parametrize("op", registered_ops(), ids=lambda op: op.name)
def test_a_backend_is_the_form_of_its_name(op):
    """Were ``reference`` another form, every comparison with it would compare a form with itself."""
    (x, *_), _ = op.example(Draw(2, 70, torch.float64, torch.Generator().manual_seed(0)))
    assert form_for(op, x, "reference") is op.forms["reference"]
    assert form_for(op, x, "torch") is op.forms["chunked"]
    if "native" in op.backends:
        assert form_for(op, x, "native") is op.forms["native"]


@pytest.mark.parametrize("op", registered_ops(), ids=lambda op: op.name)
def test_every_registered_op_agrees_with_its_reference(op):
    """On its own example, in every backend, with padding and documents."""
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        g = torch.Generator().manual_seed(0)
        inputs, options = op.example(Draw(2, 70, dtype, g))
        if op.tokens:
            mask, reset = torch.rand(2, 70, generator=g) > 0.2, torch.rand(2, 70, generator=g) < 0.05
            options["tokens"] = Tokens.of(inputs[0], mask=mask, reset=reset)
        results = {backend: op.call(*inputs, backend=backend, **options) for backend in (*op.backends, None)}
        outputs = {name: result if isinstance(result, torch.Tensor) else result[0] for name, result in results.items()}
        wanted = outputs.pop("reference")
        assert wanted.abs().max() > 0
        for backend, found in outputs.items():
            assert (found - wanted).abs().max() <= tolerance * wanted.abs().max(), backend


def test_documents_become_rows_without_padding_and_come_back():
    x = torch.arange(1.0, 13.0).view(2, 6, 1)
    tokens = Tokens.of(x, mask=flags("x.xxxx", ".xxx.."), reset=flags("....x.", "......"))
    rows = tokens.documents.gather(x)[..., 0]
    assert rows.tolist() == [[1, 3, 4], [5, 6, 0], [8, 9, 10]]
    assert tokens.documents.real_RL.tolist() == [[True] * 3, [True, True, False], [True] * 3]
    assert tokens.longest == 3
    assert torch.equal(tokens.documents.scatter(rows), tokens.zero_padding(x)[..., 0])


def test_documents_in_a_compiled_graph_are_those_outside():
    def means(x, mask, reset):
        def whole(rows, real):
            return (rows.sum(1) / real.sum(1).clamp(min=1)[:, None])[:, None].expand_as(rows)

        return Tokens.of(x, mask=mask, reset=reset).over_documents(whole, x)

    x, mask, reset = torch.randn(2, 6, 3), flags("x.xxxx", ".xxx.."), flags(".x..x.", "x.....")
    compiled = torch.compile(means, fullgraph=True, backend="eager")
    assert torch.allclose(compiled(x, mask, reset), means(x, mask, reset))
