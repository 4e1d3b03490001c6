"""Fused optimizer steps on DTensors. A fused step is elementwise, so each process updates its local shards.

DTensor's own dispatch is not used: it accepts no list that mixes DTensors and plain tensors. It also compares the values of learning rates,
which a recording must not do, because learning rates are inputs of the program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..runtime import private


def with_local_tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]] | None:
    """Returns the arguments of a fused step with local tensors in place of DTensors.

    Returns None if a parameter, its gradient and its states have different placements, or if one of them is partial (a sum over processes
    that is still pending).
    """
    lists = [value for value in args if isinstance(value, (list, tuple))]
    for items in zip(*(value for value in lists if len(value) == len(lists[0])), strict=True):
        placements = {_placement(tensor) for tensor in items if not _is_count(tensor)}
        if len(placements) != 1 or any(placement is not None and _is_partial(placement) for placement in placements):
            return None
    local_args = [[_local(item) for item in value] if isinstance(value, (list, tuple)) else value for value in args]
    return local_args, kwargs


def _placement(tensor: torch.Tensor) -> Any:
    """Returns the mesh and the placements of a DTensor; None for a plain tensor."""
    return (tensor.device_mesh, tensor.placements) if _is_distributed(tensor) else None


def _is_partial(placement: Any) -> bool:
    return any(item.is_partial() for item in placement[1])


def _is_count(tensor: torch.Tensor) -> bool:
    """True if a tensor is a step count, which is the same on every process."""
    return not _is_distributed(tensor) and not tensor.dim()


def _is_distributed(tensor: Any) -> bool:
    return hasattr(tensor, "placements") and hasattr(tensor, "device_mesh")


def _local(tensor: Any) -> Any:
    return private.local_tensor(tensor) if _is_distributed(tensor) else tensor
