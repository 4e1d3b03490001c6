"""The subject here is which changes of Python state are found: XLA compiles quickly."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def quickly(quick_xla: None) -> None:
    """See quick_xla."""
