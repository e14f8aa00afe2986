"""The bugs that scripts/mutants.py seeds, one at a time, by the part of the library that they break."""

from . import attention, decode, experiments, kept, matrix_states, mixers, models, scans, tokens
from .mutant import WITH_KERNELS, Mutant

ROOMS = {
    module.__name__.rpartition(".")[2]: module.MUTANTS
    for module in (tokens, matrix_states, attention, kept, scans, mixers, models, decode, experiments)
}
MUTANTS = [mutant for mutants in ROOMS.values() for mutant in mutants]

__all__ = ["MUTANTS", "ROOMS", "WITH_KERNELS", "Mutant"]
