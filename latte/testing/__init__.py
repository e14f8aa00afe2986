"""The contract that every mixer keeps, for mixers of your own too: ``check_mixer("mine")``, or as tests::

@pytest.mark.parametrize("check", latte.testing.contract("mine"), ids=str)
def test_contract(check):
    check()
"""

try:
    import hypothesis  # noqa: F401
except ImportError as error:
    raise ImportError("latte.testing draws inputs with hypothesis: pip install 'latte-attention[testing]'") from error

from latte.testing.cases import Case, cases, model_cases
from latte.testing.checks import Check, ContractError, check_mixer, contract

__all__ = ["Case", "Check", "ContractError", "cases", "check_mixer", "contract", "model_cases"]
