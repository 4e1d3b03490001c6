"""Autocast, and what else training scripts ask of a device."""

from __future__ import annotations

from support.processes.device_checks import NEEDS_DEVICE, run_checks

pytestmark = NEEDS_DEVICE


def test_training_scripts() -> None:
    run_checks("trainers")


def test_what_is_refused() -> None:
    run_checks("refused")
