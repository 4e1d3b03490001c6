"""Autocast outside of a step: right values, and no cast of a recording's is left in autocast's cache."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import dynaxla


def trained(make: Callable[[Any], Any], way: str, cache: bool, looks: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Losses, and the model's outputs between the steps. way: where autocast is: outside, inside, or both."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def block(is_here: bool) -> Any:
        return torch.autocast("cpu", torch.bfloat16, cache_enabled=cache) if is_here else contextlib.nullcontext()

    def step(x: torch.Tensor) -> torch.Tensor:
        with block(way != "outside"):
            loss = model(x).float().square().mean()
        loss.backward()
        if looks and loss.item() > 100:
            raise ValueError("it diverges")
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run = make(step)
    losses, outputs = [], []
    for _ in range(5):
        x = torch.randn(4, 8)
        with block(way != "inside"):
            losses.append(run(x))
            with torch.no_grad():
                outputs.append(model(x).float())
    assert not any(isinstance(tensor, FakeTensor) for tensor in [*losses, *outputs, *model.parameters()])
    return losses, outputs


@pytest.mark.sample(usual=2)
@pytest.mark.parametrize("looks", [False, True], ids=["recorded", "looks"])
@pytest.mark.parametrize("cache", [False, True], ids=["no cache", "cache"])
@pytest.mark.parametrize("way", ["outside", "inside", "both"])
def test_a_step_and_its_model_between_steps(way: str, cache: bool, looks: bool) -> None:
    mine = trained(dynaxla.compile_step, way, cache, looks)
    # Without a cache: with one, eager mode's model between two steps reads the cast of a parameter that the optimizer has written to since.
    expected = trained(lambda step: step, way, False, looks)
    for one, other in zip(mine, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


def test_on_and_off_by_turns() -> None:
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


def test_autocasts_cache_is_on_or_off_as_before() -> None:
    step = dynaxla.compile_step(lambda x: x @ x, fullgraph=True)
    for cache in (False, True):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
            step(torch.randn(4, 4))
            assert torch.is_autocast_cache_enabled() == cache
