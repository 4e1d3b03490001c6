"""With eight devices: `dynaxla.sharding.plan` on two mesh axes, for models with several kinds of layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import dynaxla
from dynaxla import sharding
from dynaxla.sharding import mark_sharding, plan, shard_module

from .mesh_training import _Gpt
from .on_meshes import MESH, SPECS, spec_of
from .planning import BYTES, bytes_of, holds, training


def check_a_gpt() -> None:
    model = _Gpt().to("jax")
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(32, (8, 9)).to("jax")
    x, y = tokens[:, :-1].clone(), tokens[:, 1:].clone()

    @dynaxla.compile_step(fullgraph=True)
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    roles = {group.role: group for group in sharding.placements.groups_of(model)}
    assert roles["blocks.*.up.weight"].names == ("blocks.0.up.weight", "blocks.1.up.weight")
    assert roles["blocks.*.up.weight"].followers == ("blocks.0.up.bias", "blocks.1.up.bias")
    assert "head.weight" not in roles, "it is the embedding's weight"
    found = plan(step, x, y, mesh=MESH, memory=90_000, costs=BYTES, compilations=16)
    assert found.trial.memory <= 90_000
    assert found.specs
    assert sum(trial.seconds < float("inf") for trial in found.trials) <= 16
    holds(found, model, step, (x, y))


def check_convolutions() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.Flatten(), nn.Linear(16 * 36, 8)
    )
    model.to("jax", memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = torch.randn(16, 3, 8, 8).to("jax"), torch.randint(8, (16,)).to("jax")

    @dynaxla.compile_step(fullgraph=True)
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    found = plan(step, x, y, mesh=MESH, memory=bytes_of(model) * 5, costs=BYTES, compilations=20)
    assert found.trial.memory <= bytes_of(model) * 5
    holds(found, model, step, (x, y))


def check_plan_for_a_sharded_model() -> None:
    """The plan is that for the model on one device, and planning does not change the model's shardings."""
    model, optimizer, step, args = training(2, 8, "AdamW")
    expected = plan(step, *args, mesh=MESH, memory=2 * bytes_of(model), costs=BYTES, compilations=16)
    shard_module(model, MESH, {pattern: spec for pattern, spec in SPECS.items() if "weight" in pattern})
    mark_sharding(args[0], MESH, ("fsdp",))
    for _ in range(2):
        step(*args)
    before: Any = [spec_of(parameter) for parameter in model.parameters()]
    found = plan(step, *args, mesh=MESH, memory=2 * bytes_of(model), costs=BYTES, compilations=16)
    assert [trial.description for trial in found.trials] == [trial.description for trial in expected.trials]
    assert (found.specs, found.inputs) == (expected.specs, expected.inputs)
    assert [spec_of(parameter) for parameter in model.parameters()] == before
    found.apply(model, optimizer)  # also shards the optimizer's state
    holds(found, model, step, args)
