"""The kernels under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

NATIVE = Path(__file__).resolve().parents[3] / "latte/ops/native"
COMPILER = os.environ.get("CXX", "c++")


def supports(kind: str, folder: Path) -> bool:
    probe = folder / "probe.cpp"
    probe.write_text("int main() { return 0; }\n")
    build = [COMPILER, f"-fsanitize={kind}", str(probe), "-o", str(folder / "probe")]
    return (
        not subprocess.run(build, capture_output=True).returncode and not subprocess.run([folder / "probe"]).returncode
    )


@pytest.mark.parametrize("kind", ["address", "thread"])
def test_no_sanitizer_complains(kind, tmp_path):
    if shutil.which(COMPILER) is None:
        pytest.skip(f"no compiler: {COMPILER}")
    if not supports(kind, tmp_path):
        pytest.skip(f"{COMPILER} has no {kind} sanitizer that runs here")
    result = subprocess.run([NATIVE / "sanitize.sh", kind], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "every kernel is clean" in result.stdout
