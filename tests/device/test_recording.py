"""Lazy mode."""

from __future__ import annotations

from newer import not_in_oldest
from scripts import run_script

pytestmark = not_in_oldest("storages that can be made without memory")


def test_recordings() -> None:
    run_script("import device_cases; device_cases.run('recordings')")


def test_calls_of_the_databases() -> None:
    """A sample; `python -m conformance.on_the_device 1000 0 lazy` runs all that are most telling."""
    run_script("from conformance import on_the_device; assert not on_the_device.main(8, 3, 'lazy')")
