"""Lowerings of the collectives of `torch.distributed`.

The compiled program calls torch's own collectives with the user's process groups. The collectives read and write the program's buffers. If
the context has `participants` (the user requested XLA's collectives), and XLA supports the op for these tensors and this group, the program
contains XLA's collective instead (`xla_collectives.py`).

The collectives of a program run in the order of the graph: each collective reads a token that the previous one has written
(`Context.effect_token`). Without tokens XLA could reorder the collectives, and two processes that call collectives in different orders wait
for each other forever. Before a program's first run, its processes compare the collectives that they are about to call
(`runtime/collective_agreement.py`). A collective in a program returns after its result has arrived, so `wait_tensor` does nothing.

Source: torch.distributed._functional_collectives; its ops are the functional forms of the collectives in torch.distributed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jax import Array

from ... import user_frames
from ...runtime import private
from ...runtime.collective_agreement import Collective, call_eagerly
from ...runtime.layout import row_major
from .. import asynchronous, dtypes, xla_collectives
from ..context import Context
from ..fallback import PLATFORMS, call_back
from ..graphs import user_line
from ..registry import lowers

Tensors = Sequence[torch.Tensor]
# A function that starts a collective, and returns its handle, a `torch.distributed.Work`. The arguments are the group, the tensors to
# write, the tensors to read, and the op's other arguments except the group's name.
Start = Callable[..., Any]


def _all_reduce(group: Any, outputs: Tensors, inputs: Tensors, reduce_op: str) -> Any:
    outputs[0].copy_(inputs[0])
    return group.allreduce([outputs[0]], _with_reduce_op(torch.distributed.AllreduceOptions(), reduce_op))


def _all_reduce_coalesced(group: Any, outputs: Tensors, inputs: Tensors, reduce_op: str) -> Any:
    for output, operand in zip(outputs, inputs, strict=True):
        output.copy_(operand)
    return group.allreduce_coalesced(list(outputs), _with_reduce_op(torch.distributed.AllreduceCoalescedOptions(), reduce_op))


def _broadcast(group: Any, outputs: Tensors, inputs: Tensors, source: int) -> Any:
    outputs[0].copy_(inputs[0])
    options = torch.distributed.BroadcastOptions()
    options.rootRank, options.rootTensor = source, 0
    return group.broadcast([outputs[0]], options)


def _all_gather(group: Any, outputs: Tensors, inputs: Tensors, size: int) -> Any:
    return private.all_gather(group, outputs[0], inputs[0])


def _all_gather_coalesced(group: Any, outputs: Tensors, inputs: Tensors, size: int) -> Any:
    return group.allgather_into_tensor_coalesced(list(outputs), list(inputs))


def _reduce_scatter(group: Any, outputs: Tensors, inputs: Tensors, reduce_op: str, size: int) -> Any:
    return private.reduce_scatter(group, outputs[0], inputs[0], _with_reduce_op(torch.distributed.ReduceScatterOptions(), reduce_op))


def _reduce_scatter_coalesced(group: Any, outputs: Tensors, inputs: Tensors, reduce_op: str, size: int) -> Any:
    options = _with_reduce_op(torch.distributed.ReduceScatterOptions(), reduce_op)
    return group.reduce_scatter_tensor_coalesced(list(outputs), list(inputs), options)


def _all_to_all(group: Any, outputs: Tensors, inputs: Tensors, output_split_sizes: Sequence[int], input_split_sizes: Sequence[int]) -> Any:
    return group.alltoall_base(outputs[0], inputs[0], list(output_split_sizes), list(input_split_sizes))


def _run_and_wait(op: Any, group: Any, outputs: Tensors, inputs: Tensors, *other_args: Any) -> Any:
    """Runs an op that allocates its own result and returns no work handle. Waits for the result, and returns a handle of finished work."""
    outputs[0].copy_(torch.ops._c10d_functional.wait_tensor(op(inputs[0], *other_args, group.group_name)))
    return private.completed_work()


def _with_reduce_op(options: Any, reduce_op: str) -> Any:
    options.reduceOp = getattr(torch.distributed.ReduceOp, reduce_op.upper())
    return options


_STARTS: dict[str, Start] = {
    "_c10d_functional::all_gather_into_tensor": _all_gather,
    "_c10d_functional::all_gather_into_tensor_coalesced": _all_gather_coalesced,
    "_c10d_functional::all_reduce": _all_reduce,
    "_c10d_functional::all_reduce_coalesced": _all_reduce_coalesced,
    "_c10d_functional::all_to_all_single": _all_to_all,
    "_c10d_functional::broadcast": _broadcast,
    "_c10d_functional::reduce_scatter_tensor": _reduce_scatter,
    "_c10d_functional::reduce_scatter_tensor_coalesced": _reduce_scatter_coalesced,
}


def _lower_collective(*args: Any, ctx: Context) -> Any:
    """Lowers the current node's collective.

    The program contains XLA's collective if the context has `participants` and XLA supports the collective. Otherwise the program calls
    torch's collective, and waits for the result.
    """
    op: Any = ctx.node.target
    operands, *other_args, group_name = args
    start = _start_function(op)
    arrays: list[Array] = operands if isinstance(operands, list) else [operands]
    if (participants := ctx.participants) is not None:
        caller = f"by XLA among ranks {list(participants.ranks)}"
        record_by_xla = dataclasses.replace(_record_of_node(ctx, other_args, group_name), caller=caller)
        results = xla_collectives.lower(
            ctx, op._opname, arrays, other_args, group_name, lambda: participants.collectives.add(record_by_xla)
        )
        if results is not None:
            return results if isinstance(ctx.output, (tuple, list)) else results[0]
    output_specs = list(ctx.output) if isinstance(ctx.output, (tuple, list)) else [ctx.output]
    views = [(tuple(array.shape), row_major(array.shape)) for array in arrays]
    collectives = ctx.collectives
    index = collectives.add(_record_of_node(ctx, other_args, group_name))

    def write(outputs: Tensors, inputs: Tensors) -> None:
        collectives.run(index, lambda group: start(group, outputs, inputs, *other_args), outputs[0].is_cpu)

    non_tensor_args = (*map(str, other_args), str(group_name))
    outputs = call_back(ctx, write, arrays, output_specs, views=views, non_tensor_args=non_tensor_args, has_effect=True)
    return outputs if isinstance(ctx.output, (tuple, list)) else outputs[0]


def run_eagerly(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Runs a functional collective in eager mode, and waits for its result. For training steps outside a program.

    Before the collective starts, the processes of the group compare the collectives that they are about to call.

    Args:
        op: one of `asynchronous.COLLECTIVES`.
        args: the op's positional arguments.
        kwargs: the op's keyword arguments.

    Returns:
        The op's result, which has arrived, so that `wait_tensor` does nothing.

    Raises:
        CollectiveMismatch: The processes of the group are about to call different collectives.
        CollectiveFailed: The collective failed, or another process did not reach it.
    """
    values = [*args, *(kwargs[argument.name] for argument in op._schema.arguments[len(args) :] if argument.name in kwargs)]
    operands, *other_args, group_name = values
    inputs = list(operands) if isinstance(operands, (list, tuple)) else [operands]
    meta_inputs = [tensor.detach().to("meta") for tensor in inputs]
    meta_outputs = op(meta_inputs if isinstance(operands, (list, tuple)) else meta_inputs[0], *other_args, group_name)
    is_list = isinstance(meta_outputs, (list, tuple))
    outputs = [torch.empty(meta.shape, dtype=meta.dtype, device=inputs[0].device) for meta in (meta_outputs if is_list else [meta_outputs])]
    inputs = [tensor.resolve_conj().resolve_neg().contiguous() for tensor in inputs]
    start = _start_function(op)
    tensors = [dtypes.describe(tensor.dtype, tuple(tensor.shape)) for tensor in inputs]
    record = _record(op, tensors, other_args, str(group_name), user_frames.short_location())
    call_eagerly(record, lambda group: start(group, outputs, inputs, *other_args), outputs[0].is_cpu)
    return outputs if is_list else outputs[0]


