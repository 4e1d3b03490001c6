"""With eight devices: `dynaxla.sharding.plan` finds the placements that theory predicts, within the memory, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import dynaxla
from dynaxla.errors import ArgumentError, CaptureError
from dynaxla.sharding import Costs, Mesh, Plan, plan, report

from .running import array_of

ROW = Mesh((8,), ("all",))
# The latency is so small that bytes decide, as for large models.
BYTES = Costs(1e14, 1e11, 1e-7)


class Layer(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


def training(
    layers: int, batch: int, optimizer: str = "SGD", **settings: Any
) -> tuple[nn.Module, Any, Any, tuple[torch.Tensor, torch.Tensor]]:
    """Returns a model of layers in Megatron's style, its optimizer, a step, and the arguments of the step."""
    model = nn.Sequential(*[Layer(32, 128) for _ in range(layers)]).to("jax")
    optimizer_instance = getattr(torch.optim, optimizer)(model.parameters(), lr=1e-2, **settings)

    @dynaxla.compile_step(fullgraph=True)
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer_instance.step()
        optimizer_instance.zero_grad()
        return loss

    return model, optimizer_instance, step, (torch.randn(batch, 32).to("jax"), torch.randn(batch, 32).to("jax"))


def bytes_of(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def holds(found: Plan, model: nn.Module, step: Callable[..., Any], args: tuple[torch.Tensor, ...]) -> None:
    """Applies a plan. Checks that collectives and memory are as planned, once the optimizer has its state."""
    found.apply(model)
    found.apply_to_inputs(*args)
    for _ in range(2):
        step(*args)
    actual = report(step, *args)
    assert [(item.kind, item.axes, item.count, item.bytes) for item in actual.collectives] == [
        (item.kind, item.axes, item.count, item.bytes) for item in found.collectives
    ]
    (memory,) = actual.memory
    assert (memory.arguments, memory.results) == (found.memory.arguments, found.memory.results)
    assert abs(memory.temporary - found.memory.temporary) <= 0.02 * memory.temporary


def check_tensor_parallelism_if_parameters_do_not_fit() -> None:
    """Few tokens, and parameters too large for one device: Megatron's placement, with 2 L - 1 all-reduces of activations."""
    model, optimizer, step, args = training(3, 8, "SGD", momentum=0.9)
    before = [(id(parameter), parameter._version, array_of(parameter), parameter.grad) for parameter in model.parameters()]
    states = torch.get_rng_state(), torch.jax.get_rng_state()
    found = plan(step, *args, mesh=ROW, memory=bytes_of(model), costs=BYTES)
    after = [(id(parameter), parameter._version, array_of(parameter), parameter.grad) for parameter in model.parameters()]
    assert all(one is other or one == other for old, new in zip(before, after, strict=True) for one, other in zip(old, new, strict=True))
    assert torch.equal(states[0], torch.get_rng_state())
    assert torch.equal(states[1], torch.jax.get_rng_state())
    assert not optimizer.state
    assert optimizer.param_groups[0]["lr"] == 1e-2
    expected = {f"{index}.{name}.weight": ("all", None) if name == "up" else (None, "all") for index in range(3) for name in ("up", "down")}
    assert found.specs == expected
    assert [(item.kind, item.axes, item.count) for item in found.collectives] == [("all-reduce", "all", 5)]
    assert found.trial.memory <= bytes_of(model)
    assert found.trial in found.trials
    assert all(trial.description[:20] in str(found) for trial in found.trials)
    holds(found, model, step, args)


def check_data_parallelism_for_large_batches() -> None:
    model, _, step, args = training(2, 2048)
    found = plan(step, *args, mesh=ROW, costs=BYTES, compilations=12)
    assert (found.specs, found.inputs) == ({}, (("all",), ("all",)))
    assert [(item.kind, item.count) for item in found.collectives] == [("all-reduce", 1)]
    products = 11 * 2 * 2048 * 32 * 128 / 8  # three for each weight, but for the gradient of the model's input
    assert 1 <= found.trial.flops / products < 1.1
    moved = 2 * 7 / 8 * (bytes_of(model) + 4)
    assert abs(found.trial.moved - moved) <= 8
    seconds = found.trial.flops / 1e14 + found.trial.moved / 1e11 + 1e-7
    assert abs(found.trial.seconds - seconds) < 1e-12


def check_sharded_parameters_for_large_batches_and_little_memory() -> None:
    """Activations are larger than parameters, and Adam has state: each device stores an eighth of the parameters."""
    model, optimizer, step, args = training(2, 4096, "AdamW")
    whole = plan(step, *args, mesh=ROW, costs=BYTES, compilations=4)
    assert (whole.specs, whole.inputs) == ({}, (("all",), ("all",)))
    found = plan(step, *args, mesh=ROW, memory=whole.trial.memory - bytes_of(model), costs=BYTES)
    assert found.trial.memory <= whole.trial.memory - bytes_of(model)
    assert found.inputs == (("all",), ("all",))
    assert found.specs
    assert not optimizer.state
    holds(found, model, step, args)


def check_plan_without_a_placement_that_fits() -> None:
    model, _, step, args = training(2, 8)
    with pytest.raises(ArgumentError, match=r"none of \d+ placements on .* fits into 3000 bytes .* the smallest one, reads"):
        plan(step, *args, mesh=ROW, memory=3000)
    with pytest.raises(ArgumentError, match="compilations=0 allows no trial"):
        plan(step, *args, mesh=ROW, compilations=0)
    needs = min(trial.memory for trial in plan(step, *args, mesh=ROW, memory=bytes_of(model)).trials)
    with pytest.raises(ArgumentError, match=r"the smallest one, needs"):
        plan(step, *args, mesh=ROW, memory=needs - 5000, compilations=3)


def check_unsuitable_functions_are_refused() -> None:
    model, _, step, args = training(1, 8)
    other = nn.Linear(32, 32).to("jax")
    with pytest.raises(ArgumentError, match="2 modules with parameters"):
        plan(lambda x: other(model(x)), args[0], mesh=ROW)
    assert plan(lambda x: other(model(x)), args[0], mesh=ROW, model=other, compilations=1).trials
    with pytest.raises(ArgumentError, match='a plan needs the whole model on the device "jax"'):
        plan(lambda x: (x * 2, nn_on_cpu(x.new_zeros(8, 32, device="cpu"))), args[0], mesh=ROW)
    with pytest.raises(ArgumentError, match="part of another tensor"):
        plan(step, args[0][:4], args[1][:4], mesh=ROW)
    seen = []

    def read_value(x: torch.Tensor) -> Any:
        seen.append(x)
        return model(x).sum().item()

    with pytest.raises(CaptureError):
        plan(read_value, args[0], mesh=ROW)
    assert not seen


nn_on_cpu = nn.Linear(32, 32)
