"""Copies of a call's inputs, for trials that must not change the inputs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from ..runtime import private


def by_storage(args: Sequence[Any]) -> dict[int, list[int]]:
    """Returns the positions of the tensors on each storage, by `private.storage_id`."""
    found: dict[int, list[int]] = {}
    for position, item in enumerate(args):
        if isinstance(item, torch.Tensor):
            found.setdefault(private.storage_id(item), []).append(position)
    return found


def sharing(args: Sequence[Any], positions: Collection[int]) -> set[int]:
    """Returns these positions, and those of all tensors on the same storages."""
    return {place for places in by_storage(args).values() if not set(positions).isdisjoint(places) for place in places}


def clones(args: Sequence[Any], wanted: Collection[int] | None = None) -> list[Any]:
    """Returns the inputs with copies in place of the tensors at the positions `wanted` (None: all), and of tensors on the same storages.

    Copies have the strides and offsets of the originals and share memory with each other as the originals do. They are leaves, and require
    gradients if the originals do.
    """
    made = list(args)
    for places in by_storage(args).values():
        if wanted is not None and set(wanted).isdisjoint(places):
            continue
        storage = args[places[0]].untyped_storage().clone()
        for place in places:
            original = args[place]
            with torch.no_grad():
                copy = torch.empty(0, dtype=original.dtype, device=original.device)
                copy.set_(storage, original.storage_offset(), original.shape, original.stride())
            if original.requires_grad:
                copy.requires_grad_()
            made[place] = copy
    return made


def content(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a uint8 view of a tensor's storage."""
    with torch.no_grad():
        return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def in_float64(args: Sequence[Any]) -> list[Any]:
    """Returns copies of the inputs in float64 or complex128, as leaves that share no memory. Integers keep their dtype."""
    wide = {torch.float16: torch.float64, torch.bfloat16: torch.float64, torch.float32: torch.float64, torch.complex64: torch.complex128}

    def widened(item: Any) -> Any:
        if not isinstance(item, torch.Tensor):
            return item
        copy = item.detach().to(wide.get(item.dtype, item.dtype), copy=True)
        return copy.requires_grad_(item.requires_grad)

    return [widened(item) for item in args]
