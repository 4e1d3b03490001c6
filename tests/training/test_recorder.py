"""A recording is the ops that a function calls, its inputs are the real tensors that it meets, and nothing is computed or changed."""

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


def recorder(**tensors: torch.Tensor) -> Recorder:
    return Recorder(tensors, 0, {}, set())


def targets(made: Recorder) -> list[Any]:
    return [node.target for node in made.graph.nodes if node.op == "call_function"]


def test_ops_below_autograd() -> None:
    weight, x = torch.nn.Parameter(torch.ones(3)), torch.ones(3)
    made = recorder(weight=weight, x=x, unused=torch.ones(1))

    def step() -> torch.Tensor:
        (weight * x).sum().backward()
        with torch.no_grad():
            weight.sub_(weight.grad)
        return weight.grad

    gradient = made.run(step, (), {})
    assert isinstance(gradient, FakeTensor)
    assert made.original(gradient) is None
    assert set(made.tensor_placeholders) == {"weight", "x"}
    assert {aten.mul.Tensor, aten.sum.default, aten.sub_.Tensor} <= set(targets(made))
    assert made.node(gradient).meta["val"].shape == (3,)
    assert torch.equal(weight, torch.ones(3))


def test_parts_of_a_known_tensor() -> None:
    """`weight.data` lies in the memory of `weight`: it is that input, and no other one."""
    weight = torch.nn.Parameter(torch.ones(4, 3))
    made = recorder(weight=weight)
    made.run(lambda: weight.data[1:].mul_(2), (), {})
    assert list(made.tensor_placeholders) == ["weight"]
    made.graph.lint()


def test_constants_are_new_in_each_step() -> None:
    made = recorder()
    result = made.run(lambda: torch.tensor([1.0, 2.0]).add_(1), (), {})
    assert [tensor.tolist() for tensor in made.constants.values()] == [[1, 2]]
    assert targets(made) == [aten.clone.default, aten.add_.Tensor]
    assert made.node(result).target is aten.clone.default


def test_numbers_are_inputs() -> None:
    x = torch.ones(3)
    made = recorder(x=x)
    lr = made.traced_numbers.at(("group", "lr"), 0.1)
    made.run(lambda: (x * -lr, x + torch.tensor(lr)), (), {})
    formulas = [made.formula_of(node) for node in made.number_placeholders]
    assert formulas == [(operator.neg, Input(("group", "lr"))), Input(("group", "lr"))]
    assert all(map(is_number, made.number_placeholders))
    assert made.formula_of(made.tensor_placeholders["x"]) is None


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
def test_what_no_program_repeats(step: Callable[[], Any], message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        recorder(x=X).run(step, (), {})


def test_a_tensor_that_nothing_leads_to() -> None:
    with pytest.raises(CaptureError, match=r"shape \[3\] that dynaxla cannot find"):
        recorder().run(lambda: X + 1, (), {})


def test_where_it_stopped() -> None:
    with pytest.raises(CaptureError) as raised:
        recorder(x=X).run(lambda: X.tolist(), (), {})
    assert "test_recorder.py" in raised.value.where


@pytest.mark.parametrize("change", [lambda x: torch.mul(X, 2, out=x), lambda x: x.unsqueeze_(0)], ids=["out", "in place"])
def test_shapes_around_the_step_stay(change: Callable[[torch.Tensor], Any]) -> None:
    """A program has no way to give a tensor that others hold another shape."""
    x = torch.empty(0)
    with pytest.raises(CaptureError, match=r"shape of a tensor from \[0\] to"):
        recorder(x=x, X=X).run(lambda: change(x), (), {})
    assert x.shape == (0,)
