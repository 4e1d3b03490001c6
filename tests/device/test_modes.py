"""Tests of eager, lazy and compiled mode, used together."""

from __future__ import annotations

import pytest

from support.processes.device_checks import NEEDS_DEVICE, run_checks

pytestmark = NEEDS_DEVICE


@pytest.mark.thorough
def test_modes_together() -> None:
    run_checks("together")
