"""Compiled graphs on the device."""

from __future__ import annotations

from on_device import NEEDS_DEVICE, run_checks

pytestmark = NEEDS_DEVICE


def test_compiled_graphs() -> None:
    run_checks("compiled")
