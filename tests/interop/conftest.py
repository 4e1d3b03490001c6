"""These tests do not check XLA's code, so XLA compiles quickly, for dynaxla and for jax.jit."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True)
def quickly(quick_xla: None) -> Iterator[None]:
    """See quick_xla. jax.jit has JAX's own setting, which is part of the key of its cache."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
