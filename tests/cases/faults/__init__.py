"""Faults that are planted in dynaxla, one at a time, to check that tests and program generators find them.

ops.py      lowerings, results and their memory, inputs
padding.py  the padding rules, which rounded sizes need
guards.py   the guards on Python state
steps.py    replayed steps
engines.py  the comparison of engines

`make faults` runs the test suite with a sample of the faults. `make random-programs ARGS=--faults` and similar commands run a program
generator with all faults of a module.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

# A fault is planted while its context lasts.
Fault = Callable[[], AbstractContextManager[Any]]

# For each module: the folder of tests that is most likely to find its faults.
FOLDERS = {"ops": "lowering", "padding": "passes", "guards": "guards", "steps": "training", "engines": "autoselect"}
COUNT, SEED = 60, 47


class FaultList(dict[str, Fault]):
    """Faults by name."""

    def add(self, fault: Fault) -> Fault:
        """Adds a function under its own name. For use as a decorator."""
        self[fault.__name__] = fault
        return fault


def faults_of(module: str) -> FaultList:
    """Returns the faults of a module of this package."""
    loaded = importlib.import_module(f"{__name__}.{module}")
    return FaultList({name: fault for faults in vars(loaded).values() if isinstance(faults, FaultList) for name, fault in faults.items()})


def all_faults() -> dict[str, Fault]:
    """Returns the faults of all modules by name."""
    return {name: fault for module in FOLDERS for name, fault in faults_of(module).items()}


def drawn() -> list[str]:
    """Returns the names of COUNT faults, drawn with SEED. Each module's share is proportional to its size, and at least two."""
    generator, counts = random.Random(SEED), {module: len(faults_of(module)) for module in FOLDERS}
    shares = {module: max(2, COUNT * count // sum(counts.values())) for module, count in counts.items()}
    shares[max(counts, key=counts.__getitem__)] += COUNT - sum(shares.values())
    return [name for module, share in shares.items() for name in generator.sample(sorted(faults_of(module)), share)]
