"""Tests of autocast on the device, and of other features that training scripts use."""

from __future__ import annotations

from support.processes.device_checks import NEEDS_DEVICE, run_checks

pytestmark = NEEDS_DEVICE


def test_training_scripts() -> None:
    run_checks("trainers")


def test_refused_uses() -> None:
    run_checks("refused")
