"""Writes of ops that their schemas do not declare, and tensor classes with their own `__torch_dispatch__`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..lowering.asynchronous import COLLECTIVES, NAMESPACES, WAIT
from ..torch_ops import aten, passed_arguments

# In training, these batch norms write to their running statistics, and their schemas do not declare it.
_WRITE_STATISTICS = {
    aten.native_batch_norm.default, aten.cudnn_batch_norm.default, aten.miopen_batch_norm.default, aten.batch_norm_update_stats.default,
    aten.batch_norm_gather_stats.default, aten.batch_norm_gather_stats_with_counts.default,
}  # fmt: skip


def written_arguments(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments that a call of an op writes to, by name. For an in-place collective, returns all arguments.

    Args:
        op: the overload.
        args: the positional arguments, with tensors, or with nodes of a graph in place of tensors.
        kwargs: the keyword arguments, likewise.
    """
    if op in _WRITE_STATISTICS:
        passed = passed_arguments(op, args, kwargs)
        return {name: passed.get(name) for name in ("running_mean", "running_var")} if passed.get("training", True) else {}
    # The schemas of in-place collectives do not declare their writes.
    if op.namespace in NAMESPACES and op._schema.name not in (*COLLECTIVES, WAIT):
        return passed_arguments(op, args, kwargs)
    if not op._schema.is_mutable:
        return {}
    return {
        argument.name: args[position] if position < len(args) else kwargs.get(argument.name)
        for position, argument in enumerate(op._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    }


def has_own_dispatch(kind: type) -> bool:
    """True if a tensor class defines `__torch_dispatch__`, as DTensor does. Such a class runs its ops as ops on inner tensors."""
    return getattr(kind, "__torch_dispatch__", None) is not torch.Tensor.__torch_dispatch__
