"""Tensors on a mesh of eight devices, in processes that have them."""

from __future__ import annotations

import pytest

from support.processes.device_checks import NEEDS_DEVICE, run_checks
from support.processes.scripts import completed

pytestmark = NEEDS_DEVICE
EIGHT = "--xla_force_host_platform_device_count=8"


def run_without_gathering(name: str) -> None:
    """All checks of a module of cases/device, in whose programs XLA gathers nothing for want of a way from one sharding to another."""
    done = completed(f"from cases import device; device.run({name!r})", XLA_FLAGS=EIGHT)
    assert done.returncode == 0, done.stderr[-3000:]
    # XLA's partitioner estimates the costs of products on copies of them, with fake parameters, and warns of those too (jaxlib 0.12).
    gathered = [line for line in done.stderr.splitlines() if "rematerialization" in line and "%fake_parameter" not in line]
    assert not gathered, gathered


def test_attention_on_meshes() -> None:
    run_without_gathering("mesh_attention")


def test_virtual_meshes() -> None:
    run_checks("virtual_meshes")


def test_reports() -> None:
    run_checks("reports", XLA_FLAGS=EIGHT)


def test_on_meshes() -> None:
    """What is sharded in storages, and `sharding_constraint` in programs."""
    run_checks("on_meshes", XLA_FLAGS=EIGHT)


@pytest.mark.slow
def test_training_on_meshes() -> None:
    """Each mode, layers in Megatron's style and a small GPT. One step that trains is in the other test."""
    run_without_gathering("mesh_training")


@pytest.mark.slow
def test_what_moves_between_2_and_8_and_64_devices() -> None:
    run_checks("mesh_counts", XLA_FLAGS="--xla_force_host_platform_device_count=64", own=True)
