"""Autocast, and what else training scripts ask of a device."""

from __future__ import annotations

from newer import not_in_oldest
from scripts import run_script

pytestmark = not_in_oldest("storages that can be made without memory")


def test_training_scripts() -> None:
    run_script("import device_cases; device_cases.run('trainers')")


def test_what_is_refused() -> None:
    run_script("import device_cases; device_cases.run('refused')")