def _start_function(op: Any) -> Start:
    return _STARTS.get(op._schema.name) or functools.partial(_run_and_wait, op)


def _record_of_node(ctx: Context, other_args: Sequence[Any], group_name: str) -> Collective:
    """Returns the description of the current node's collective."""
    operands = ctx.input(0)
    tensors = list(map(str, operands if isinstance(operands, (tuple, list)) else [operands]))
    return _record(ctx.node.target, tensors, other_args, group_name, user_line(ctx.node))


def _record(op: Any, tensors: Sequence[str], other_args: Sequence[Any], group_name: str, user_line: str) -> Collective:
    """Returns the description of a collective. The processes of its group compare their descriptions before they start the collective."""
    if op._opname == "all_to_all_single":
        output_split_sizes, input_split_sizes = map(tuple, other_args)
        return Collective(group_name, op._opname, (), tuple(tensors), (input_split_sizes, output_split_sizes), user_line)
    return Collective(group_name, op._opname, tuple(map(str, other_args)), tuple(tensors), (), user_line)


for _name in asynchronous.COLLECTIVES:
    lowers(_name, platforms=PLATFORMS)(_lower_collective)


@lowers("_c10d_functional::wait_tensor", platforms=PLATFORMS)
def wait_tensor(x: Array) -> Array:
    """Returns x. A collective of a program returns only after its result has arrived."""
    return x
