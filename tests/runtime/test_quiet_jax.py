"""Tests that importing dynaxla draws no random numbers of NumPy, also if the user has imported JAX."""

from __future__ import annotations

import pytest

from support.processes.scripts import run_script

SCRIPT = """
import sys
import numpy as np
{first}
np.random.seed(3)
expected = np.random.RandomState(3).randint(1 << 30, size=4)
import dynaxla.runtime
assert "jax" in sys.modules
assert (np.random.randint(1 << 30, size=4) == expected).all()
"""


@pytest.mark.parametrize("first", ["", "import jax"], ids=["dynaxla", "the user"])
def test_numpys_random_state_does_not_change(first: str) -> None:
    run_script(SCRIPT.format(first=first), own=True)
