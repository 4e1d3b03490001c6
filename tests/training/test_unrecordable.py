"""Tests of training/unrecordable.py: steps that a recording would get wrong, or whose effects it cannot undo, are refused."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

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
