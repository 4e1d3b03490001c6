"""Fixture of these tests: XLA compiles quickly, because the tests check measurements rather than compiled code."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def quick_compilation(quick_xla: None) -> None:
    """See quick_xla."""
