"""Tests of ops on the device in eager mode."""

from __future__ import annotations

import pytest

from support.processes.device_checks import NEEDS_DEVICE, SAMPLE, run_checks
from support.processes.scripts import run_script

pytestmark = NEEDS_DEVICE


def test_ops() -> None:
    run_checks("ops")


@pytest.mark.thorough
def test_sample_of_pytorchs_databases() -> None:
    """`make conformance-device` runs all cases."""
    run_script(SAMPLE, ["eager"])
