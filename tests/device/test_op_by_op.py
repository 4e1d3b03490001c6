"""Ops on the device."""

from __future__ import annotations

from newer import not_in_oldest
from scripts import run_script

pytestmark = not_in_oldest("storages that can be made without memory")


def test_ops() -> None:
    run_script("import device_cases; device_cases.run('ops')")


def test_calls_of_the_databases() -> None:
    """A sample; `python -m conformance.on_the_device 1000` runs all that are most telling."""
    run_script("from conformance import on_the_device; assert not on_the_device.main(8, 3)")


def test_sample_of_the_databases() -> None:
    """`make conformance-device` runs all of them."""
    run_script(
        "from conformance import device_suite; failures = device_suite.failures_of_a_sample(40, 2, 7); assert not failures, failures"
    )
