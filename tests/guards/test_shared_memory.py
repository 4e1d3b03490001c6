"""Tests of guards/shared_memory.py: arrays and tensors that share memory are read and written in eager mode's order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import dynaxla
from dynaxla.guards.shared_memory import pairs_sharing_memory
from dynaxla.observe import metrics
from support.peak_allocation import allocates_less_than


def _array_and_tensor(kind: str) -> tuple[Any, torch.Tensor]:
    """Returns an array and a tensor of four ones that share their memory."""
    if kind == "bytearray":
        buffer = bytearray(np.ones(4, np.float32).tobytes())
        return np.frombuffer(buffer, np.float32), torch.frombuffer(buffer, dtype=torch.float32)
    if kind == "numpy's":
        array = np.ones(4, np.float32)
        return array, torch.from_numpy(array)
    tensor = torch.ones(4)
    return tensor.numpy(), tensor


def _write_array_first(array: Any, tensor: torch.Tensor, x: torch.Tensor) -> Any:
    array[0] += 1
    return tensor * x


def _write_array_between_ops(array: Any, tensor: torch.Tensor, x: torch.Tensor) -> Any:
    first = tensor * x
    array[0] += 1
    second = tensor[:2] * x
    array[1] = 7
    return first, second, tensor + x


def _read_array_last(array: Any, tensor: torch.Tensor, x: torch.Tensor) -> Any:
    tensor.add_(x)
    return x * float(array[0]), float(array.sum())


def _train_tensor(array: Any, tensor: torch.Tensor, x: torch.Tensor) -> Any:
    parameter = torch.nn.Parameter(tensor)
    optimizer = torch.optim.SGD([parameter], lr=0.125)
    (parameter * x).sum().backward()
    optimizer.step()
    return float(array.sum())


def _write_view_of_tensor(array: Any, tensor: torch.Tensor, x: torch.Tensor) -> Any:
    tensor.view(2, 2)[1].mul_(x)
    return array.tolist()


USES: list[Callable[..., Any]] = [_write_array_first, _write_array_between_ops, _read_array_last, _train_tensor, _write_view_of_tensor]


@pytest.mark.sample(usual=8)
@pytest.mark.parametrize("reads_value", [False, True], ids=["recorded if possible", "in eager mode"])
@pytest.mark.parametrize("kind", ["numpy's", "torch's", "bytearray"])
@pytest.mark.parametrize("use", USES)
def test_order_is_eager_modes(use: Callable[..., Any], kind: str, reads_value: bool) -> None:
    def make() -> Callable[[torch.Tensor], Any]:
        array, tensor = _array_and_tensor(kind)

        def step(x: torch.Tensor) -> Any:
            if reads_value and float(x) > 100:
                print("large")
            return use(array, tensor, x), tensor.clone()

        return step

    compiled, eager = dynaxla.compile_step(make()), make()
    for value in (2.0, 3.0, 2.0, 5.0):
        actual, expected = compiled(torch.tensor(value)), eager(torch.tensor(value))
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("get", [lambda x: x.detach().numpy(), lambda x: np.from_dlpack(x.detach()), np.asarray])
def test_array_of_a_computed_tensor(get: Callable[[torch.Tensor], Any]) -> None:
    def step(x: torch.Tensor) -> Any:
        y = x + 1
        array = get(y)
        first = y * 2
        array[0] = 50
        y.mul_(2)
        return first, y * 3, array.copy()

    compiled = dynaxla.compile_step(step)
    for _ in range(4):
        torch.testing.assert_close(compiled(torch.arange(3.0)), step(torch.arange(3.0)))


@pytest.mark.parametrize("place", ["stored by the step", "an argument", "stored by the step, in a container"])
def test_array_that_appears_later(place: str) -> None:
    """The first calls have no such array."""

    def make(wrap: Callable[..., Any]) -> Callable[[bool], Any]:
        tensor, stored, counts = torch.ones(3), dict[str, Any](), [0]

        def step(x: torch.Tensor, arrays: Any) -> Any:
            counts[0] += 1
            if counts[0] == 4 and place != "an argument":
                stored["arrays"] = [tensor.numpy()] if "container" in place else (tensor.numpy(),)
            product = tensor * x
            for array in arrays or stored.get("arrays", ()):
                array[0] += 1
            return product.sum().item(), tensor * 1

        wrapped = wrap(step)
        return lambda late: wrapped(torch.tensor(2.0), [tensor.numpy()] if late and place == "an argument" else None)

    compiled, eager = make(dynaxla.compile_step), make(lambda step: step)
    for call in range(8):
        torch.testing.assert_close(compiled(call > 3), eager(call > 3))


def test_large_memory_is_not_copied() -> None:
    """torch reads the memory before Python writes to it, and the guards make no copy to compare."""
    array = np.ones((5 << 20,), np.float32)
    tensor = torch.from_numpy(array)

    def step(x: torch.Tensor) -> Any:
        if float(x) > 100:
            print("large")
        rows = tensor.view(5, -1).sum(1) * x
        array[:] = 3
        return rows + tensor[0]

    compiled = dynaxla.compile_step(step)
    with allocates_less_than(array.nbytes):
        for start in (1, 2, 1, 4):
            array[:] = start
            expected = step(torch.tensor(2.0))
            array[:] = start
            torch.testing.assert_close(compiled(torch.tensor(2.0)), expected)


def test_step_with_separate_array_is_recorded() -> None:
    array, tensor = np.ones(3, np.float32), torch.ones(3)

    @dynaxla.compile_step(fullgraph=True)
    def step(x: torch.Tensor) -> Any:
        return tensor * x * float(array[0])

    before = metrics.snapshot().get("graphs", 0)
    assert [step(torch.tensor(2.0)).tolist() for _ in range(3)] == [[2.0] * 3] * 3
    assert metrics.snapshot()["graphs"] == before + 1


def test_error_names_array_and_tensor() -> None:
    array, tensor = _array_and_tensor("numpy's")

    @dynaxla.compile_step(fullgraph=True)
    def step(x: torch.Tensor) -> Any:
        array[0] = 2
        return tensor * x

    with pytest.raises(dynaxla.errors.CaptureError, match=r"array.*tensor|writes to .*array"):
        step(torch.tensor(2.0))
    assert array[0] == 1


def test_pairs_sharing_memory() -> None:
    array = np.ones((4, 2), np.float32)
    holders = {"rows": array[2:], "bytes": bytearray(8), "strings": np.array(["a"])}
    tensors = {"first": torch.from_numpy(array[:2]), "other": torch.ones(4), "sparse": torch.eye(2).to_sparse(), "none": torch.ones(0)}
    assert pairs_sharing_memory({}, tensors) == []
    assert pairs_sharing_memory(holders, tensors) == []
    assert pairs_sharing_memory(holders | {"all": array[::-1]}, tensors) == [("all", "first")]
