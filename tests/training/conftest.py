"""The subject here is which steps are recorded, and what becomes of their results: XLA compiles quickly."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def quickly(quick_xla: None) -> None:
    """See quick_xla."""
