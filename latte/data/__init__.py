"""Text to rows of tokens: sources, tokenizers, token files cached by content, and an order that needs no memory."""

from latte.data.packing import Order, PackedRows, StepBatches
from latte.data.sources import open_source
from latte.data.tokens import Corpus, Tokens, prepare
from latte.recipe import DataRecipe

__all__ = ["Corpus", "DataRecipe", "Order", "PackedRows", "StepBatches", "Tokens", "open_source", "prepare"]
