"""These tests check which changes of Python state are found, so XLA compiles quickly, with few optimizations."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def quickly(quick_xla: None) -> None:
    """See quick_xla."""
