"""transformers' own test mixins, from a copy of its tests on this machine; they are no part of any package.

``LATTE_TRANSFORMERS_TESTS`` names the folder ``tests`` of transformers' repository, or that of its source distribution,
which has the tests of models and not those of generation. ``make test-transformers`` fetches the latter.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import types
from pathlib import Path
from typing import Any

import tests

PACKAGE = "transformers_tests"
FOLDER = os.environ.get("LATTE_TRANSFORMERS_TESTS", "")
#: Why the suite can't run here; None if it can.
MISSING = None
if not FOLDER:
    MISSING = "LATTE_TRANSFORMERS_TESTS does not name a folder with transformers' tests"
elif not (Path(FOLDER) / "test_modeling_common.py").is_file():
    raise FileNotFoundError(f"LATTE_TRANSFORMERS_TESTS is {FOLDER}, which has no test_modeling_common.py")
elif importlib.util.find_spec("parameterized") is None:
    MISSING = "the package parameterized, which transformers' tests import, is not installed"

HAS_GENERATION = MISSING is None and (Path(FOLDER) / "generation" / "test_utils.py").is_file()


def mixins() -> dict[str, Any]:
    """``ModelTesterMixin`` and ``GenerationTesterMixin``, and what makes their inputs."""
    if PACKAGE not in sys.modules:
        package = types.ModuleType(PACKAGE)
        package.__path__ = [FOLDER]
        sys.modules[PACKAGE] = package
        tests.__path__.append(FOLDER)  # a few of its files import others as ``tests.exporters``
        if not HAS_GENERATION:
            _without("generation.test_utils", "GenerationTesterMixin")
        if not (Path(FOLDER) / "exporters" / "test_export.py").is_file():
            _without("exporters.test_export", "ExportTesterMixin")
    common = importlib.import_module(f"{PACKAGE}.test_modeling_common")
    return {
        "ModelTesterMixin": common.ModelTesterMixin,
        "GenerationTesterMixin": common.GenerationTesterMixin,
        "ids_tensor": common.ids_tensor,
        "global_rng": common.global_rng,
    }


def _without(path: str, mixin: str) -> None:
    """A mixin without tests, for a copy that lacks its file: other files only ask whether a class has it."""
    parent = types.ModuleType(f"{PACKAGE}.{path.split('.')[0]}")
    parent.__path__ = []
    module = types.ModuleType(f"{PACKAGE}.{path}")
    setattr(module, mixin, type(mixin, (), {}))
    sys.modules[parent.__name__], sys.modules[module.__name__] = parent, module
