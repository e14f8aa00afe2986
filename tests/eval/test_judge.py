"""Measurements of an extended model: what a text is too short for is listed and not measured."""

import numpy as np

from latte.eval.extension import EXTENDED, LONG, ORIGINAL, VALIDATION, Contender, judge, unreached
from latte.eval.stream import Text
from latte.recipe import JudgeRecipe
from latte.report.model_card import gaps
from tests.extend.families import small_model


def text(length: int) -> Text:
    return Text([np.random.default_rng(0).integers(0, 50, length)], num_bytes=length)


def test_contexts_beyond_the_text_are_listed_and_not_measured(tmp_path):
    recipe = JudgeRecipe(
        contexts=[16, 4096], long_contexts=[40, 1_000_000], retrieval_contexts=[1_000_000], decode_contexts=[]
    )
    texts = {VALIDATION: text(30), LONG: text(50)}
    said: list[str] = []
    model = small_model("llama").eval()
    contenders = [Contender(ORIGINAL, model, 4096), Contender(EXTENDED, model)]
    found = judge(contenders, None, texts, recipe, tmp_path / "judge.json", 64, said.append)
    assert found["unreached"] == {VALIDATION: [4096], LONG: [1_000_000], "retrieval": [1_000_000]}
    assert set(found["perplexity"][VALIDATION][EXTENDED]) == {"16"}
    assert set(found["perplexity"][LONG][EXTENDED]) == {"40"}
    assert found["retrieval"][EXTENDED] == {}
    assert "nothing at 4,096 tokens on validation: its longest document has 30" in said
    assert "Not measured, since the text is shorter: validation at 4,096 tokens;" in gaps(found)
    assert unreached(texts, JudgeRecipe(contexts=[16], long_contexts=[], retrieval_contexts=[])) == {}
