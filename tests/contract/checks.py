"""The contract of a mixer, as functions of a case: a registered name with one set of its options.

Every mixer runs through every check that fits its direction, merely by being registered. :func:`run_contract` does the
same for one name, for mechanisms that live elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable

from latte.mixers import mixer_class
from tests.contract.cases import Case, cases
from tests.contract.looking import (
    check_autocast,
    check_compile,
    check_weights,
    check_weights_are_denied,
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
from tests.contract.states import (
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
)


def checks(case: Case) -> list[Callable[[Case], None]]:
    """The checks that a case must pass."""
    weights = check_weights if mixer_class(case.name).normalised else check_weights_are_denied
    return [*(BIDIRECTIONAL if case.bidirectional else CAUSAL), *BOTH, weights]


def run_contract(name: str) -> None:
    """Run the whole contract for every example of the mixer registered as ``name``."""
    for case in cases(name):
        for check in checks(case):
            check(case)


__all__ = ["BIDIRECTIONAL", "BOTH", "CAUSAL", "checks", "run_contract"]
