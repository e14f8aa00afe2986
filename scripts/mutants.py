"""Seed bugs one at a time and see that the tests catch every one.

    python scripts/mutants.py [--list] [--only N ...] [--room scans ...] [--jobs 2]

Each mutant replaces one piece of code in a copy of the tree and runs the tests that should notice. The exit code is 1
if one survives, or if a mutant no longer applies: its text must stand in the file exactly once.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from seeded_bugs import MUTANTS, ROOMS, WITH_KERNELS, Mutant

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("latte", "tests", "scripts", "pyproject.toml")


def apply(mutant: Mutant, root: Path) -> None:
    """Seed the bug in the tree at ``root``.

    Raises:
        ValueError: the text to replace does not stand in the file exactly once.
    """
    path = root / mutant.file
    text = path.read_text(encoding="utf-8")
    found = text.count(mutant.old)
    if found != 1:
        raise ValueError(
            f"{mutant.what}: the text stands in {mutant.file} {found} times, expected once: {mutant.old!r}"
        )
    path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")


def build(root: Path) -> bool:
    """Compile the kernels of a tree for this machine alone, quickly; whether that worked."""
    folder = root / "latte/ops/native"
    sources = [str(path) for path in folder.glob("*.cpp") if path.stem != "check"]
    flags = ["-std=c++17", "-O1", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fno-exceptions", "-fPIC"]
    flags += ["-w", "-shared", "-DLATTE_ISA=portable", "-fvisibility=hidden"]
    command = [os.environ.get("CXX", "c++"), *flags, *sources, "-o", str(folder / "_kernels.so")]
    (folder / "_kernels.so").unlink(missing_ok=True)
    return subprocess.run(command, check=False).returncode == 0


def run(tests: tuple[str, ...], mutant: Mutant | None = None) -> tuple[str, str]:
    """Run tests on a copy of the tree: (passed | failed | broken, the line that says why)."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for part in PARTS:
            source = ROOT / part
            if source.is_dir():
                shutil.copytree(source, root / part, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, root / part)
        if mutant is not None:
            apply(mutant, root)
            if mutant.file.endswith((".h", ".cpp")) and not build(root):
                return "broken", "the kernels do not compile"
        environment = {**os.environ, "PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"}
        environment.pop("LATTE_BACKEND", None)
        if tests not in WITH_KERNELS:
            environment["LATTE_BACKEND"] = "torch"
        command = [sys.executable, "-m", "pytest", "-x", "--tb=line", "--hypothesis-profile=unshrunk", *tests]
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    last = failed[0] if failed else (done.stdout.strip().splitlines() or [done.stderr.strip()])[-1]
    return {0: "passed", 1: "failed"}.get(done.returncode, "broken"), last


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="name the mutants and run nothing")
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="only these, by number")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--room", nargs="+", choices=ROOMS, default=[*ROOMS], help="only those of these files")
    arguments = parser.parse_args()
    rooms = [mutant for room in arguments.room for mutant in ROOMS[room]]
    wanted = arguments.only or [n for n, mutant in enumerate(MUTANTS, 1) if mutant in rooms]
    if not all(1 <= n <= len(MUTANTS) for n in wanted):
        parser.error(f"mutants are numbered 1 to {len(MUTANTS)}")
    chosen = [(n, MUTANTS[n - 1]) for n in wanted]
    if arguments.list:
        for n, mutant in chosen:
            print(f"{n:3d}  {mutant.file:30s} {mutant.what}")
        return 0
    bad = 0
    with ThreadPoolExecutor(arguments.jobs) as pool:
        selections = list(dict.fromkeys(mutant.tests for _, mutant in chosen))
        for tests, (outcome, line) in zip(selections, pool.map(run, selections), strict=True):
            if outcome != "passed":
                print(f"without any mutant, {' '.join(tests)}: {outcome}: {line}")
                return 1
        results = pool.map(lambda pair: run(pair[1].tests, pair[1]), chosen)
        for (n, mutant), (outcome, line) in zip(chosen, results, strict=True):
            verdict = {"failed": "caught", "passed": "SURVIVED", "broken": "BROKEN"}[outcome]
            bad += verdict != "caught"
            print(f"{n:3d}  {verdict:8s}  {mutant.file:30s} {mutant.what}\n     {line[:150]}", flush=True)
    print(f"{len(chosen) - bad} of {len(chosen)} caught")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
