"""A small run of scripts/crash_test.py, which kills for real."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "crash_test.py"


def test_real_kills_lose_nothing():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    # Extensions are killed at every stage in tests/extend.
    options = "--kills 3 --damages 20 --steps 25 --extension-kills 0"
    command = [sys.executable, str(SCRIPT), *options.split()]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 of 3 bitwise equal" in done.stdout
    assert "20 of 20 truncations and flipped bits noticed" in done.stdout
