"""Tests of training/unrecordable.py: steps that a recording would get wrong, or whose effects it cannot undo, are refused."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import dynaxla
from dynaxla.errors import CaptureError
from dynaxla.guards.object_graph import ObjectGraph
from dynaxla.guards.object_walker import walk
from dynaxla.guards.snapshot import Snapshot
from dynaxla.training import unrecordable
from dynaxla.training.recorder import Recorder


@contextlib.contextmanager
def decorator() -> Iterator[None]:
    yield


@pytest.mark.parametrize("source", [iter([1, 2]), (number for number in [1]), np.random.default_rng(0), np.random.RandomState(0)], ids=type)
def test_iterators_are_refused(source: Any) -> None:
    with pytest.raises(CaptureError, match="recording the step would advance it"):
        unrecordable.refuse_iterators(walk({"source": source}))


def test_lists_and_arrays_are_accepted() -> None:
    unrecordable.refuse_iterators(walk({"numbers": [1, 2], "array": np.ones(2), "decorator": decorator()}))


def recorded(function: Callable[..., Any], graph: ObjectGraph) -> Recorder:
    recorder = Recorder(graph.tensors, 1, {}, set())
    recorder.run(function, [*graph.tensors.values()], {})
    return recorder


def test_write_to_overlapping_tensors_is_refused() -> None:
    whole = torch.ones(4, 4)
    graph = walk({"whole": whole, "block": whole[1:3, :2]})
    unrecordable.refuse_overlapping(recorded(lambda one, other: one.sum() + other.sum(), graph))
    with pytest.raises(CaptureError, match=r"in which .* overlap"):
        unrecordable.refuse_overlapping(recorded(lambda one, other: one.add_(other.sum()), graph))
    apart = walk({"first": whole[:2], "last": whole[2:]})
    unrecordable.refuse_overlapping(recorded(lambda one, other: one.add_(other.sum()), apart))


@pytest.mark.parametrize("view", [lambda array: array, lambda array: array[1:], lambda array: memoryview(array)[:2]])
def test_array_that_shares_memory_with_a_tensor_is_refused(view: Callable[[Any], Any]) -> None:
    array, other = np.ones(4, np.float32), torch.ones(4)
    graph = walk({"tensor": torch.from_numpy(array), "other": other, "array": view(array), "apart": np.ones(4)})
    snapshot = Snapshot(graph, walk({}, graph), None)
    with pytest.raises(CaptureError, match="can reach array, which shares memory with the tensor tensor"):
        unrecordable.refuse_shared_memory(recorded(lambda one, two: one * two, graph), snapshot)
    unrecordable.refuse_shared_memory(recorded(lambda one, two: two * 2, graph), snapshot)


def compares(x: Any) -> Any:
    return x if type(x) is torch.Tensor else None


def asks_an_instance(x: Any) -> Any:
    return x.__class__ == torch.Tensor


def asks_both_ways(x: Any) -> Any:
    return isinstance(x, torch.Tensor), type(x)


def test_comparing_classes_is_refused() -> None:
    mine, torchs = globals(), vars(sys.modules["torch.nn.functional"])
    for function in (compares, asks_an_instance):
        with pytest.raises(CaptureError, match=r"test_unrecordable\.py:\d+, in (compares|asks_an_instance)"):
            unrecordable.refuse_comparing_classes({function.__code__: [mine]})
        unrecordable.refuse_comparing_classes({function.__code__: [torchs]})
    unrecordable.refuse_comparing_classes({(lambda x: type(x)).__code__: [mine], (lambda x: isinstance(x, torch.Tensor)).__code__: [mine]})
    with pytest.raises(CaptureError):  # it may compare
        unrecordable.refuse_comparing_classes({asks_both_ways.__code__: [mine]})


class Wrapper(torch.optim.Optimizer):
    """An optimizer with the parameter groups of another optimizer, as in SAM and Lookahead."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups, {})
        self.base, self.param_groups = base, base.param_groups

    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["lr"] = 0.5
        self.base.step()


@pytest.mark.parametrize("alias", ["group", "list", "wrapper"])
def test_groups_with_other_references(alias: str) -> None:
    """The step reaches the parameter groups of an optimizer in two ways, and changes them for the optimizer's step."""

    def train(compile_step: Any, count: int) -> list[float]:
        weight = torch.nn.Parameter(torch.ones(2))
        base = torch.optim.SGD([weight], lr=0.1)
        optimizer = Wrapper(base) if alias == "wrapper" else base
        groups = base.param_groups
        group = groups[0]

        def step(x: torch.Tensor) -> None:
            optimizer.zero_grad()
            (weight * x).sum().backward()
            if alias == "group":
                group["lr"] = 0.5
            if alias == "list":
                groups[0]["lr"] = 0.5
            optimizer.step()

        call = compile_step(step)
        for _ in range(count):
            base.param_groups[0]["lr"] = 0.1
            call(torch.tensor([1.0, 2.0]))
        return weight.tolist()

    assert train(dynaxla.compile_step, 6) == train(lambda step: step, 6)
    with pytest.raises(CaptureError, match="in another way"):
        train(lambda step: dynaxla.compile_step(step, fullgraph=True), 1)


def test_tensor_with_a_graph_outside_the_step() -> None:
    """The backward pass inside the step continues outside, in every call."""

    def train(compile_step: Any, count: int) -> list[Any]:
        first, second = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))

        def step(x: torch.Tensor) -> None:
            (x * second).sum().backward()

        call = compile_step(step)
        for _ in range(count):
            call(first * 2)
        return [first.grad, second.grad]

    torch.testing.assert_close(train(dynaxla.compile_step, 6), train(lambda step: step, 6))
    with pytest.raises(CaptureError, match="differentiable ops outside the step"):
        train(lambda step: dynaxla.compile_step(step, fullgraph=True), 1)


@pytest.mark.parametrize("is_bare", [False, True])
def test_exception_that_the_step_catches(is_bare: bool) -> None:
    table = torch.ones(4, 2)

    def catching(index: torch.Tensor) -> torch.Tensor:
        try:
            return table[index]
        except IndexError:
            return torch.zeros(1)

    def catching_all(index: torch.Tensor) -> torch.Tensor:
        try:
            return table[index]
        except:  # noqa: E722
            return torch.zeros(1)

    step = catching_all if is_bare else catching
    compiled = dynaxla.compile_step(step)
    before = dynaxla.metrics.snapshot().get("steps", 0)
    for index in (1, 1, 1, 1, 9, 1):
        assert torch.equal(compiled(torch.tensor([index])), step(torch.tensor([index])))
    assert dynaxla.metrics.snapshot()["steps"] > before


@pytest.mark.parametrize("offset", [5, 8, 10, 13])
def test_inputs_whose_distance_changes(offset: int) -> None:
    """Two inputs share memory. They overlap only in later calls."""

    def run(compile_step: Any) -> torch.Tensor:
        memory = torch.arange(20.0)

        def step(a: torch.Tensor, b: torch.Tensor) -> None:
            a.add_(1)
            b.mul_(2)

        call = compile_step(step)
        for start in (0, 0, 0, 0, offset, 0):
            call(memory[start : start + 5], memory[10:15])
        return memory

    assert torch.equal(run(dynaxla.compile_step), run(lambda step: step))


def test_write_to_an_input_that_overlaps_itself() -> None:
    def run(compile_step: Any) -> torch.Tensor:
        memory = torch.arange(6.0)
        call = compile_step(lambda x: x.add_(1))
        for _ in range(5):
            call(memory.unfold(0, 3, 1))
        return memory

    assert torch.equal(run(dynaxla.compile_step), run(lambda step: step))
