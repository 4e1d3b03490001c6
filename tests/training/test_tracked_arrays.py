"""Tests of training/tracked_arrays.py: arrays that a step converts to tensors are inputs; arrays that Python reads are compared."""

from __future__ import annotations

import collections
import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dynaxla
from dynaxla.observe import metrics
from support.peak_allocation import allocates_less_than
from support.releases import IS_OLDEST


def _arrays(count: int = 6, shape: tuple[int, ...] = (4, 3)) -> list[np.ndarray[Any, Any]]:
    source = np.random.default_rng(0)
    return [source.standard_normal(shape).astype(np.float32) for _ in range(count)]


def _programs() -> int:
    return int(metrics.snapshot().get("graphs", 0))


def _write_through_tensor(array: Any) -> torch.Tensor:
    torch.from_numpy(array).mul_(2)
    return torch.from_numpy(array) * 3


def _write_after_conversion(array: Any) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    array[0] = 5
    return tensor * 3


def _write_between_reads(array: Any) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    twice, rows = tensor * 2, tensor[1:] + 1
    array[:] = -array
    return twice.sum() + rows.sum() + (tensor[1:] * 3).sum() + tensor.mean()


Pair = collections.namedtuple("Pair", "x y")
CONVERSIONS: dict[str, Callable[[Any], torch.Tensor]] = {
    "from_numpy": lambda x: torch.from_numpy(x) * 2,
    "tensor": lambda x: torch.tensor(x) * 2,
    "tensor of another dtype": lambda x: torch.tensor(x, dtype=torch.float64) * 2,
    "as_tensor": lambda x: torch.as_tensor(x) * 2,
    "as_tensor of another dtype": lambda x: torch.as_tensor(x, dtype=torch.bfloat16) * 2,
    "a leaf": lambda x: torch.autograd.grad((t := torch.tensor(x, requires_grad=True)).sin().sum(), t)[0],
    "several times": lambda x: torch.from_numpy(x) * torch.tensor(x) + torch.from_numpy(x).T.sum(),
    "by its shape": lambda x: torch.from_numpy(x).reshape(x.shape[1], x.shape[0]) * x.ndim * len(x),
}
# Functions that read an array's values without torch.from_numpy or torch.tensor. Each call has its own program, or none.
READS: dict[str, Callable[[Any], Any]] = {
    "asarray": lambda x: torch.asarray(x) * 2,
    "asarray copies": lambda x: torch.asarray(x, copy=True) * 2,
    "Tensor": lambda x: torch.Tensor(x) * 2,
    "FloatTensor": lambda x: torch.FloatTensor(x) * 2,
    "new_tensor": lambda x: torch.ones(2).new_tensor(x) * 2,
    "frombuffer": lambda x: torch.frombuffer(x, dtype=torch.float32) * 2,
    "from_dlpack": lambda x: torch.from_dlpack(x) * 2,
    "a branch": lambda x: torch.from_numpy(x) * (2 if x[0, 0] > 0 else 3),
    "a mean": lambda x: torch.from_numpy(x) - float(x.mean()),
    "numpy's mean": lambda x: torch.from_numpy(x) - float(np.mean(x)),
    "a copy": lambda x: torch.from_numpy(x.copy()) * 2,
    "a slice": lambda x: torch.from_numpy(x[1:]) * 2,
    "a list": lambda x: torch.tensor([x, x]) * 2,
    "arithmetic": lambda x: torch.from_numpy(x + 1) * 2,
    "a tensor plus it": lambda x: torch.ones(4, 3) + x,
    "numpy's asarray": lambda x: torch.from_numpy(np.asarray(x)),
    "numpy's scalar": lambda x: torch.ones(2) * float(np.float32(x[0, 0])),
    "memoryview": lambda x: torch.ones(2) * memoryview(x)[0, 0],
    "bytes": lambda x: torch.ones(2) * bytes(x)[0],
    "its type": lambda x: torch.from_numpy(x) * (2 if type(x).__mro__[1] is object else 3),
    "its class": lambda x: torch.from_numpy(x) * (2 if x.__class__.__base__ is object else 3),
    "iteration": lambda x: torch.stack([torch.tensor(row) for row in x]),
    "truth": lambda x: torch.ones(2) * bool(x[:1, :1]),
    "a deep copy": lambda x: torch.from_numpy(copy.deepcopy(x)),
    "text": lambda x: torch.ones(2) * len(str(x)),
    "tolist": lambda x: torch.tensor(x.tolist()),
    "flat": lambda x: torch.ones(2) * float(x.flat[3]),
    "shared": lambda x: torch.from_numpy(x.view()) * 2,
    "a copy that is written to": lambda x: _write_through_tensor(x.copy()),
    "a copy that Python writes to": lambda x: _write_after_conversion(x.copy()),
    "a read array that is written to": lambda x: _write_through_tensor(x) * float(x[0, 0]),
    "as_tensor of a read array that is written to": lambda x: torch.as_tensor(x).mul_(2) * float(x[0, 0]),
    "written between two reads, then printed": lambda x: (_write_between_reads(x), print(end=""))[0],
    "written through a tensor, then printed": lambda x: (_write_through_tensor(x), print(end=""))[0],
    "transposed": lambda x: torch.from_numpy(x.T) * 2,
}


