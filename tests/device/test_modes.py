"""Eager, lazy and compiled mode, used together."""

from __future__ import annotations

from on_device import NEEDS_DEVICE, run_checks

pytestmark = NEEDS_DEVICE


def test_together() -> None:
    run_checks("together")
