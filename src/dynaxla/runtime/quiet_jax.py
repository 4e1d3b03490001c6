"""Imports JAX, and leaves NumPy's random numbers as they were: JAX 0.10 draws from the global generator while it is imported."""

from __future__ import annotations

import sys

import numpy as np

if "jax" not in sys.modules:
    _state = np.random.get_state()
    import jax as jax

    np.random.set_state(_state)
