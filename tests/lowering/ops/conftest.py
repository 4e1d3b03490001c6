"""Tests of the lowerings of ops. XLA compiles quickly, except in tests marked `optimized`, which check the code that users get."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def compile_quickly(quick_xla: None) -> None:
    """See quick_xla."""
