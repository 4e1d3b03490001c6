"""Values in the code that users get are in test_every_op.py, and in tests marked `optimized` here: XLA compiles the others quickly."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def quickly(quick_xla: None) -> None:
    """See quick_xla."""
