"""Tests of compiled graphs for a TPU, simulated on the CPU."""

from __future__ import annotations

from support.processes.device_checks import NEEDS_DEVICE, run_checks

pytestmark = NEEDS_DEVICE


def test_programs_for_a_tpu() -> None:
    run_checks("simulated_tpu")
