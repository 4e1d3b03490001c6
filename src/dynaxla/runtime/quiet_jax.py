"""Imports JAX and restores the state of NumPy's global random generator, from which JAX 0.10 draws during its import."""

from __future__ import annotations

import sys

import numpy as np

if "jax" not in sys.modules:
    _state = np.random.get_state()
    import jax as jax

    np.random.set_state(_state)
