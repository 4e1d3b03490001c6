"""Tensors whose memory comes later: ordinary tensors on a storage that has a size, but no memory yet.

Views of such a tensor, and what autograd saves of it, share the storage, and have the memory as soon as that has. Until then nothing may
read it: what asks for its address gets an exception, but a kernel that only reads would crash.

Where torch cannot exchange the memory of storages, there is memory from the start, with nothing in it, and results are copied.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from . import private

# Whether a storage can be made without memory, and given another one's.
_SWAPS = private.SWAPS_MEMORY


def make(
    shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device, nbytes: int
) -> tuple[torch.Tensor, StorageWeakRef]:
    """A tensor without memory, and a reference to its storage that does not keep it alive.

    nbytes: of the storage. One of no bytes lacks nothing, and can be resized, as what an op is to write its result to (`out`).
    """
    lacks = _SWAPS and nbytes > 0
    storage = private.storage_without_memory(device, nbytes) if lacks else torch.UntypedStorage(nbytes, device=device)
    tensor = torch.empty(0, dtype=dtype, device=device).set_(storage, 0, shape, stride)
    if lacks:
        private.refuse_address(tensor)  # until the storage gets memory
    return tensor, StorageWeakRef(storage)


def fill(
    reference: StorageWeakRef, result: torch.Tensor, stride: Sequence[int], nbytes: int, taken: dict[int, torch.UntypedStorage | None]
) -> None:
    """Give a storage, if it is alive, the memory of a result.

    stride: with which the storage's tensor reads it; a result with others is copied. nbytes: of the storage.
    taken: the ids of storages whose memory is somebody's already, so that what is in it is copied; with the storage that has it now, if it
    was given away. The result's is added.
    """
    storage = private.storage_of_reference(reference.cdata)
    if storage is None or not nbytes:
        return
    source, given = private.storage_id(result), result.untyped_storage()
    same = all(size <= 1 or one == other for size, one, other in zip(result.shape, result.stride(), stride, strict=True))
    if _SWAPS and same and source not in taken and given.nbytes() == nbytes and not result.storage_offset():
        taken[source] = storage
        private.swap_memory(storage, given)
        return
    holder = taken.get(source)
    if holder is not None:
        result = _on(holder, result.dtype, result.shape, result.stride(), result.storage_offset())
    memory = _memory(storage, nbytes)
    _on(memory, result.dtype, result.shape, stride).copy_(result)
    if memory is not storage:
        private.swap_memory(storage, memory)


def spoil(reference: StorageWeakRef, nbytes: int) -> None:
    """Give a storage, if it is alive, memory in which floats are NaN: its contents could not be computed."""
    storage = private.storage_of_reference(reference.cdata)
    if storage is None or not nbytes:
        return
    memory = _memory(storage, nbytes)
    _on(memory, torch.uint8, (nbytes,), (1,)).fill_(255)
    if memory is not storage:
        private.swap_memory(storage, memory)


def _memory(storage: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
    """Memory of that size: the storage's own, or such as can be given to it."""
    return torch.UntypedStorage(nbytes, device=storage.device) if _SWAPS else storage


def _on(storage: torch.UntypedStorage, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int], offset: int = 0) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, shape, stride)
