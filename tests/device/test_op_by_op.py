"""Ops on the device."""

from __future__ import annotations

from newer import not_in_oldest
from scripts import run_script

pytestmark = not_in_oldest("storages that can be made without memory")


def test_ops() -> None:
    run_script("import device_cases; device_cases.run('ops')")


def test_sample_of_the_databases() -> None:
    """`make conformance-device` runs all of them."""
    run_script(
        "from conformance import device_suite; found = device_suite.failures_of_a_sample(40, 2, 7, 'eager'); assert not found, found"
    )
