"""Continuations that share a context, and processes of a comparison."""

from __future__ import annotations

from .mutant import CONTINUATIONS, PROCESSES, Mutant

CONTINUATIONS_PY = "latte/eval/continuations.py"
PROCESSES_PY = "latte/workflows/processes.py"

MUTANTS = [
    Mutant(
        "a group is not cut at the shortest of its call",
        CONTINUATIONS_PY,
        "end = batch[0].end\n",
        "end = batch[-1].end\n",
        CONTINUATIONS,
    ),
    Mutant(
        "branches go on behind another row",
        CONTINUATIONS_PY,
        "rows = torch.tensor([group.row for group in batch])",
        "rows = torch.tensor([batch[0].row for group in batch])",
        CONTINUATIONS,
    ),
    Mutant(
        "the first token behind a shared context is not scored",
        CONTINUATIONS_PY,
        "first, last = max(request.first, start + 1), min(end, request.read)",
        "first, last = max(request.first, start + 1), min(end - 1, request.read)",
        CONTINUATIONS,
    ),
    Mutant(
        "a request joins a group whatever the others have to read again",
        CONTINUATIONS_PY,
        "if shared - start - (len(members) - 1) * (end - shared) >= least:",
        "if shared - start >= least:",
        CONTINUATIONS,
    ),
    Mutant(
        "a second ctrl-C cuts short what is being saved",
        PROCESSES_PY,
        "            except (KeyboardInterrupt, Stopped):\n                continue\n",
        "            except (KeyboardInterrupt, Stopped):\n                process.kill()\n",
        PROCESSES,
    ),
    Mutant(
        "jobs are not asked to end",
        PROCESSES_PY,
        "        process.terminate()\n",
        "        process.kill()\n",
        PROCESSES,
    ),
]
