"""The subject here is not the code that XLA makes: it compiles quickly, for dynaxla and for jax.jit."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True)
def quickly(quick_xla: None) -> Iterator[None]:
    """See quick_xla. JAX's own setting of this kind is part of the key of what jax.jit has compiled."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
