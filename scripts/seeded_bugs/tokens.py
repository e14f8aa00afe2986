"""What is known of the tokens, and the states that carry it."""

from __future__ import annotations

from .mutant import PADDING, PIECES, SCAN, STATE, TOKENS, Mutant

TOKENS_PY = "latte/tokens.py"

MUTANTS = [
    # Padding and places.
    Mutant(
        "padding is not zeroed",
        TOKENS_PY,
        "torch.where(self._aligned(self.mask, y_BT), y_BT, torch.zeros_like(y_BT))",
        "y_BT",
        PADDING,
    ),
    Mutant(
        "places count padding",
        TOKENS_PY,
        "real_BT = self.real_BT.long()",
        "real_BT = torch.ones_like(self.real_BT).long()",
        PADDING,
    ),
    Mutant(
        "padding is moved to the front of the row",
        TOKENS_PY,
        "torch.argsort((~self.mask).to(torch.uint8)",
        "torch.argsort(self.mask.to(torch.uint8)",
        PADDING,
    ),
    # What is known of the tokens.
    Mutant(
        "a document's start behind a state is taken for that of a row",
        TOKENS_PY,
        "if reset is not None and not self.continues:",
        "if reset is not None:",
        TOKENS,
    ),
    Mutant(
        "a part counts from the start of its row",
        TOKENS_PY,
        "count_B, continues = self.count_BT[:, start - 1], True",
        "count_B, continues = self.in_row_BT[:, start - 1], True",
        TOKENS,
    ),
    Mutant(
        "a part forgets the parts before it",
        TOKENS_PY,
        "count_B, continues = self.count_BT[:, start - 1], True",
        "count_B, continues = self.start_B, True",
        PIECES,
    ),
    Mutant(
        "a document's start is known to its first token only",
        TOKENS_PY,
        "torch.where(self.reset, read_BT - real_BT, 0).cummax(1).values",
        "torch.where(self.reset, read_BT - real_BT, 0)",
        TOKENS,
    ),
    Mutant(
        "a new document counts the tokens of the one that the row continued",
        TOKENS_PY,
        "torch.where(self.segment_BT == 0, self.start_B[:, None], 0)",
        "self.start_B[:, None]",
        TOKENS,
    ),
    Mutant(
        "from right to left documents are cut one token early",
        TOKENS_PY,
        "F.pad(self.reset[:, 1:], (0, 1)).flip(1)",
        "self.reset.roll(-2, 1).flip(1)",
        SCAN,
    ),
    Mutant(
        "a scan to the left cuts documents one token late",
        TOKENS_PY,
        "F.pad(self.reset[:, 1:], (0, 1)).flip(1)",
        "self.reset.flip(1)",
        SCAN,
    ),
    # States.
    Mutant(
        "saving drops whole numbers",
        "latte/state.py",
        ".contiguous().clone() for name, tensor in self.tensors()}",
        ".contiguous().clone() for name, tensor in self.tensors() if tensor.is_floating_point()}",
        STATE,
    ),
    Mutant("rows are selected along the wrong axis", "latte/state.py", "index_select(0,", "index_select(-1,", STATE),
    Mutant("a fork shares memory", "latte/state.py", "self.map(torch.clone)", "self.map(torch.Tensor.detach)", STATE),
    Mutant(
        "a state of another shape is accepted",
        "latte/state.py",
        "if tensor.dim() != other.dim() or any(n not in (None, m) for n, m in zip(fixed, tensor.shape, strict=True)):",
        "if False:",
        STATE,
    ),
    Mutant(
        "every axis of a state is free",
        "latte/state.py",
        'fixed = [size if letter == "." else None for',
        "fixed = [None for",
        STATE,
    ),
]
