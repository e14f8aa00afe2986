"""The contract of a mixer, as functions of a case: a registered name with one set of its options.

Every mixer runs through every check that fits its direction, merely by being registered. :func:`check_mixer` runs them
all for one name; :func:`contract` lists them, as the parameters of a test.
"""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable

from latte.mixers import mixer_class
from latte.testing.cases import Case, cases, model_cases
from latte.testing.derivatives import check_directional_derivatives, check_gradients_of_samples
from latte.testing.looking import (
    check_autocast,
    check_compile,
    check_marks,
    check_views,
    check_weights,
)
from latte.testing.mixing import (
    check_call,
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
from latte.testing.models import check_nothing_returned_is_changed
from latte.testing.states import (
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
    check_directional_derivatives,
    check_gradients_of_samples,
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
        return [check_call, *(MODEL_BIDIRECTIONAL if case.bidirectional else MODEL_CAUSAL), *MODEL_BOTH]
    linear = getattr(mixer_class(case.name), "linear_in_values", False)
    return [check_call, *(BIDIRECTIONAL if case.bidirectional else CAUSAL), *BOTH, *([check_weights] if linear else [])]


class ContractError(AssertionError):
    """A mixer does not keep the contract; the message says which mixer, with which options, and what was found."""


@dataclasses.dataclass(frozen=True)
class Check:
    """One check of one case; calling it runs it.

    Raises:
        ContractError: the case does not pass.
    """

    case: Case
    function: Callable[[Case], None]

    @property
    def name(self) -> str:
        return self.function.__name__.removeprefix("check_")

    def __str__(self) -> str:
        return f"{self.case}-{self.name}"

    def __call__(self) -> None:
        try:
            self.function(self.case)
        except Exception as error:
            rule = (self.function.__doc__ or self.name.replace("_", " ")).strip().partition("\n")[0]
            raise ContractError(f"mixer {self.case}: {self.name}: {_finding(error)} (the rule: {rule})") from error


def _finding(error: Exception) -> str:
    """What an exception says, or the line that raised it."""
    said = str(error).strip().partition("\n")[0]
    if not isinstance(error, AssertionError):
        return f"{type(error).__name__}: {said}"
    return said or traceback.extract_tb(error.__traceback__)[-1].line or "an assertion failed"


def contract(name: str | None = None) -> list[Check]:
    """Every check of every example of the mixer registered as ``name``, alone and in a model; of all if it is None.

    Raises:
        ValueError: no mixer has that name.
    """
    return [Check(case, function) for case in [*cases(name), *model_cases(name)] for function in checks(case)]


def check_mixer(name: str) -> None:
    """Run the whole contract for the mixer registered as ``name``: about ten seconds.

    A case that does not even answer a plain call (the check ``call``) is not examined further.

    Raises:
        ContractError: it names every check that failed, and why.
        ValueError: no mixer has that name.
        RuntimeError: assertions are off (``python -O``), so that nothing could be noticed.
    """
    if not __debug__:
        raise RuntimeError("check_mixer needs assertions, but they are off: expected python without -O")
    broken: set[str] = set()
    failures: list[ContractError] = []
    for check in contract(name):
        if str(check.case) in broken:
            continue
        try:
            check()
        except ContractError as error:
            failures.append(error)
            if check.function is check_call:
                broken.add(str(check.case))
    if failures:
        listed = "\n".join(f"  {failure}" for failure in failures)
        raise ContractError(f"mixer {name!r} does not keep the contract:\n{listed}") from failures[0]


__all__ = ["Check", "ContractError", "check_mixer", "checks", "contract"]