@pytest.mark.sample(usual=10)
@pytest.mark.filterwarnings("ignore:Creating a tensor from a list of numpy", "ignore:__array_wrap__ must accept:DeprecationWarning")
@pytest.mark.parametrize("name", [*CONVERSIONS, *READS])
def test_each_call_uses_its_arrays_values(name: str) -> None:
    function = (CONVERSIONS | READS)[name]
    step = dynaxla.compile_step(function)
    before = _programs()
    for x in [*_arrays(3), *_arrays(3)[::-1]]:
        mine = x.copy()
        torch.testing.assert_close(step(mine), function(x))
        np.testing.assert_array_equal(mine, x)
    # With torch 2.11, the first call of a gradient runs code of typing_extensions, which might change arrays.
    if name in CONVERSIONS and not (IS_OLDEST and name == "a leaf"):
        assert _programs() - before == 1, "an array is an input: one program serves all calls"


def test_arrays_in_tuples_dicts_and_objects() -> None:
    class Batch:
        def __init__(self, x: Any) -> None:
            self.x = x

    def function(pair: Any, others: Any, batch: Any) -> Any:
        return torch.from_numpy(pair.x) + torch.from_numpy(pair.y) * torch.from_numpy(others["z"][0]) - torch.from_numpy(batch.x)

    step = dynaxla.compile_step(function)
    before = _programs()
    arrays = _arrays(9)
    for start in range(6):
        x, y, z, w = (array.copy() for array in arrays[start : start + 4])
        arguments = Pair(x, y), {"z": [z]}, Batch(w)
        torch.testing.assert_close(step(*arguments), function(*arguments))
        assert arguments[0].x is x
        assert arguments[1]["z"][0] is z
        assert arguments[2].x is w
    assert _programs() - before == 1


def test_captured_array_is_read_in_each_call() -> None:
    buffer = np.zeros((4, 3), np.float32)

    def function(scale: float) -> Any:
        return torch.from_numpy(buffer).sum(0) * scale

    step = dynaxla.compile_step(function)
    before = _programs()
    for x in _arrays():
        buffer[:] = x
        torch.testing.assert_close(step(2.0), function(2.0))
    assert _programs() - before == 1


def test_write_to_an_array_through_a_tensor() -> None:
    def function(x: Any) -> Any:
        tensor = torch.from_numpy(x)
        tensor.mul_(2)
        return tensor.sum()

    step = dynaxla.compile_step(function)
    for x in _arrays():
        mine, theirs = x.copy(), x.copy()
        torch.testing.assert_close(step(mine), function(theirs))
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("kind", ["array", "bytearray", "array.array"])
def test_write_to_an_array_in_python_happens_once_per_call(kind: str) -> None:
    import array

    counter: Any = {"array": np.zeros(2), "bytearray": bytearray(2), "array.array": array.array("d", [0, 0])}[kind]

    def function(x: torch.Tensor) -> torch.Tensor:
        counter[0] += 1
        return x * 2

    step = dynaxla.compile_step(function)
    for call in range(1, 6):
        torch.testing.assert_close(step(torch.ones(2)), torch.full((2,), 2.0))
        assert counter[0] == call


def test_step_that_returns_and_stores_arrays() -> None:
    class Log:
        last: Any = None

    log = Log()

    def function(x: Any) -> Any:
        log.last = x
        return {"x": x, "tensor": torch.from_numpy(x), "twice": torch.from_numpy(x) * 2}

    step = dynaxla.compile_step(function)
    for x in _arrays():
        result = step(x)
        assert result["x"] is x
        assert log.last is x
        assert type(x) is np.ndarray
        torch.testing.assert_close(result["twice"], torch.from_numpy(x) * 2)
        result["tensor"][0, 0] = 7
        assert x[0, 0] == 7


def test_overlapping_and_repeated_arrays() -> None:
    def function(x: Any, y: Any) -> Any:
        torch.from_numpy(x).add_(1)
        return torch.from_numpy(y) * 2

    step = dynaxla.compile_step(function)
    for _ in range(3):
        for make in (
            lambda: (np.ones(6, np.float32), np.ones(6, np.float32)),
            lambda: (x := np.arange(8, dtype=np.float32), x),
            lambda: ((x := np.arange(8, dtype=np.float32))[:6], x[2:]),
        ):
            mine, theirs = make(), make()
            torch.testing.assert_close(step(*mine), function(*theirs))
            for one, other in zip(mine, theirs, strict=True):
                np.testing.assert_array_equal(one, other)


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_unusual_arrays() -> None:
    def function(x: Any) -> Any:
        return torch.tensor(x) * 2

    step = dynaxla.compile_step(function)
    frozen = np.ones(3)
    frozen.setflags(write=False)
    for x in (frozen, np.ones((2, 3)).T, np.ones(()), np.ones((0, 3)), np.ones(4)[::2], np.array([True, False]), np.ones(3, np.complex64)):
        torch.testing.assert_close(step(x), function(x))
    for bad in (np.ones(3)[::-1], np.ones(3, ">f4"), np.array(["a"]), np.array([None])):
        with pytest.raises((TypeError, ValueError)):
            function(bad)
        with pytest.raises((TypeError, ValueError)):
            step(bad)


