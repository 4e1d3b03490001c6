"""Tests of the device "jax": enabling it is for a process's life, so its checks run in processes of their own."""

from __future__ import annotations

from newer import not_in_oldest
from scripts import run_script

# What is on the device, or makes it.
NEEDS_DEVICE = not_in_oldest("storages that can be made without memory")
# A sample of torch's databases of ops and modules; an argument says in which mode. XLA compiles quickly.
SAMPLE = """
import sys, device_cases
from conformance import device_suite
device_cases.compile_quickly()
found = device_suite.failures_of_a_sample(40, 2, 7, sys.argv[1])
assert not found, found
"""


def run_checks(name: str, before: str = "", own: bool = False, **variables: str) -> None:
    """All checks of a module of device_cases. before: what the process does first. own, variables: see `scripts.completed`."""
    run_script(f"{before}\nimport device_cases; device_cases.run({name!r})", own=own, **variables)
