"""Faults planted in dynaxla, one at a time: which of them does a suite of tests find?

__init__.py   the faults, and a draw of 60 of them
__main__.py   runs the suite once for each: `make faults`, `make faults ARGS="--suite usual"`
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

Fault = Callable[[], AbstractContextManager[Any]]

# The modules whose FAULTS these are, and the folder of tests that is most likely to find them.
FOLDERS = {
    "cases.random_programs.faults": "lowering",
    "cases.random_programs.rounded_faults": "passes",
    "cases.python_state.faults": "guards",
}
COUNT, SEED = 60, 47


def faults_of(source: str) -> dict[str, Fault]:
    """The faults of one of FOLDERS' modules by name. Each is planted while its context lasts."""
    found: dict[str, Fault] = importlib.import_module(source).FAULTS
    return found


def faults() -> dict[str, Fault]:
    """All faults by name."""
    return {name: fault for source in FOLDERS for name, fault in faults_of(source).items()}


def drawn() -> list[str]:
    """The names of COUNT faults, drawn with SEED."""
    return random.Random(SEED).sample(sorted(faults()), COUNT)
