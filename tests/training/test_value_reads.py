"""Tests of training/value_reads.py: all ways to read a tensor's value in Python, also in steps that catch the resulting error."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dynaxla
from dynaxla.errors import CaptureError
from dynaxla.observe import metrics
from dynaxla.training.value_reads import ValueReadDetector

READS: dict[str, Callable[[torch.Tensor], float]] = {
    "item": lambda x: x.max().item(),
    "int": lambda x: int(x.sum()),
    "bool": lambda x: 2.0 if x.sum() > 9 else 5.0,
    "all": lambda x: 2.0 if (x > 9).all() else 5.0,
    "tolist": lambda x: x.tolist()[0],
    "f-string": lambda x: float(f"{x[0]}"),
    "numpy": lambda x: float(x.numpy()[0]),
    "in": lambda x: 2.0 if 8.0 in x else 7.0,
    "index": lambda x: [1.0, 2.0, 3.0, 4.0, 5.0][x[0].long() % 5],
    "range": lambda x: float(sum(1 for _ in range(x[0].long()))),
    "equal": lambda x: 2.0 if torch.equal(x, torch.full((2,), 8.0)) else 7.0,
    "allclose": lambda x: 2.0 if torch.allclose(x, torch.full((2,), 8.0)) else 7.0,
    "nonzero": lambda x: float(torch.nonzero(x > 9).shape[0]),
    "mask": lambda x: float(x[x > 9].numel()),
    "unique": lambda x: float(x.unique().shape[0]),
}


def scale_of(read: Callable[[torch.Tensor], float], x: torch.Tensor) -> float:
    try:
        return read(x)
    except Exception:
        return 1.0


@pytest.mark.quick
@pytest.mark.parametrize("name", READS)
def test_step_that_catches_the_error(name: str) -> None:
    """Fake tensors refuse the read. The step must not continue as if its own code had raised the exception."""
    step = dynaxla.compile_step(lambda x: x * scale_of(READS[name], x))
    for value in (2.0, 4.0, 8.0, 16.0):
        x = torch.full((2,), value)
        torch.testing.assert_close(step(x), x * READS[name](x))


@pytest.mark.parametrize("name", ["item", "bool", "nonzero"])
def test_step_that_catches_the_error_with_fullgraph(name: str) -> None:
    with pytest.raises(CaptureError, match="value"):
        dynaxla.compile_step(lambda x: x * scale_of(READS[name], x), fullgraph=True)(torch.ones(2))


def test_step_that_catches_the_error_of_a_learning_rate() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.5)

    @dynaxla.compile_step
    def step(x: torch.Tensor) -> torch.Tensor:
        factor = 1.0
        with contextlib.suppress(Exception):
            factor = 2.0 if optimizer.param_groups[0]["lr"] > 0.1 else 3.0
        return x * factor

    for rate in (0.5, 0.01, 0.5, 0.01):
        optimizer.param_groups[0]["lr"] = rate
        assert step(torch.ones(1)).item() == (2 if rate == 0.5 else 3)


@pytest.mark.parametrize("name", READS)
def test_read_is_detected_in_eager_mode(name: str) -> None:
    with ValueReadDetector() as reads:
        READS[name](torch.full((2,), 8.0))
    assert "test_value_reads.py" in reads.first


def test_read_of_custom_optimizer_is_detected() -> None:
    class ReadingOptimizer(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            self.param_groups[0]["params"][0].sum().item()
            return super().step(closure)

    with ValueReadDetector() as reads:
        ReadingOptimizer([torch.ones(3)], lr=0.1).step()
    assert "test_value_reads.py" in reads.first


def test_computation_is_not_a_read() -> None:
    """Computation reads no values. torch's optimizers read their step counts, which recordings keep in tensors."""
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer: Any = torch.optim.Adam([parameter])
    with ValueReadDetector() as reads:
        for _ in range(2):
            (parameter * parameter[torch.tensor([0, 1, 2])]).sum().backward()
            optimizer.step()
    assert not reads.first


def test_one_hot_vectors() -> None:
    """torch reads the largest class only for a check, so the step is a program with the same check."""

    def step(classes: torch.Tensor, count: int = 4) -> torch.Tensor:
        return torch.nn.functional.one_hot(classes, count)

    compiled = dynaxla.compile_step(step)
    before = metrics.snapshot().get("eager_steps", 0)
    for number in range(6):
        classes = torch.tensor([[number % 4, 2, 0], [1, 3, 3]]).T
        found, expected = compiled(classes), step(classes)
        assert torch.equal(found, expected)
        assert (found.dtype, found.stride()) == (expected.dtype, expected.stride())
    assert metrics.snapshot()["eager_steps"] - before == 2
    for wrong in (4, -1):
        classes = torch.tensor([[1, 2, wrong], [1, 3, 3]]).T
        with pytest.raises(RuntimeError) as error:
            step(classes)
        with pytest.raises(RuntimeError, match=str(error.value)):
            compiled(classes)
    assert torch.equal(compiled(torch.tensor([0, 2]), -1), step(torch.tensor([0, 2]), -1))
