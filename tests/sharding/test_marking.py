"""Tests of tensors on a mesh of eight devices, in processes with virtual devices."""

from __future__ import annotations

import pytest

from support.processes.device_checks import NEEDS_DEVICE, run_checks
from support.processes.scripts import completed

pytestmark = NEEDS_DEVICE
EIGHT = "--xla_force_host_platform_device_count=8"


def run_without_gathering(name: str) -> None:
    """Runs all checks of a module of tests/cases/device. Fails if XLA gathers a tensor because it cannot convert its sharding directly."""
    process = completed(f"from cases import device; device.run({name!r})", XLA_FLAGS=EIGHT)
    assert process.returncode == 0, process.stderr[-3000:]
    # XLA's partitioner estimates the costs of products on copies with fake parameters, and warns about these copies, too (jaxlib 0.12).
    gathered = [line for line in process.stderr.splitlines() if "rematerialization" in line and "%fake_parameter" not in line]
    assert not gathered, gathered


def test_attention_on_meshes() -> None:
    run_without_gathering("mesh_attention")


def test_virtual_meshes() -> None:
    run_checks("virtual_meshes")


def test_reports() -> None:
    run_checks("reports", XLA_FLAGS=EIGHT)


def test_sharded_storages_and_sharding_constraints() -> None:
    """`mark_sharding` in a graph is the op dynaxla.sharding_constraint."""
    run_checks("on_meshes", XLA_FLAGS=EIGHT)


@pytest.mark.slow
def test_training_on_meshes() -> None:
    """Each mode, layers in Megatron's style and a small GPT. `test_sharded_storages_and_sharding_constraints` has a short training step."""
    run_without_gathering("mesh_training")


@pytest.mark.slow
def test_traffic_on_2_8_and_64_devices() -> None:
    run_checks("mesh_counts", XLA_FLAGS="--xla_force_host_platform_device_count=64", own=True)
