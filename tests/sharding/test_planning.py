"""Tests of searches for placements, on a mesh of eight devices."""

from __future__ import annotations

import pytest

from support.processes.device_checks import NEEDS_DEVICE, run_checks

pytestmark = NEEDS_DEVICE
EIGHT = "--xla_force_host_platform_device_count=8"


def test_planning() -> None:
    run_checks("planning", XLA_FLAGS=EIGHT)


@pytest.mark.slow
def test_planning_on_two_axes() -> None:
    """Models with several kinds of layers, on two axes."""
    run_checks("planning_models", XLA_FLAGS=EIGHT)
