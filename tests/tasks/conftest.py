"""The fixture of interrupted runs, shared with the tests of training."""

from tests.train.conftest import interrupted

__all__ = ["interrupted"]
