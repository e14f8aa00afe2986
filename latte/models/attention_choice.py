"""Why ``attn_implementation`` can't be chosen: mixers have ops of their own, which choose a form for the device."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel


class NoAttentionChoice(PreTrainedModel):
    """A model whose layers call none of transformers' attention functions."""

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return False

    def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> str:
        """``eager``, transformers' word for a model's own code.

        Raises:
            ValueError: another implementation was asked for.
        """
        if requested_attention not in (None, "eager"):
            raise ValueError(
                f"attn_implementation is {requested_attention!r}, but {type(self).__name__} has no softmax attention "
                "to choose: its mixers run ops of their own, expected 'eager' or None"
            )
        return "eager"

    def _check_and_adjust_attn_implementation(self, attn_implementation: str | None, *_: Any, **__: Any) -> str:
        return self.get_correct_attn_implementation(attn_implementation)

    def set_attn_implementation(self, attn_implementation: str | dict[str, Any] | None, *_: Any, **__: Any) -> None:
        """Refuse everything but ``eager``, where transformers would warn and change nothing.

        Raises:
            ValueError: another implementation was asked for.
        """
        asked = attn_implementation.values() if isinstance(attn_implementation, dict) else [attn_implementation]
        for one in asked:
            self.get_correct_attn_implementation(one)
