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
        "torch.tensor([group.row for group in batch], device",
        "torch.tensor([batch[0].row for group in batch], device",
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
        "a text is counted as read again by all behind a branch",
        CONTINUATIONS_PY,
        "alone = end - shared if end - shared < least else 0",
        "alone = end - shared",
        CONTINUATIONS,
    ),
    Mutant(
        "what comes before the answers is read without the cache",
        CONTINUATIONS_PY,
        "cache = self._call(piece, cache, 1).past_key_values",
        "cache = self._call(piece, None, 1).past_key_values",
        CONTINUATIONS,
    ),
    Mutant(
        "a request joins a group whatever the others have to read again",
        CONTINUATIONS_PY,
        "alone = end - shared if end - shared < least else 0",
        "alone = 0",
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