@pytest.mark.parametrize("mapped", [False, True])
def test_large_captured_arrays_are_read_in_place(mapped: bool, tmp_path: Path) -> None:
    data: Any = np.zeros((6, 1 << 22), np.float32)
    if mapped:
        data = np.memmap(tmp_path / "data", np.float32, "w+", shape=data.shape)

    def function(row: int) -> torch.Tensor:
        data[row, 0] += 1
        return torch.from_numpy(data[row, :4]) * 2

    step = dynaxla.compile_step(function)
    with allocates_less_than(data.nbytes):
        for call in range(6):
            result = step(call)
            assert data[call, 0] == 1, "the step writes once per call"
            torch.testing.assert_close(result, torch.tensor([2.0, 0, 0, 0]))


def test_large_argument_is_an_input() -> None:
    def function(x: Any) -> torch.Tensor:
        return torch.from_numpy(x).sum()

    step = dynaxla.compile_step(function, fullgraph=True)
    before = _programs()
    for call in range(3):
        assert step(np.full((5, 1 << 20), call, np.float32)) == call * 5 * (1 << 20)
    assert _programs() - before == 1


def test_other_threads_may_read_a_steps_arrays() -> None:
    buffer = np.zeros(1 << 23, np.float32)
    stop, errors = threading.Event(), list[BaseException]()

    def read() -> None:
        try:
            while not stop.is_set():
                assert float(buffer[:10].sum()) == 0
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    step = dynaxla.compile_step(lambda: torch.from_numpy(buffer).sum(), fullgraph=True)
    try:
        assert [float(step()) for _ in range(3)] == [0, 0, 0]
    finally:
        stop.set()
        thread.join()
    assert not errors


def _reshape(x: Any) -> None:
    x.shape = (3, 4) if x.shape == (4, 3) else (4, 3)


def _change_dtype(x: Any) -> None:
    x.dtype = np.int32 if x.dtype == np.float32 else np.float32


def _toggle_writeable(x: Any) -> None:
    x.flags.writeable = not x.flags.writeable


def _write_while_writeable(x: Any) -> None:
    x.flags.writeable = True
    x[0] += 1
    x.flags.writeable = False


@pytest.mark.sample(usual=3)
@pytest.mark.parametrize("reads", [False, True], ids=["converted", "read"])
@pytest.mark.parametrize("change", [_reshape, _change_dtype, _toggle_writeable, _write_while_writeable], ids=lambda change: change.__name__)
@pytest.mark.filterwarnings("ignore:Setting the .* on a NumPy array has been deprecated")  # NumPy 2.5
def test_step_that_changes_an_arrays_metadata(change: Callable[[Any], None], reads: bool) -> None:
    results = []
    for compiled in (False, True):
        captured, argument = (np.round(4 * array) for array in _arrays(2))  # sums of whole numbers are exact

        def function(x: Any, captured: Any = captured) -> torch.Tensor:
            factor = float(x.ravel()[1]) + float(captured.ravel()[1]) if reads else 1
            for each in (x, captured):
                change(each)
            return factor * torch.tensor(x).double().sum(0) + torch.tensor(captured).double().sum(0)

        step = dynaxla.compile_step(function) if compiled else function
        sums = [step(argument).tolist() for _ in range(3)]
        results.append((sums, [(x.dtype, x.shape, x.flags.writeable, x.tolist()) for x in (captured, argument)]))
    assert repr(results[0]) == repr(results[1])


@pytest.mark.parametrize("name", ["flat", "real"])
def test_step_that_sets_an_arrays_elements(name: str) -> None:
    results = []
    for compiled in (False, True):
        argument, source = _arrays(2)

        def function(x: Any, source: Any = source) -> torch.Tensor:
            setattr(x, name, source)
            setattr(source, name, 2)
            return torch.from_numpy(x) + torch.from_numpy(source)

        step = dynaxla.compile_step(function) if compiled else function
        sums = []
        for value in (1, 3, 5):
            argument[:], source[:] = 0, value
            sums.append(step(argument).tolist())
        results.append((sums, argument.tolist(), source.tolist()))
    assert results[0] == results[1]


def test_elements_that_share_memory() -> None:
    results = []
    for compiled in (False, True):
        row = np.zeros(3, np.float32)
        rows = np.broadcast_to(row, (2, 3))

        def function(row: Any = row, rows: Any = rows) -> torch.Tensor:
            before = float(rows[1, 0])
            row[0] += 1
            return torch.tensor(rows) * 2 + before

        step = dynaxla.compile_step(function) if compiled else function
        results.append([*(step().tolist() for _ in range(3)), row.tolist()])
    assert results[0] == results[1]
