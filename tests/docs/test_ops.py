"""docs/ops.md lists the ops that are registered."""

from pathlib import Path

from latte.ops.listing import page

PAGE = Path(__file__).parents[2] / "docs" / "ops.md"


def test_the_page_of_ops_is_what_the_registry_says():
    assert PAGE.read_text() == page(), "run python -m latte.ops.listing > docs/ops.md"
