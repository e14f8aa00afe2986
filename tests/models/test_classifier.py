"""The encoder-classifier: padding, towers, learning, saving."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from latte.models import LatteForSequenceClassification
from tests.models.support import tiny_config, token_ids

VARIANTS = ("latte", "latte-conv-swa++", "latte-r-swa++", "transformer++")


def classifier(variant: str, **overrides) -> LatteForSequenceClassification:
    torch.manual_seed(0)
    config = tiny_config(variant, bidirectional=True, num_labels=3, initializer_range=0.2, **overrides)
    return LatteForSequenceClassification(config).eval()


@pytest.mark.parametrize("variant", VARIANTS)
def test_padding_does_not_change_the_verdict(variant):
    model, ids = classifier(variant).double(), token_ids(1, 9)
    mask = torch.tensor([[0, 1, 1, 0, 0, 1, 1, 1, 0]])
    alone = model(ids[mask.bool()][None]).logits
    torch.testing.assert_close(model(ids, attention_mask=mask).logits, alone, rtol=0, atol=1e-10)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_last_token_can_change_what_the_first_becomes(variant):
    model, ids = classifier(variant), token_ids(1, 12)
    changed = ids.clone()
    changed[0, -1] = (ids[0, -1] + 1) % 97
    first = [model.model(x, use_cache=False).last_hidden_state[0, 0] for x in (ids, changed)]
    assert not torch.equal(*first)


def test_two_towers_compare_two_documents():
    model = classifier("latte-conv-swa++", two_towers=True).double()
    one, other = token_ids(2, 9), token_ids(2, 14, seed=4)
    mask = torch.ones_like(other)
    mask[0, 10:] = 0
    out = model(one, pair_input_ids=other, pair_attention_mask=mask, labels=torch.tensor([0, 2]))
    assert out.logits.shape == (2, 3)
    assert out.loss.isfinite()
    first = model(one[:1], pair_input_ids=other[:1, :10]).logits
    torch.testing.assert_close(out.logits[:1], first, rtol=0, atol=1e-10)
    with pytest.raises(ValueError, match="no pair_input_ids were given"):
        model(one)
    with pytest.raises(ValueError, match=r"^pair_input_ids were given"):
        classifier("latte")(one, pair_input_ids=other)


def test_it_learns_a_question_about_distant_tokens():
    """Are the first and the last token equal? Undecidable from either half alone."""
    model = classifier("latte-r-swa++", vocab_size=4).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        ids = torch.randint(0, 2, (64, 10), generator=generator)
        ids[:, 1:-1] += 2
        loss = model(ids, labels=(ids[:, 0] == ids[:, -1]).long()).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss < 0.1:
            break
    ids = torch.randint(0, 2, (256, 10), generator=generator)
    ids[:, 1:-1] += 2
    accuracy = (model.eval()(ids).logits.argmax(-1) == (ids[:, 0] == ids[:, -1]).long()).float().mean()
    assert accuracy > 0.95


def test_round_trip_through_the_auto_classes_is_bitwise(tmp_path):
    model, ids = classifier("latte-r-swa++"), token_ids(2, 9)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert torch.equal(loaded(ids).logits, model(ids).logits)
