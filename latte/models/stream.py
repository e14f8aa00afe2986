"""Hidden states that a call asks for, as transformers gives them."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor

#: What ``output_hidden_states`` may be: all, none, or the layers whose outputs are wanted.
Layers = bool | Collection[int] | None


class Stream:
    """The residual stream: the input of the first layer and each layer's output, or the outputs of chosen layers alone.

    Chosen layers are counted from 0; the others have None in their places. The last layer's output is taken behind the
    last norm.

    Raises:
        ValueError: layers that the model does not have.
    """

    def __init__(self, asked: Layers, layers: int) -> None:
        self.asked = bool(asked)
        self.chosen = frozenset(asked) if isinstance(asked, Collection) else None
        self._seen: list[Tensor | None] = []
        unknown = sorted((self.chosen or frozenset()) - frozenset(range(layers)))
        if unknown:
            raise ValueError(
                f"output_hidden_states has layer {unknown[0]}, expected layers from 0 to {layers - 1}, True or False"
            )

    def add(self, x_BTD: Tensor) -> None:
        """The input of the first layer first, then each layer's output."""
        if self.asked:
            kept = self.chosen is None or len(self._seen) - 1 in self.chosen
            self._seen.append(x_BTD if kept else None)

    def given(self) -> tuple[Tensor | None, ...] | None:
        """What the call returns; None if it did not ask."""
        if not self.asked:
            return None
        return tuple(self._seen if self.chosen is None else self._seen[1:])
