"""Tests of compiled graphs on the device."""

from __future__ import annotations

from support.processes.device_checks import NEEDS_DEVICE, run_checks

pytestmark = NEEDS_DEVICE


def test_compiled_graphs() -> None:
    run_checks("compiled")
