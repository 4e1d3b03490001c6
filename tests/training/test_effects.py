"""Steps whose Python has effects, or looks at values, compared with the same steps in eager mode.

Each case is made twice; the two must do the same to tensors, optimizers, Python's objects and whatever they log, call by call.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import dynaxla
from cases.effects import CASES
from cases.effects.world import Step, World
from dynaxla.observe import metrics


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(5, 6, generator=generator), torch.randn(5, 4, generator=generator)) for _ in range(count)]


def value_of(item: Any) -> Any:
    return item.state_dict() if hasattr(item, "state_dict") else item


def compare(mine: Any, theirs: Any, tolerance: float, where: str) -> None:
    if isinstance(theirs, torch.Tensor):
        assert type(mine) is type(theirs), where
        assert mine.stride() == theirs.stride(), where
        torch.testing.assert_close(mine.detach(), theirs.detach(), rtol=tolerance, atol=tolerance, msg=lambda text: f"{where}: {text}")
    elif isinstance(theirs, dict):
        assert list(mine) == list(theirs), where
        for key in theirs:
            compare(mine[key], theirs[key], tolerance, f"{where}[{key!r}]")
    elif isinstance(theirs, (list, tuple)):
        assert len(mine) == len(theirs), where
        for index, (one, other) in enumerate(zip(mine, theirs, strict=True)):
            compare(one, other, tolerance, f"{where}[{index}]")
    elif isinstance(theirs, (float, np.floating)):
        assert type(mine) is type(theirs), where
        assert mine == pytest.approx(theirs, rel=tolerance, abs=tolerance, nan_ok=True), where
    elif isinstance(theirs, str):
        assert mine[:5] == theirs[:5], where  # numbers within may differ in their last digits
    elif isinstance(theirs, random.Random):
        assert mine.getstate() == theirs.getstate()
    else:
        assert mine == theirs, where


# bfloat16 is computed in another order.
TOLERANCES = {"in_half": 3e-2, "changes_numbers": 1e-2}


def agree(make: Callable[[], tuple[World, Step]], calls: int = 6, tolerance: float = 2e-4, **settings: Any) -> dict[str, int]:
    """Run a case both ways. Returns what metrics count during the compiled steps' last call."""
    one, eager = make()
    other, raw = make()
    compiled = dynaxla.compile_step(raw, **settings)
    counted: dict[str, int] = {}
    states = [torch.get_rng_state(), torch.get_rng_state()]
    for number, (x, y) in enumerate(batches(calls)):
        results = []
        for index, run in enumerate((eager, compiled)):
            torch.set_rng_state(states[index])
            before = metrics.snapshot()
            try:
                results.append(run(x.clone(), y.clone()))
            except KeyError as error:
                results.append(str(error))
            states[index] = torch.get_rng_state()
            counted = {key: value - before.get(key, 0) for key, value in metrics.snapshot().items()}
        theirs, mine = results
        if isinstance(theirs, torch.Tensor):
            assert mine.requires_grad == (theirs.is_leaf and theirs.requires_grad)
        compare(mine, theirs, tolerance, f"call {number}: result")
        compare(other.log, one.log, tolerance, f"call {number}: log")
        compare(other.model.state_dict(), one.model.state_dict(), tolerance, f"call {number}: model")
        compare(other.optimizer.state_dict(), one.optimizer.state_dict(), tolerance, f"call {number}: optimizer")
        for key, item in one.more.items():
            compare(value_of(other.more[key]), value_of(item), tolerance, f"call {number}: {key}")
        for name, parameter in one.model.named_parameters():
            gradient = other.model.get_parameter(name).grad
            assert (gradient is None) == (parameter.grad is None), name
            if gradient is not None:
                compare(gradient, parameter.grad, tolerance, f"call {number}: gradient of {name}")
    return counted


@pytest.mark.sample(usual=4)
@pytest.mark.parametrize("name", CASES)
def test_as_in_eager_mode(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    counted = agree(CASES[name], tolerance=TOLERANCES.get(name, 2e-4))
    assert counted.get("eager_steps", 0) + counted.get("steps", 0) == 1
    if name == "prints":
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 24
        assert all(one.partition(".")[0] == other.partition(".")[0] for one, other in zip(lines[::4], lines[2::4], strict=True))
