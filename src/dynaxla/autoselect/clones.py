"""Copies of a call's inputs, for trials that must not change the inputs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from ..runtime import private


def by_storage(args: Sequence[Any]) -> dict[int, list[int]]:
    """Returns the positions of the tensors on each storage, by the storage's id."""
    positions: dict[int, list[int]] = {}
    for position, item in enumerate(args):
        if isinstance(item, torch.Tensor):
            positions.setdefault(private.storage_id(item), []).append(position)
    return positions


def positions_on_same_storages(args: Sequence[Any], positions: Collection[int]) -> set[int]:
    """Returns the positions of all tensors that share a storage with a tensor at `positions`; `positions` themselves are included."""
    return {position for group in by_storage(args).values() if not set(positions).isdisjoint(group) for position in group}


def clones(args: Sequence[Any], positions: Collection[int] | None = None) -> list[Any]:
    """Returns a call's inputs, with copies in place of some tensors.

    A copy has the stride, the storage offset and `requires_grad` of its input, and is a leaf. Two copies share memory if their inputs do.

    Args:
        args: the inputs.
        positions: the positions of the tensors to copy; None: all. Other tensors on the same storages are copied too.
    """
    inputs = list(args)
    for group in by_storage(args).values():
        if positions is not None and set(positions).isdisjoint(group):
            continue
        storage = args[group[0]].untyped_storage().clone()
        for position in group:
            original = args[position]
            with torch.no_grad():
                copy = torch.empty(0, dtype=original.dtype, device=original.device)
                copy.set_(storage, original.storage_offset(), original.shape, original.stride())
            if original.requires_grad:
                copy.requires_grad_()
            inputs[position] = copy
    return inputs


def storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a uint8 view of a tensor's storage."""
    with torch.no_grad():
        return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def in_float64(args: Sequence[Any]) -> list[Any]:
    """Returns copies of the inputs, as leaves that share no memory. Floating-point dtypes become float64, complex64 becomes complex128."""
    wide = {torch.float16: torch.float64, torch.bfloat16: torch.float64, torch.float32: torch.float64, torch.complex64: torch.complex128}

    def widened(item: Any) -> Any:
        if not isinstance(item, torch.Tensor):
            return item
        copy = item.detach().to(wide.get(item.dtype, item.dtype), copy=True)
        return copy.requires_grad_(item.requires_grad)

    return [widened(item) for item in args]
