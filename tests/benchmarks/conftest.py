"""The subject here is how benchmarks measure: XLA compiles quickly."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def quickly(quick_xla: None) -> None:
    """See quick_xla."""
