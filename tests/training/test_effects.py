"""Steps with side effects in Python, and steps that read values, compared with the same steps in eager mode.

Each case is built twice. After each call, tensors, optimizers, Python objects and logs must be equal.
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


def compare(mine: Any, theirs: Any, tolerance: float, path: str) -> None:
    if isinstance(theirs, torch.Tensor):
        assert type(mine) is type(theirs), path
        assert mine.stride() == theirs.stride(), path
        torch.testing.assert_close(mine.detach(), theirs.detach(), rtol=tolerance, atol=tolerance, msg=lambda text: f"{path}: {text}")
    elif isinstance(theirs, dict):
        assert list(mine) == list(theirs), path
        for key in theirs:
            compare(mine[key], theirs[key], tolerance, f"{path}[{key!r}]")
    elif isinstance(theirs, (list, tuple)):
        assert len(mine) == len(theirs), path
        for index, (my_item, their_item) in enumerate(zip(mine, theirs, strict=True)):
            compare(my_item, their_item, tolerance, f"{path}[{index}]")
    elif isinstance(theirs, (float, np.floating)):
        assert type(mine) is type(theirs), path
        assert mine == pytest.approx(theirs, rel=tolerance, abs=tolerance, nan_ok=True), path
    elif isinstance(theirs, str):
        assert mine[:5] == theirs[:5], path  # numbers within may differ in their last digits
    elif isinstance(theirs, random.Random):
        assert mine.getstate() == theirs.getstate()
    else:
        assert mine == theirs, path


# bfloat16 is computed in another order.
TOLERANCES = {"in_half": 3e-2, "changes_numbers": 1e-2}


def compare_with_eager(make: Callable[[], tuple[World, Step]], calls: int = 6, tolerance: float = 2e-4, **settings: Any) -> dict[str, int]:
    """Runs a case in eager mode and compiled. Returns the increase of each metric during the compiled step's last call."""
    eager_world, eager = make()
    compiled_world, step = make()
    compiled = dynaxla.compile_step(step, **settings)
    increases: dict[str, int] = {}
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
            increases = {key: value - before.get(key, 0) for key, value in metrics.snapshot().items()}
        theirs, mine = results
        if isinstance(theirs, torch.Tensor):
            assert mine.requires_grad == (theirs.is_leaf and theirs.requires_grad)
        compare(mine, theirs, tolerance, f"call {number}: result")
        compare(compiled_world.log, eager_world.log, tolerance, f"call {number}: log")
        compare(compiled_world.model.state_dict(), eager_world.model.state_dict(), tolerance, f"call {number}: model")
        compare(compiled_world.optimizer.state_dict(), eager_world.optimizer.state_dict(), tolerance, f"call {number}: optimizer")
        for key, item in eager_world.more.items():
            compare(value_of(compiled_world.more[key]), value_of(item), tolerance, f"call {number}: {key}")
        for name, parameter in eager_world.model.named_parameters():
            gradient = compiled_world.model.get_parameter(name).grad
            assert (gradient is None) == (parameter.grad is None), name
            if gradient is not None:
                compare(gradient, parameter.grad, tolerance, f"call {number}: gradient of {name}")
    return increases


@pytest.mark.sample(usual=4)
@pytest.mark.parametrize("name", CASES)
def test_as_in_eager_mode(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    increases = compare_with_eager(CASES[name], tolerance=TOLERANCES.get(name, 2e-4))
    assert increases.get("eager_steps", 0) + increases.get("steps", 0) == 1
    if name == "prints":
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 24
        assert all(one.partition(".")[0] == other.partition(".")[0] for one, other in zip(lines[::4], lines[2::4], strict=True))
