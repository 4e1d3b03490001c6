"""What a recording refuses: what would come out wrong, and what cannot be put back."""

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
def test_what_each_recording_would_move_on(source: Any) -> None:
    with pytest.raises(CaptureError, match="recording the step would advance it"):
        unrecordable.refuse_iterators(walk({"source": source}))


def test_what_lies_still() -> None:
    unrecordable.refuse_iterators(walk({"numbers": [1, 2], "array": np.ones(2), "decorator": decorator()}))


def recorded(function: Callable[..., Any], around: ObjectGraph) -> Recorder:
    recorder = Recorder(around.tensors, 1, {}, set())
    recorder.run(function, [*around.tensors.values()], {})
    return recorder


def test_writing_where_tensors_overlap() -> None:
    whole = torch.ones(4, 4)
    around = walk({"whole": whole, "block": whole[1:3, :2]})
    unrecordable.refuse_overlapping(recorded(lambda one, other: one.sum() + other.sum(), around))
    with pytest.raises(CaptureError, match=r"in which .* overlap"):
        unrecordable.refuse_overlapping(recorded(lambda one, other: one.add_(other.sum()), around))
    apart = walk({"first": whole[:2], "last": whole[2:]})
    unrecordable.refuse_overlapping(recorded(lambda one, other: one.add_(other.sum()), apart))


@pytest.mark.parametrize("view", [lambda array: array, lambda array: array[1:], lambda array: memoryview(array)[:2]])
def test_an_array_in_a_tensors_memory(view: Callable[[Any], Any]) -> None:
    array, other = np.ones(4, np.float32), torch.ones(4)
    around = walk({"tensor": torch.from_numpy(array), "other": other, "array": view(array), "apart": np.ones(4)})
    found = Snapshot(around, walk({}, around), None)
    with pytest.raises(CaptureError, match="can reach array, which shares memory with the tensor tensor"):
        unrecordable.refuse_shared_memory(recorded(lambda one, two: one * two, around), found)
    unrecordable.refuse_shared_memory(recorded(lambda one, two: two * 2, around), found)


def compares(x: Any) -> Any:
    return x if type(x) is torch.Tensor else None


def asks_an_instance(x: Any) -> Any:
    return x.__class__ == torch.Tensor


def asks_both_ways(x: Any) -> Any:
    return isinstance(x, torch.Tensor), type(x)


def test_comparing_classes() -> None:
    mine, torchs = globals(), vars(sys.modules["torch.nn.functional"])
    for function in (compares, asks_an_instance):
        with pytest.raises(CaptureError, match=r"test_unrecordable\.py:\d+, in (compares|asks_an_instance)"):
            unrecordable.refuse_comparing_classes({function.__code__: [mine]})
        unrecordable.refuse_comparing_classes({function.__code__: [torchs]})
    unrecordable.refuse_comparing_classes({(lambda x: type(x)).__code__: [mine], (lambda x: isinstance(x, torch.Tensor)).__code__: [mine]})
    with pytest.raises(CaptureError):  # it may compare
        unrecordable.refuse_comparing_classes({asks_both_ways.__code__: [mine]})
