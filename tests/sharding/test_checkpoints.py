"""Tests of `torch.distributed.checkpoint` on a mesh of eight devices, and of its exchange with DTensors in processes."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch.multiprocessing

from cases.processes import gloo_checkpoints
from support.processes.device_checks import NEEDS_DEVICE, run_checks
from support.processes.scripts import run_script

pytestmark = NEEDS_DEVICE
EIGHT = "--xla_force_host_platform_device_count=8"
# Arguments: "save" or "load"; a folder; names of checkpoints.
ON_THE_MESH = """
import sys
import torch, dynaxla
from cases.processes import gloo_checkpoints
dynaxla.device.enable()
from cases.device.checkpoints import checkpointable, loaded, mark_sharding, saved, MESH, OTHER, spec_of
what, folder, *names = sys.argv[1:]
for mesh, specs in [(MESH, [("fsdp", "tp"), ("tp",), (None, "fsdp"), ()]), (OTHER, [("b",), ("b", "a"), (("a", "b"),), (None, "a")])]:
    expected = gloo_checkpoints.expected()
    state = {
        name: mark_sharding((host if what == "save" else torch.zeros_like(host)).to("jax"), mesh, spec)
        for (name, host), spec in zip(expected.items(), specs)
    }
    if what == "save":
        saved(checkpointable(state), f"{folder}/jax")
        break
    for name in names:
        shardings = [spec_of(tensor) for tensor in state.values()]
        loaded(checkpointable(state), f"{folder}/{name}")
        assert shardings == [spec_of(tensor) for tensor in state.values()]
        for key, tensor in state.items():
            torch.testing.assert_close(tensor.cpu(), expected[key], rtol=0, atol=0)
            tensor.zero_()
"""


def test_checkpoints() -> None:
    run_checks("checkpoints", XLA_FLAGS=EIGHT)


@pytest.mark.slow
def test_training_from_checkpoints() -> None:
    run_checks("checkpoint_training", XLA_FLAGS=EIGHT, own=True)


@pytest.mark.slow
def test_checkpoints_are_shared_with_dtensors_in_processes(tmp_path: Path) -> None:
    """DTensors in two and four processes read the mesh's checkpoint, and two meshes read the checkpoints of the processes."""
    run_script(ON_THE_MESH, ["save", str(tmp_path)], XLA_FLAGS=EIGHT)
    for world in (2, 4):
        torch.multiprocessing.spawn(gloo_checkpoints.run, (world, str(tmp_path)), nprocs=world)
        errors = [pickle.loads((tmp_path / f"error{world}.{rank}").read_bytes()) for rank in range(world)]
        assert not any(errors), "\n".join(errors)
    run_script(ON_THE_MESH, ["load", str(tmp_path), "jax", "2", "4"], XLA_FLAGS=EIGHT)
