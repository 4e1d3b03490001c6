"""Autocast outside of a step: results are correct, and autocast's cache has no casts from a recording."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import dynaxla


def train(make: Callable[[Any], Any], region: str, cache: bool, reads: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Returns the losses of a training loop, and the model's outputs between the steps.

    Args:
        make: returns the function that runs a step.
        region: "outside" for autocast around the calls of the step, "inside" for autocast in the step, or "both".
        cache: True if autocast caches casts.
        reads: True if the step reads the loss in Python.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def block(enabled: bool) -> Any:
        return torch.autocast("cpu", torch.bfloat16, cache_enabled=cache) if enabled else contextlib.nullcontext()

    def step(x: torch.Tensor) -> torch.Tensor:
        with block(region != "outside"):
            loss = model(x).float().square().mean()
        loss.backward()
        if reads and loss.item() > 100:
            raise ValueError("it diverges")
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run = make(step)
    losses, outputs = [], []
    for _ in range(5):
        x = torch.randn(4, 8)
        with block(region != "inside"):
            losses.append(run(x))
            with torch.no_grad():
                outputs.append(model(x).float())
    assert not any(isinstance(tensor, FakeTensor) for tensor in [*losses, *outputs, *model.parameters()])
    return losses, outputs


@pytest.mark.sample(usual=2)
@pytest.mark.parametrize("reads", [False, True], ids=["recorded", "reads"])
@pytest.mark.parametrize("cache", [False, True], ids=["no cache", "cache"])
@pytest.mark.parametrize("region", ["outside", "inside", "both"])
def test_step_and_model_between_steps(region: str, cache: bool, reads: bool) -> None:
    mine = train(dynaxla.compile_step, region, cache, reads)
    # Without a cache: with one, eager mode's model between two steps reads an outdated cast of a parameter.
    expected = train(lambda step: step, region, False, reads)
    for actual, wanted in zip(mine, expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=2e-2, atol=2e-2)


def test_autocast_in_every_second_call() -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 8)

    @dynaxla.compile_step
    def step(x: torch.Tensor) -> torch.Tensor:
        return model(x)

    x = torch.randn(4, 8)
    for turn in range(6):
        with torch.autocast("cpu", torch.bfloat16, enabled=turn % 2 == 0):
            result = step(x)
            assert result.dtype == (torch.bfloat16 if turn % 2 == 0 else torch.float32)
            torch.testing.assert_close(result, model(x).detach())


def test_autocast_cache_stays_on_or_off() -> None:
    step = dynaxla.compile_step(lambda x: x @ x, fullgraph=True)
    for cache in (False, True):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
            step(torch.randn(4, 4))
            assert torch.is_autocast_cache_enabled() == cache
