"""Tests of training/recorder.py: a recording has the ops that a function calls and its input tensors. Nothing is computed or changed."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from dynaxla.errors import CaptureError
from dynaxla.runtime.number_tracer import Input
from dynaxla.training.recorder import Recorder
from dynaxla.training.traced_numbers import is_number

aten = torch.ops.aten


def new_recorder(**tensors: torch.Tensor) -> Recorder:
    return Recorder(tensors, 0, {}, set())


def targets(recorder: Recorder) -> list[Any]:
    return [node.target for node in recorder.graph.nodes if node.op == "call_function"]


def test_ops_below_autograd() -> None:
    weight, x = torch.nn.Parameter(torch.ones(3)), torch.ones(3)
    recorder = new_recorder(weight=weight, x=x, unused=torch.ones(1))

    def step() -> torch.Tensor:
        (weight * x).sum().backward()
        with torch.no_grad():
            weight.sub_(weight.grad)
        return weight.grad

    gradient = recorder.run(step, (), {})
    assert isinstance(gradient, FakeTensor)
    assert recorder.original(gradient) is None
    assert set(recorder.tensor_placeholders) == {"weight", "x"}
    assert {aten.mul.Tensor, aten.sum.default, aten.sub_.Tensor} <= set(targets(recorder))
    assert recorder.node(gradient).meta["val"].shape == (3,)
    assert torch.equal(weight, torch.ones(3))


def test_view_of_a_known_tensor() -> None:
    """`weight.data` shares the memory of `weight`, so it is the same input."""
    weight = torch.nn.Parameter(torch.ones(4, 3))
    recorder = new_recorder(weight=weight)
    recorder.run(lambda: weight.data[1:].mul_(2), (), {})
    assert list(recorder.tensor_placeholders) == ["weight"]
    recorder.graph.lint()


def test_constants_are_new_in_each_step() -> None:
    recorder = new_recorder()
    result = recorder.run(lambda: torch.tensor([1.0, 2.0]).add_(1), (), {})
    assert [tensor.tolist() for tensor in recorder.constants.values()] == [[1, 2]]
    assert targets(recorder) == [aten.clone.default, aten.add_.Tensor]
    assert recorder.node(result).target is aten.clone.default


def test_numbers_are_inputs() -> None:
    x = torch.ones(3)
    recorder = new_recorder(x=x)
    lr = recorder.traced_numbers.at(("group", "lr"), 0.1)
    recorder.run(lambda: (x * -lr, x + torch.tensor(lr)), (), {})
    formulas = [recorder.formula_of(node) for node in recorder.number_placeholders]
    assert formulas == [(operator.neg, Input(("group", "lr"))), Input(("group", "lr"))]
    assert all(map(is_number, recorder.number_placeholders))
    assert recorder.formula_of(recorder.tensor_placeholders["x"]) is None


X = torch.ones(3)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda: X.sum().item(), r"value of a tensor in Python \(item\)"),
        (lambda: bool(X.sum() > 0), "__bool__"),
        (lambda: X.nonzero(), "depends on a tensor's values"),
        (lambda: torch.zeros(3) + torch.rand(3, generator=torch.Generator()), "passes a torch.Generator to aten.rand"),
        (lambda: torch.ops._c10d_functional.wait_tensor(X), "in the background"),
        (lambda: X + torch.ones(3).data_ptr(), "value of a tensor in Python .data_ptr"),
    ],
    ids=["item", "bool", "sizes", "generator", "collective", "address"],
)
def test_refused_ops(step: Callable[[], Any], message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        new_recorder(x=X).run(step, (), {})


def test_tensor_without_a_path_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"shape \[3\] that dynaxla cannot find"):
        new_recorder().run(lambda: X + 1, (), {})


def test_error_has_the_source_line() -> None:
    with pytest.raises(CaptureError) as raised:
        new_recorder(x=X).run(lambda: X.tolist(), (), {})
    assert "test_recorder.py" in raised.value.where


@pytest.mark.parametrize("change", [lambda x: torch.mul(X, 2, out=x), lambda x: x.unsqueeze_(0)], ids=["out", "in place"])
def test_resizing_an_outer_tensor_is_refused(change: Callable[[torch.Tensor], Any]) -> None:
    """A program cannot change the shape of a tensor that exists outside the step."""
    x = torch.empty(0)
    with pytest.raises(CaptureError, match=r"shape of a tensor from \[0\] to"):
        new_recorder(x=x, X=X).run(lambda: change(x), (), {})
    assert x.shape == (0,)
