"""What a step must not find or do, if it is to be recorded: what would come out wrong, and what cannot be put back."""

from __future__ import annotations

import contextlib
import itertools
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..errors import CaptureError
from .names import codes, names_of
from .recorder import Recorder
from .shared_memory import shared
from .surroundings import Walk, storage_of
from .trust import is_trusted_namespace
from .updates import written

# What gives something else each time that it is asked, and cannot be put back.
_SOURCES = (Iterator, np.random.Generator, np.random.RandomState, np.random.BitGenerator)


def refuse_sources(everything: Walk) -> None:
    """Raises: CaptureError for something that a recording could move on."""
    for path, kind in everything.incomparable.items():
        owner = everything.objects.get(path.rpartition(".")[0])
        # A decorator made by contextlib holds a generator that never runs: each call makes another.
        if isinstance(everything.object_at(path), _SOURCES) and not isinstance(owner, contextlib.ContextDecorator):
            hint = "give it to the step item by item"
            raise CaptureError(f"a step can reach {path}, a {kind}, which each recording would move on", hint=hint)


def refuse_overlapping(recorder: Recorder) -> None:
    """AOTAutograd misses some inputs that lie in the same memory (torch 2.13: a block of rows and columns, beside the whole).

    Raises: CaptureError if the step writes to one of two such tensors.
    """
    fakes = {path: node.meta["val"] for path, node in recorder.leaves.items()}
    changed = {storage_of(node.meta["val"]) for item in recorder.graph.nodes for node in written(item) if "val" in node.meta}
    found: dict[int, list[tuple[tuple[int, int], str]]] = {}
    for path, fake in fakes.items():
        if storage_of(fake) in changed:
            found.setdefault(storage_of(fake), []).append((_extent(fake), path))
    for places in found.values():
        for (before, one), (after, other) in itertools.pairwise(sorted(places)):
            if after[0] < before[1]:
                raise CaptureError(f"a step writes to memory in which {one} and {other} overlap", hint="clone one of them")


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The range of a storage's bytes from a tensor's first element to its last: start, end."""
    span = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1 if tensor.numel() else 0
    return tensor.storage_offset() * tensor.itemsize, (tensor.storage_offset() + span) * tensor.itemsize


def refuse_shared_memory(recorder: Recorder, around: Walk, given: Walk) -> None:
    """A program reads and writes its tensors when the Python around them has run, and compares what Python reads before.

    Raises: CaptureError if the step finds an array, bytearray or memoryview in the memory of a tensor that it computes with.
    """
    holders = around.holders_of_values | given.holders_of_values
    tensors = {path: recorder.tensor_at(path) for path in recorder.leaves if path not in holders}
    if found := shared(holders, tensors):
        path, other = found[0]
        raise CaptureError(f"a step finds {path} in the memory of {other}", hint="give the step a copy of one of them")


def refuse_comparing_classes(executed: Mapping[types.CodeType, Sequence[dict[str, Any]]]) -> None:
    """The tensors of a recording are no plain `torch.Tensor`: `type(x) is torch.Tensor` would be false.

    executed: code, with the globals that it ran in. Raises: CaptureError for code that asks for classes and names that one.
    """
    for code, places in executed.items():
        names = names_of(code)
        asks = "type" in names.read or any("__class__" in part.co_names for part in codes(code))
        if asks and "Tensor" in names.all and not all(map(is_trusted_namespace, places)):
            where = f"{code.co_filename}:{code.co_firstlineno}, in {code.co_qualname}"
            raise CaptureError("a step compares a class with torch.Tensor", where=where, hint="use isinstance(x, torch.Tensor)")
