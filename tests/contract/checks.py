"""The contract of a mixer, as functions of a case: a registered name with one set of its options.

Every mixer runs through every check that fits its direction, merely by being registered. :func:`run_contract` does the
same for one name, for mechanisms that live elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable

from latte.mixers import mixer_class
from tests.contract.cases import Case, cases, model_cases
from tests.contract.looking import (
    check_autocast,
    check_compile,
    check_marks,
    check_views,
    check_weights,
)
from tests.contract.mixing import (
    check_forms,
    check_gradient_to_the_future_is_zero,
    check_gradients,
    check_large_logits_are_finite,
    check_mask_invariance,
    check_packing,
    check_padding,
    check_pads_say_nothing,
    check_reference,
    check_state_size,
    check_the_future_changes_no_bit_of_the_past,
)
from tests.contract.models import check_nothing_returned_is_changed
from tests.contract.states import (
    check_a_state_without_a_count,
    check_bad_inputs_are_refused,
    check_foreign_states_are_refused,
    check_state_is_a_value,
    check_state_rows,
    check_states_of_no_use_are_refused,
)

CAUSAL: tuple[Callable[[Case], None], ...] = (
    check_forms,
    check_gradient_to_the_future_is_zero,
    check_the_future_changes_no_bit_of_the_past,
    check_state_size,
    check_state_is_a_value,
    check_state_rows,
    check_foreign_states_are_refused,
    check_a_state_without_a_count,
)
BIDIRECTIONAL: tuple[Callable[[Case], None], ...] = (check_reference, check_states_of_no_use_are_refused)
BOTH: tuple[Callable[[Case], None], ...] = (
    check_padding,
    check_pads_say_nothing,
    check_mask_invariance,
    check_packing,
    check_gradients,
    check_large_logits_are_finite,
    check_bad_inputs_are_refused,
    check_autocast,
    check_compile,
    check_marks,
    check_views,
)
#: Of a model of two layers.
MODEL_CAUSAL: tuple[Callable[[Case], None], ...] = (
    check_forms,
    check_gradient_to_the_future_is_zero,
    check_the_future_changes_no_bit_of_the_past,
    check_state_is_a_value,
    check_state_rows,
)
MODEL_BIDIRECTIONAL: tuple[Callable[[Case], None], ...] = (check_reference,)
MODEL_BOTH: tuple[Callable[[Case], None], ...] = (
    check_padding,
    check_packing,
    check_nothing_returned_is_changed,
)


def checks(case: Case) -> list[Callable[[Case], None]]:
    """The checks that a case must pass."""
    if case.layers:
        return [*(MODEL_BIDIRECTIONAL if case.bidirectional else MODEL_CAUSAL), *MODEL_BOTH]
    linear = getattr(mixer_class(case.name), "linear_in_values", False)
    return [*(BIDIRECTIONAL if case.bidirectional else CAUSAL), *BOTH, *([check_weights] if linear else [])]


def run_contract(name: str) -> None:
    """Run the whole contract for every example of the mixer registered as ``name``, and for a model of it."""
    for case in [*cases(name), *model_cases(name)]:
        for check in checks(case):
            check(case)


__all__ = ["BIDIRECTIONAL", "BOTH", "CAUSAL", "checks", "run_contract"]
