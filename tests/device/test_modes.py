"""Eager, lazy and compiled mode, used together."""

from __future__ import annotations

from newer import not_in_oldest
from scripts import run_script

pytestmark = not_in_oldest("storages that can be made without memory")


def test_together() -> None:
    run_script("import device_cases; device_cases.run('together')")
