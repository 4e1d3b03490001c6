"""With eight devices: training continues from a checkpoint on another mesh or one device, and checkpoints keep tensors of every dtype."""

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


def check_tensors_load_onto_every_mesh() -> None:
    hosts: dict[str, Callable[[], torch.Tensor]] = {
        "double": lambda: torch.randn(8, 16, 4, dtype=torch.float64),
        "bfloat16, transposed": lambda: torch.randn(16, 8, 4).bfloat16().transpose(0, 1),
        "integers": lambda: torch.randint(99, (8, 16, 4)),
        "bools": lambda: torch.randn(8, 16, 4) > 0,
        "complex": lambda: torch.randn(8, 16, 4, dtype=torch.complex64),
    }
    from_meshes(hosts, lambda *_: WAYS)


def trained(mesh: Mesh | None, specs: Any, steps: int) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], float]]:
    """Returns a model after some steps of training, its optimizer, and a step that returns the loss."""
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


def check_training_continues_from_a_checkpoint() -> None:
    """The losses are those of uninterrupted training, after model and optimizer move to another mesh or to one device."""
    model, optimizer, step = trained(MESH, SPECS, 2)
    with folders() as folder:
        names, state = get_state_dict(model, optimizer)
        saved({"model": checkpointable(names), "optimizer": checkpointable(state)}, folder)
        expected = [step() for _ in range(3)]
        for mesh, specs in [(OTHER, {"*.up.weight": ("b", "a"), "*.down.weight": (None, "a")}), (None, None)]:
            restored, restored_optimizer, restored_step = trained(mesh, specs, 0)
            with torch.no_grad():
                for parameter in restored.parameters():
                    parameter.zero_()
            names, state = get_state_dict(restored, restored_optimizer)
            loaded({"model": checkpointable(names), "optimizer": checkpointable(state)}, folder)
            set_state_dict(restored, restored_optimizer, model_state_dict=names, optim_state_dict=state)
            torch.testing.assert_close([restored_step() for _ in range(3)], expected, rtol=0, atol=1e-5)
            weight = restored.get_parameter("0.up.weight")
            assert spec_of(restored_optimizer.state[weight]["exp_avg"]) == spec_of(weight) == (None if mesh is None else ("b", "a"))
