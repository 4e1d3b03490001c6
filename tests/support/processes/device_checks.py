"""Runs the checks of cases/device, each module in its own process: enabling the device "jax" lasts until a process ends."""

from __future__ import annotations

from support.processes.scripts import run_script
from support.releases import not_in_oldest

# What is on the device, or makes it.
NEEDS_DEVICE = not_in_oldest("storages that can be made without memory")
# A sample of torch's databases of ops and modules; an argument says in which mode. XLA compiles quickly.
SAMPLE = """
import sys
from cases import device
from cases.conformance import device_suite
device.compile_quickly()
found = device_suite.failures_of_a_sample(40, 2, 7, sys.argv[1])
assert not found, found
"""


def run_checks(name: str, before: str = "", own: bool = False, **variables: str) -> None:
    """All checks of a module of cases/device. before: what the process does first. own, variables: see `scripts.completed`."""
    run_script(f"{before}\nfrom cases import device; device.run({name!r})", own=own, **variables)
