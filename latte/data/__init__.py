"""Text to rows of tokens: sources, tokenizers, token files cached by content, and a stateless shuffled order."""

from latte.data.corpus import Corpus, CorpusPart, prepare
from latte.data.packing import Batch, GroupedOrder, Order, PackedRows, Rows, StepBatches
from latte.data.sources import open_source
from latte.recipe import DataRecipe

__all__ = [
    "Batch",
    "Corpus",
    "CorpusPart",
    "DataRecipe",
    "GroupedOrder",
    "Order",
    "PackedRows",
    "Rows",
    "StepBatches",
    "open_source",
    "prepare",
]
