"""Tests of the device's lazy mode."""

from __future__ import annotations

import pytest

from support.processes.device_checks import NEEDS_DEVICE, SAMPLE, run_checks
from support.processes.scripts import run_script

pytestmark = NEEDS_DEVICE


def test_recordings() -> None:
    run_checks("recordings")


def test_storage_access_executes_recorded_ops() -> None:
    run_checks("storages", before="import dynaxla; dynaxla.device.set_mode('lazy')")


_FORK = """
import os, warnings, torch, dynaxla
dynaxla.device.enable()
with dynaxla.device.lazy():
    x = torch.ones(3, device="jax") + 1
    warnings.simplefilter("ignore")
    if not (child := os.fork()):
        try:
            x.tolist()
        except dynaxla.errors.ForkError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert x.tolist() == [2, 2, 2]
"""


def test_forked_child_refuses_recorded_tensors() -> None:
    run_script(_FORK)


@pytest.mark.slow
def test_ten_models() -> None:
    run_checks("recorded_models")


@pytest.mark.thorough
def test_sample_of_pytorchs_databases() -> None:
    """`make conformance-device ARGS=--device=lazy` runs all cases."""
    run_script(SAMPLE, ["lazy"])
