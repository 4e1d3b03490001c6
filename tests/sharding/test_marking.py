"""Tensors on a mesh of eight devices, in processes that have them."""

from __future__ import annotations

import pytest
from on_device import NEEDS_DEVICE, run_checks

pytestmark = NEEDS_DEVICE
EIGHT = "--xla_force_host_platform_device_count=8"


def test_on_meshes() -> None:
    """What is sharded in storages, and `sharding_constraint` in programs."""
    run_checks("on_meshes", XLA_FLAGS=EIGHT, own=True)


@pytest.mark.slow
def test_training_on_meshes() -> None:
    """Each mode, layers in Megatron's style and a small GPT. One step that trains is in the other test."""
    run_checks("mesh_training", XLA_FLAGS=EIGHT, own=True)
