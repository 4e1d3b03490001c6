"""Processes without dynaxla that read a checkpoint into DTensors, and write it again."""

from __future__ import annotations

import pickle
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

SHAPE = 16, 8


def expected() -> dict[str, torch.Tensor]:
    """Returns the tensors of the checkpoint."""
    numbers = torch.arange(128.0).view(SHAPE)
    return {"rows": numbers, "columns": numbers + 0.5, "both": -numbers, "copied": numbers * 3}


def _distributed(state: dict[str, torch.Tensor]) -> dict[str, Any]:
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("a", "b"))
    placements: dict[str, Any] = {
        "rows": (Shard(0), Replicate()),
        "columns": (Replicate(), Shard(1)),
        "both": (Shard(1), Shard(0)),
        "copied": (Replicate(), Replicate()),
    }
    return {name: distribute_tensor(tensor, mesh, placements[name]) for name, tensor in state.items()}


def run(rank: int, world: int, folder: str) -> None:
    """Reads the checkpoint "jax" in a folder, and writes one named by the number of processes. Writes an error to a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting{world}", rank=rank, world_size=world)
    error = ""
    try:
        state = _distributed({name: torch.zeros(SHAPE) for name in expected()})
        dcp.load(state, checkpoint_id=f"{folder}/jax")
        for name, tensor in expected().items():
            found = state[name]
            assert isinstance(found, DTensor)
            torch.testing.assert_close(found.full_tensor(), tensor, rtol=0, atol=0)
        dcp.save(state, checkpoint_id=f"{folder}/{world}")
    except BaseException:
        error = traceback.format_exc()
    Path(f"{folder}/error{world}.{rank}").write_bytes(pickle.dumps(error))
    dist.destroy_process_group()
