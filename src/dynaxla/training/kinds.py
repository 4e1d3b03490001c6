"""What a lazy step does with an op: run it at once, as it computes nothing; draw; leave it to torch; or record it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

import torch

from ..lowering.asynchronous import COLLECTIVES, NAMESPACES, WAIT
from ..torch_ops import aten

# Their results lie in their operand's memory, though their schemas do not say so.
_UNDECLARED_VIEWS = frozenset(
    {
        aten.lift_fresh.default,
        aten._unsafe_view.default,
        aten._reshape_alias.default,
        aten.unsafe_split.Tensor,
        aten.unsafe_split_with_sizes.default,
        aten.unsafe_chunk.default,
    }
)
# What these read of their forward op's results (a workspace) is there only if torch has run that one, too.
NEEDS_OWN_FORWARD = frozenset({aten.mkldnn_rnn_layer_backward.default})
# A tensor's elements are others afterwards than the memory that it had held.
_NEW_MEMORY = frozenset({"resize_", "resize_as_", "set_", "_resize_output_", "set_data"})


class Kind(Enum):
    """NATIVE: a question. VIEW: it makes a view. RANDOM: it draws. OUTSIDE: no program can hold it. RECORD: it computes."""

    NATIVE = 0
    VIEW = 1
    RANDOM = 2
    OUTSIDE = 3
    RECORD = 4


# They write to the running statistics of a batch norm in training, which their schemas do not say.
_WRITE_STATISTICS = {
    aten.native_batch_norm.default, aten.cudnn_batch_norm.default, aten.miopen_batch_norm.default, aten.batch_norm_update_stats.default,
    aten.batch_norm_gather_stats.default, aten.batch_norm_gather_stats_with_counts.default,
}  # fmt: skip

_kinds: dict[Any, Kind] = {}


def kind_of(op: Any) -> Kind:
    """What an op is to a lazy step; worked out once for each op."""
    found = _kinds.get(op)
    if found is None:
        found = _kinds[op] = _classify(op)
    return found


def _classify(op: Any) -> Kind:
    if not isinstance(op, torch._ops.OpOverload):
        return Kind.OUTSIDE
    if op.namespace in ("profiler", "prim") or (op._schema.name.startswith(("aten::sym_", "aten::is_")) and not op._schema.is_mutable):
        return Kind.NATIVE
    schema = op._schema
    name = schema.name.partition("::")[2]
    if schema.name in COLLECTIVES:
        return Kind.RECORD
    if schema.name == "_c10d_functional::_wrap_tensor_autograd":  # it puts a result in a tensor that waits for it
        return Kind.NATIVE
    if op.namespace not in ("aten", "prims") or name in _NEW_MEMORY:
        # Ops of others may do anything with what they are given, or be awaited.
        return Kind.OUTSIDE
    if torch.Tag.data_dependent_output in op.tags or torch.Tag.dynamic_output_shape in op.tags:
        return Kind.OUTSIDE
    if op in _UNDECLARED_VIEWS or torch.Tag.inplace_view in op.tags:
        return Kind.VIEW
    if not schema.is_mutable and schema.returns and all(item.alias_info is not None for item in schema.returns):
        return Kind.VIEW
    if torch.Tag.nondeterministic_seeded in op.tags and not name.startswith("_scaled_dot_product"):
        return Kind.RANDOM
    if not schema.is_mutable and not any("Tensor" in str(item.type) for item in schema.returns):
        return Kind.OUTSIDE
    return Kind.RECORD


def drops(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether attention is to drop some of its weights by chance."""
    for position, argument in enumerate(op._schema.arguments):
        if argument.name == "dropout_p":
            return bool(args[position] if position < len(args) else kwargs.get(argument.name, 0.0))
    return False


def unwraps(kind: type) -> bool:
    """Whether tensors of a class hold others, to which it brings their ops, as DTensor does."""
    return getattr(kind, "__torch_dispatch__", None) is not torch.Tensor.__torch_dispatch__


def is_group(value: Any) -> bool:
    """Whether it is a group of processes."""
    return torch.distributed.is_available() and isinstance(value, torch.distributed.ProcessGroup)


def functional_of(op: Any) -> Any:
    """The view that an op such as `t_` makes of a tensor itself; None if there is none."""
    packet = getattr(torch.ops.aten, op._schema.name.partition("::")[2].removesuffix("_"), None)
    return getattr(packet, op._overloadname or "default", None) if packet is not None else None


def written_by(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors that an op writes to."""
    return [tensor for value in written_arguments(op, args, kwargs).values() for tensor in tensors_in(value)]


def written_arguments(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that an op writes to, by name, whatever stands for tensors in them."""
    arguments = op._schema.arguments
    if op in _WRITE_STATISTICS:
        given = {argument.name: args[position] for position, argument in enumerate(arguments) if position < len(args)} | dict(kwargs)
        return {name: given.get(name) for name in ("running_mean", "running_var")} if given.get("training", True) else {}
    if op.namespace in NAMESPACES and op._schema.name not in (*COLLECTIVES, WAIT):  # collectives do not say what they write to
        return {argument.name: args[position] for position, argument in enumerate(arguments) if position < len(args)} | dict(kwargs)
    if not op._schema.is_mutable:
        return {}
    return {
        argument.name: args[position] if position < len(args) else kwargs.get(argument.name)
        for position, argument in enumerate(arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    }


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested lists, tuples and dicts, in order."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from tensors_in(value)
    elif isinstance(values, dict):
        for value in values.values():
            yield from tensors_in(value)


def with_tensors(values: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """The same arguments, with other things in the places of tensors."""
    if isinstance(values, torch.Tensor):
        return function(values)
    if isinstance(values, (list, tuple)):
        made = [with_tensors(value, function) for value in values]
        return made if isinstance(values, list) else tuple(made)
    if isinstance(values, dict):
        return {key: with_tensors(value, function) for key, value in values.items()}
    return values
