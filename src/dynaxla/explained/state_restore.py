"""Restores the state that a function can reach, after calls of the function."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch._dynamo import pgo
from torch.utils._pytree import tree_leaves

from ..guards.object_walker import walk
from ..runtime.layout import ORDINARY
from ..runtime.private import storage_id


@contextlib.contextmanager
def restored_afterwards(function: Any, args: Any, kwargs: Any) -> Iterator[None]:
    """Restores, after the block, the state that the function and its arguments can reach.

    This state is tensors (parameters, buffers, gradients, optimizer states, caches), containers, attributes, closures, globals that the
    function's code names, NumPy arrays, random generators, and TorchDynamo's memory of dynamic sizes. Inside the block there is a second
    copy of all these tensors.

    A tensor that was written to has a higher version counter, so a backward pass of a graph from before the block may reject the tensor.
    """
    graph = walk({"function": function, "args": args, "kwargs": kwargs})
    tensors = _TensorSnapshot(graph.tensors.values())
    values = [*tree_leaves((args, kwargs)), *(value for holder in graph.containers.values() for value in holder.items.values())]
    generators = [torch.default_generator, *(value for value in values if isinstance(value, torch.Generator))]
    states = [generator.get_state() for generator in generators]
    cuda_states = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    python_state, numpy_state, grad_enabled = random.getstate(), np.random.get_state(), torch.is_grad_enabled()
    sizes = copy.deepcopy(dict(pgo.get_code_state()))
    try:
        yield
    finally:
        torch.set_grad_enabled(grad_enabled)
        graph.restore()
        graph.restore_values(())
        tensors.restore()
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        if cuda_states:
            torch.cuda.set_rng_state_all(cuda_states)
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        code_state = pgo.get_code_state()
        code_state.clear()
        code_state.update(sizes)


@dataclass(frozen=True)
class _TensorMetadata:
    """The metadata of a tensor before the block of `restored_afterwards`.

    Attributes:
        tensor: the tensor.
        storage: the tensor's storage.
        view: the tensor's offset, shape and strides.
        key: the identity of the storage.
        requires_grad: the tensor's flag.
    """

    tensor: torch.Tensor
    storage: torch.UntypedStorage
    view: tuple[Any, ...]
    key: int
    requires_grad: bool


class _TensorSnapshot:
    """A snapshot of tensors: their values and metadata."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._metadata: list[_TensorMetadata] = []
        self._storages: dict[int, tuple[torch.UntypedStorage, torch.Tensor]] = {}
        self._others: list[tuple[torch.Tensor, torch.Tensor]] = []
        with torch.no_grad():
            for tensor in tensors:
                if type(tensor) in ORDINARY and tensor.layout == torch.strided and tensor.device.type in ("cpu", "cuda"):
                    storage = tensor.untyped_storage()
                    view = tensor.storage_offset(), tensor.shape, tensor.stride()
                    key = storage_id(tensor)
                    self._metadata.append(_TensorMetadata(tensor, storage, view, key, tensor.requires_grad))
                    if key not in self._storages:
                        self._storages[key] = storage, _bytes(storage).clone()
                elif tensor.device.type != "meta":
                    self._others.append((tensor, tensor.detach().clone()))

    def restore(self) -> None:
        with torch.no_grad():
            for storage, saved in self._storages.values():
                if storage.nbytes() != saved.numel():
                    storage.resize_(saved.numel())
                if not torch.equal(_bytes(storage), saved):
                    _bytes(storage).copy_(saved)
            for metadata in self._metadata:
                tensor = metadata.tensor
                if (tensor.storage_offset(), tensor.shape, tensor.stride()) != metadata.view or storage_id(tensor) != metadata.key:
                    tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(metadata.storage, *metadata.view)
                if tensor.is_leaf and tensor.requires_grad != metadata.requires_grad:
                    tensor.requires_grad_(metadata.requires_grad)
            for tensor, saved in self._others:
                tensor.copy_(saved)


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
