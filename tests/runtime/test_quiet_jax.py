"""Importing dynaxla draws none of NumPy's random numbers, whoever imports JAX first."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
def test_numpys_numbers_stay(first: str) -> None:
    subprocess.run([sys.executable, "-c", SCRIPT.format(first=first)], check=True)
