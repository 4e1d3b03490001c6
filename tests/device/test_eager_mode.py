"""Ops on the device."""

from __future__ import annotations

import pytest

from support.processes.device_checks import NEEDS_DEVICE, SAMPLE, run_checks
from support.processes.scripts import run_script

pytestmark = NEEDS_DEVICE


def test_ops() -> None:
    run_checks("ops")


@pytest.mark.thorough
def test_sample_of_the_databases() -> None:
    """`make conformance-device` runs all of them."""
    run_script(SAMPLE, ["eager"])
