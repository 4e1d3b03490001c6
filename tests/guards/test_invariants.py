"""Tests of guards/invariants.py: changes of tensor objects happen once per call, and a refused recording undoes them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import dynaxla
from dynaxla.errors import CaptureError
from dynaxla.guards.invariants import MetadataSnapshot

pytestmark = pytest.mark.quick


def _data_replaced(model: Any, x: torch.Tensor) -> Any:
    model.weight.data = model.weight.data * 0.5 + x
    return model(x)


def _data_of_a_result_replaced(model: Any, x: torch.Tensor) -> Any:
    y = x + 1
    y.data = torch.cat([y, y * 3])
    return y * 2


def _data_of_an_argument_replaced(model: Any, x: torch.Tensor) -> Any:
    x.data = x.data * 3
    return x * 2


def _gradients_data_replaced(model: Any, x: torch.Tensor) -> Any:
    model(x).sum().backward()
    model.weight.grad.data = model.weight.grad.data + x
    gradient = model.weight.grad.clone()
    model.zero_grad()
    return gradient


def _plain_descent(model: Any, x: torch.Tensor) -> Any:
    """Gradient descent as in many tutorials."""
    loss = model(x).square().sum()
    loss.backward()
    for parameter in model.parameters():
        parameter.data = parameter.data - 0.1 * parameter.grad.data
        parameter.grad = None
    return loss.detach()


def _all_parameters_replaced(model: Any, x: torch.Tensor) -> Any:
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector * 0.5, model.parameters())
    return model(x)


def _swapped(model: Any, x: torch.Tensor) -> Any:
    y, z = x + 1, x * 5
    torch.utils.swap_tensors(y, z)
    return y - z


def _counted(model: Any, x: torch.Tensor) -> Any:
    model.weight.calls = getattr(model.weight, "calls", 0) + 1
    return x * model.weight.calls


def _averaged(model: Any, x: torch.Tensor) -> Any:
    model.weight.average = getattr(model.weight, "average", 0) * 0.5 + model.weight.detach() * x
    return model.weight.average.sum()


def _argument_marked(model: Any, x: torch.Tensor) -> Any:
    x.seen = getattr(x, "seen", 0) + 1
    return x * x.seen


def _frozen_within(model: Any, x: torch.Tensor) -> Any:
    model.weight.requires_grad = not model.weight.requires_grad
    return model(x)


def _rate_halved(model: Any, x: torch.Tensor) -> Any:
    """Halves the learning rate in each call, and returns it."""
    if not hasattr(model, "optimizer"):
        model.optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    for group in model.optimizer.param_groups:
        group["lr"] *= 0.5
        group["twice"] = group["lr"] * 2
    model(x).square().sum().backward()
    model.optimizer.step()
    model.optimizer.zero_grad()
    return model.optimizer.param_groups[0]["lr"], model.optimizer.param_groups[0]["twice"]


def _class_changed(model: Any, x: torch.Tensor) -> Any:
    if not hasattr(model, "parametrizations"):
        nn.utils.parametrizations.weight_norm(model)
    return model(x).detach()


CHANGES: list[Callable[[Any, torch.Tensor], Any]] = [
    _data_replaced, _data_of_a_result_replaced, _data_of_an_argument_replaced, _gradients_data_replaced, _plain_descent,
    _all_parameters_replaced, _swapped, _counted, _averaged, _argument_marked, _frozen_within,
    _rate_halved, _class_changed,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_as_in_eager_mode(change: Callable[[Any, torch.Tensor], Any]) -> None:
    def make() -> tuple[nn.Module, Callable[[torch.Tensor], Any]]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        return model, lambda x: change(model, x)

    (mine, step), (theirs, eager) = make(), make()
    compiled = dynaxla.compile_step(step)
    for offset in (0.0, 1.0, -2.0, 0.0):
        x, other = torch.arange(3.0) + offset, torch.arange(3.0) + offset
        torch.testing.assert_close(compiled(x), eager(other), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close([x, *mine.parameters()], [other, *theirs.parameters()])
        torch.testing.assert_close([p.grad for p in mine.parameters()], [p.grad for p in theirs.parameters()])
        assert [vars(p).keys() for p in mine.parameters()] == [vars(p).keys() for p in theirs.parameters()]


# Reads that a fake tensor would answer from memory or a value that it does not have.
READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "np.from_dlpack": lambda y: np.from_dlpack(y.detach()).copy(),
    "torch.from_dlpack": lambda y: torch.from_dlpack(y.detach()) * 2,
    "untyped_storage": lambda y: y.untyped_storage().tolist(),
    "is_nonzero": lambda y: torch.is_nonzero(y[0]),
    "a method": lambda y: y[0].is_nonzero(),
    "repr": repr,
    "format": "{}".format,
    "copy": lambda y: copy.copy(y) * 2,
    "apply_": lambda y: y.clone().apply_(lambda value: value + 1),
    "map_": lambda y: y.clone().map_(y, lambda one, other: one + other),
    "data_ptr": lambda y: y.data_ptr() != 0,
    "a buffer": lambda y: bytes(memoryview(y.numpy())),
}


@pytest.mark.parametrize("name", READS)
def test_read_of_a_computed_tensor(name: str) -> None:
    def step(x: torch.Tensor) -> Any:
        y = x + 1
        return str(READS[name](y)), y * 3

    compiled = dynaxla.compile_step(step)
    for offset in (0.0, -1.0, 1.0, -1.0):
        (text, result), (expected_text, expected_result) = compiled(torch.arange(3.0) + offset), step(torch.arange(3.0) + offset)
        assert text == expected_text
        torch.testing.assert_close(result, expected_result)


# Functions that raise in eager mode for some values, and their exceptions.
CHECKS: dict[str, tuple[Callable[[torch.Tensor], Any], type[Exception]]] = {
    "cholesky": (lambda x: torch.linalg.cholesky(torch.diag(x)), torch.linalg.LinAlgError),
    "a factor that nothing reads": (lambda x: (torch.linalg.cholesky(torch.diag(x)), x * 2)[1], torch.linalg.LinAlgError),
    "inv": (lambda x: torch.linalg.inv(torch.diag(x)), torch.linalg.LinAlgError),
    "solve": (lambda x: torch.linalg.solve(torch.diag(x), x), torch.linalg.LinAlgError),
    "_assert_async": (lambda x: (torch._assert_async((x > 0).all()), x * 2)[1], RuntimeError),
    "_assert_async with a message": (lambda x: (torch._assert_async((x > 0).all(), "not positive"), x * 2)[1], RuntimeError),
}


@pytest.mark.parametrize("name", CHECKS)
def test_errors_of_eager_mode_are_raised(name: str) -> None:
    step, kind = CHECKS[name]
    compiled = dynaxla.compile_step(lambda x: step(x), fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(compiled(torch.tensor([2.0, 3.0])), step(torch.tensor([2.0, 3.0])))
        with pytest.raises(kind) as expected:
            step(torch.tensor([2.0, 0.0]))
        with pytest.raises(kind) as raised:
            compiled(torch.tensor([2.0, 0.0]))
        assert str(raised.value).split(":")[0] == str(expected.value).split(":")[0]  # the index of the element is missing


def test_op_without_result() -> None:
    """Its effect happens once per call."""
    seen: list[float] = []

    @torch.library.custom_op("test_untouched::log", mutates_args=())
    def log(x: torch.Tensor) -> None:
        seen.append(float(x.sum()))

    log.register_fake(lambda x: None)

    @dynaxla.compile_step
    def step(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        log(y)
        return y + 1

    assert [step(torch.tensor(float(value))).item() for value in range(4)] == [1, 3, 5, 7]
    assert seen == [0, 2, 4, 6]


@pytest.mark.parametrize(
    "ask",
    [
        lambda y: type(y) is torch.Tensor,
        lambda y: type(y) in (torch.Tensor, torch.nn.Parameter),
        lambda y: y.__class__ == torch.Tensor,
        lambda y: {torch.Tensor: True}.get(type(y), False),
    ],
)
def test_comparison_of_classes(ask: Callable[[torch.Tensor], bool]) -> None:
    compiled = dynaxla.compile_step(lambda x: x * 2 if ask(x + 1) else x * 3)
    assert [compiled(torch.tensor(float(value))).item() for value in range(4)] == [0, 2, 4, 6]


@pytest.mark.parametrize("change", [_data_replaced, _averaged, _data_of_an_argument_replaced])
def test_refused_step_changes_nothing(change: Callable[[Any, torch.Tensor], Any]) -> None:
    model, x = nn.Linear(3, 2), torch.arange(3.0)
    before, memory = copy.deepcopy(model), [p.data_ptr() for p in model.parameters()]
    step = dynaxla.compile_step(lambda x: change(model, x), fullgraph=True)
    with pytest.raises(CaptureError, match=r"replaces the memory|sets an attribute"):
        step(x)
    assert [p.data_ptr() for p in model.parameters()] == memory
    torch.testing.assert_close([x, *model.parameters()], [torch.arange(3.0), *before.parameters()])
    assert [(vars(p), p.requires_grad) for p in model.parameters()] == [({}, True)] * 2


def test_differences_are_noticed_and_undone() -> None:
    one, other, third, value = (torch.ones(2) for _ in range(4))
    marked = torch.ones(2)
    marked.known = 1
    module = nn.Linear(2, 2)
    snapshot = MetadataSnapshot({"one": one, "other": other, "third": third, "marked": marked}, {"module": module, "number": 1})
    snapshot.check()
    marked.known = 2  # changes of existing attributes are noticed by a container's guards
    snapshot.check()
    for change, message in (
        (lambda: setattr(one, "data", value), "replaces the memory of one"),
        (lambda: other.mul_(torch.ones(2, requires_grad=True)), "requires gradients to other"),
        (lambda: setattr(third, "tag", 1), "attribute of third"),
        (lambda: setattr(module, "__class__", nn.Bilinear), "class of module"),
    ):
        change()
        with pytest.raises(CaptureError, match=message):
            snapshot.check()
        snapshot.restore()
        snapshot.check()
    other.requires_grad_()
    assert snapshot.requires_grad_changes() == [other]
    snapshot.restore()
    assert not other.requires_grad
    assert one.data_ptr() != value.data_ptr()
    assert not vars(third)
    assert type(module) is nn.Linear
