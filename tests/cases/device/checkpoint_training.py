"""With eight devices: a training goes on from a checkpoint, on another mesh and on one device; and tensors of every kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import dynaxla
from dynaxla.sharding import Mesh, checkpointable, shard_module

from .checkpoints import OTHER, WAYS, folders, from_meshes, loaded, saved
from .on_meshes import MESH, SPECS, Block, spec_of


def check_from_any_mesh_to_any() -> None:
    hosts: dict[str, Callable[[], torch.Tensor]] = {
        "double": lambda: torch.randn(8, 16, 4, dtype=torch.float64),
        "half, transposed": lambda: torch.randn(16, 8, 4).bfloat16().transpose(0, 1),
        "whole numbers": lambda: torch.randint(99, (8, 16, 4)),
        "truths": lambda: torch.randn(8, 16, 4) > 0,
        "complex": lambda: torch.randn(8, 16, 4, dtype=torch.complex64),
    }
    from_meshes(hosts, lambda *_: WAYS)


def trained(mesh: Mesh | None, specs: Any, steps: int) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], float]]:
    """A model, its optimizer, and a step that gives the loss."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(Block(16, 32), Block(16, 32)).to("jax").eval()
    x, y = torch.randn(16, 16).to("jax"), torch.randn(16, 16).to("jax")
    if mesh is not None:
        shard_module(model, mesh, specs)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    @dynaxla.compile_step(fullgraph=True)
    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    def run() -> float:
        return float(step())

    for _ in range(steps):
        run()
    return model, optimizer, run


def check_training_goes_on() -> None:
    """Optimizers' state, from one mesh to another and to one device: the losses go on as if nothing had happened."""
    model, optimizer, step = trained(MESH, SPECS, 2)
    with folders() as folder:
        names, state = get_state_dict(model, optimizer)
        saved({"model": checkpointable(names), "optimizer": checkpointable(state)}, folder)
        expected = [step() for _ in range(3)]
        for mesh, specs in [(OTHER, {"*.up.weight": ("b", "a"), "*.down.weight": (None, "a")}), (None, None)]:
            again, updates, go_on = trained(mesh, specs, 0)
            with torch.no_grad():
                for parameter in again.parameters():
                    parameter.zero_()
            names, state = get_state_dict(again, updates)
            loaded({"model": checkpointable(names), "optimizer": checkpointable(state)}, folder)
            set_state_dict(again, updates, model_state_dict=names, optim_state_dict=state)
            torch.testing.assert_close([go_on() for _ in range(3)], expected, rtol=0, atol=1e-5)
            weight = again.get_parameter("0.up.weight")
            assert spec_of(updates.state[weight]["exp_avg"]) == spec_of(weight) == (None if mesh is None else ("b", "a"))
