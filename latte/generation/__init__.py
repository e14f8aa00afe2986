"""Generating tokens: many requests in one running batch, and guesses of a draft that one call verifies."""

from latte.generation.batching import Batch, Request, Ticket
from latte.generation.drafts import Draft, ModelDraft, PromptLookup
from latte.generation.sampling import Sampling
from latte.generation.speculative import Speculation, speculate

__all__ = [
    "Batch",
    "Draft",
    "ModelDraft",
    "PromptLookup",
    "Request",
    "Sampling",
    "Speculation",
    "Ticket",
    "speculate",
]
