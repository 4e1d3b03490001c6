"""Imports JAX, and then restores the state of NumPy's global random generator: JAX 0.10 draws from it during its import."""

from __future__ import annotations

import sys

import numpy as np

if "jax" not in sys.modules:
    _state = np.random.get_state()
    import jax as jax

    np.random.set_state(_state)
