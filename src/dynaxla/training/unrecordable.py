"""Checks that refuse to record a step: a program would give wrong results, or the recording would have effects that cannot be undone."""

from __future__ import annotations

import contextlib
import dis
import itertools
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..errors import CaptureError
from ..guards.code_names import codes, names_of
from ..guards.object_graph import ObjectGraph, storage_of
from ..guards.shared_memory import pairs_sharing_memory
from ..guards.snapshot import Snapshot
from ..guards.trusted_code import is_trusted_namespace
from .recorder import Recorder
from .updates import written_nodes

# Classes of iterators and of generators of random numbers. Each read of such an object changes its state, which cannot be restored.
_ITERATORS = (Iterator, np.random.Generator, np.random.RandomState, np.random.BitGenerator)


def refuse_iterators(everything: ObjectGraph) -> None:
    """Raises: CaptureError if the step can reach an iterator or a generator of random numbers, which a recording could advance."""
    for path, kind in everything.incomparable.items():
        owner = everything.objects.get(path.rpartition(".")[0])
        # A decorator made by contextlib holds a generator that never runs: each call creates a new one.
        if isinstance(everything.object_at(path), _ITERATORS) and not isinstance(owner, contextlib.ContextDecorator):
            hint = "pass its next items to the step as arguments"
            raise CaptureError(f"the step can reach {path}, a {kind}, and recording the step would advance it", hint=hint)


def refuse_aliased_groups(optimizers: Mapping[str, torch.optim.Optimizer], aliased_ids: Collection[int]) -> None:
    """Refuses a step that can reach parameter groups in another way than through the attribute `param_groups` of one optimizer.

    During a recording, that attribute has copies of the groups. The step would change the original groups without an effect on the copies.

    Args:
        optimizers: the optimizers that the step can reach, by path.
        aliased_ids: the ids of objects that several places refer to.

    Raises: CaptureError.
    """
    for path, optimizer in optimizers.items():
        if any(id(item) in aliased_ids for item in (optimizer.param_groups, *optimizer.param_groups)):
            hint = "reach the groups through this attribute alone"
            raise CaptureError(f"the step can reach the groups of {path}.param_groups in another way, too", hint=hint)


def catches_exceptions(executed: Mapping[types.CodeType, Sequence[dict[str, Any]]]) -> bool:
    """True if untrusted code has an `except` clause. Programs have none: after an exception of an op, the step must run in eager mode.

    Args:
        executed: each code object with the globals that it ran in.
    """
    untrusted = [code for code, namespaces in executed.items() if not all(map(is_trusted_namespace, namespaces))]
    return any(_has_except_clause(part) for code in untrusted for part in codes(code))


def _has_except_clause(code: types.CodeType) -> bool:
    names = [instruction.opname for instruction in dis.get_instructions(code)]
    return "CHECK_EXC_MATCH" in names or ("PUSH_EXC_INFO", "POP_TOP") in itertools.pairwise(names)  # the latter for a bare except


def refuse_overlapping(recorder: Recorder) -> None:
    """Refuses a step that writes to one of two inputs that overlap in memory.

    AOTAutograd does not detect all such inputs (torch 2.13: a block of rows and columns, together with the whole tensor).

    Raises: CaptureError.
    """
    fakes = {path: node.meta["val"] for path, node in recorder.tensor_placeholders.items()}
    changed = {storage_of(node.meta["val"]) for item in recorder.graph.nodes for node in written_nodes(item) if "val" in node.meta}
    by_storage: dict[int, list[tuple[tuple[int, int], str]]] = {}
    for path, fake in fakes.items():
        if storage_of(fake) in changed:
            by_storage.setdefault(storage_of(fake), []).append((_extent(fake), path))
    for intervals in by_storage.values():
        for ((_, end), path), ((start, _), next_path) in itertools.pairwise(sorted(intervals)):
            if start < end:
                raise CaptureError(
                    f"the step writes to memory in which {path} and {next_path} overlap", hint="give the step a clone of one of them"
                )


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns the start and the end of a tensor in its storage, in bytes."""
    span = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1 if tensor.numel() else 0
    return tensor.storage_offset() * tensor.itemsize, (tensor.storage_offset() + span) * tensor.itemsize


def refuse_shared_memory(recorder: Recorder, snapshot: Snapshot) -> None:
    """Refuses a step that can reach an array, bytearray or memoryview in the memory of a tensor that the step computes with.

    The guards compare the contents of arrays before a program runs. In eager mode, the step could write to the tensor before it reads the
    array.

    Raises: CaptureError.
    """
    buffer_objects = snapshot.surroundings.buffer_objects | snapshot.arguments.buffer_objects
    tensors = {path: recorder.tensor_at(path) for path in recorder.tensor_placeholders if path not in buffer_objects}
    if pairs := pairs_sharing_memory(buffer_objects, tensors):
        path, tensor_path = pairs[0]
        raise CaptureError(
            f"the step can reach {path}, which shares memory with the tensor {tensor_path}", hint="give the step a copy of one of them"
        )


def refuse_comparing_classes(executed: Mapping[types.CodeType, Sequence[dict[str, Any]]]) -> None:
    """Refuses untrusted code that may compare a class with torch.Tensor: `type(x) is torch.Tensor` is False for the tensors of a recording.

    Args:
        executed: each code object with the globals that it ran in.

    Raises:
        CaptureError: code uses `type` or `__class__`, and names Tensor.
    """
    for code, namespaces in executed.items():
        names = names_of(code)
        reads_class = "type" in names.globals or any("__class__" in part.co_names for part in codes(code))
        if reads_class and "Tensor" in names.all and not all(map(is_trusted_namespace, namespaces)):
            where = f"{code.co_filename}:{code.co_firstlineno}, in {code.co_qualname}"
            raise CaptureError("the step compares a class with torch.Tensor", where=where, hint="use isinstance(x, torch.Tensor)")
