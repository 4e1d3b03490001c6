"""Runs the checks of cases/device, each module in its own process, because the device "jax" stays enabled until a process ends."""

from __future__ import annotations

from support.processes.scripts import run_script
from support.releases import not_in_oldest

# Marks tests that use or enable the device.
NEEDS_DEVICE = not_in_oldest("storages that can be made without memory")
# A sample of torch's databases of ops and modules, with quick compilation by XLA. The argument is the mode.
SAMPLE = """
import sys
from cases import device
from cases.conformance import device_suite
device.compile_quickly()
found = device_suite.failures_of_a_sample(40, 2, 7, sys.argv[1])
assert not found, found
"""


def run_checks(name: str, before: str = "", own: bool = False, **variables: str) -> None:
    """Runs all checks of a module of cases/device in another process.

    Args:
        name: the module.
        before: code that runs first.
        own: see `scripts.completed`.
        variables: see `scripts.completed`.
    """
    run_script(f"{before}\nfrom cases import device; device.run({name!r})", own=own, **variables)
