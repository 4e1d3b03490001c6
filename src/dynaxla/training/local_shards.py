"""Optimizers' fused steps on DTensors: element by element, so that each process updates the elements that it has.

DTensor's own dispatch takes no list in which some are DTensors and some are not, and compares a learning rate, which is to stay an input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..runtime import private


def local_lists(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]] | None:
    """The arguments of a fused step with local tensors in the places of DTensors.

    None if the parameter, gradient and states of one place in the lists do not lie alike, or if one of them is a sum over processes that
    has yet to be made.
    """
    lists = [value for value in args if isinstance(value, (list, tuple))]
    for same_place in zip(*(value for value in lists if len(value) == len(lists[0])), strict=True):
        placed = {_placement(tensor) for tensor in same_place if not _is_count(tensor)}
        if len(placed) != 1 or any(placement is not None and not _is_elementwise(placement) for placement in placed):
            return None
    found = [[_local(item) for item in value] if isinstance(value, (list, tuple)) else value for value in args]
    return found, kwargs


def _placement(tensor: torch.Tensor) -> Any:
    return (tensor.device_mesh, tensor.placements) if _is_distributed(tensor) else None


def _is_elementwise(placement: Any) -> bool:
    return not any(item.is_partial() for item in placement[1])


def _is_count(tensor: torch.Tensor) -> bool:
    """Whether it is a number of steps, the same on every process."""
    return not _is_distributed(tensor) and not tensor.dim()


def _is_distributed(tensor: Any) -> bool:
    return hasattr(tensor, "placements") and hasattr(tensor, "device_mesh")


def _local(tensor: Any) -> Any:
    return private.local_part(tensor) if _is_distributed(tensor) else tensor
