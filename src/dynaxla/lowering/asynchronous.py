"""Finds asynchronous nodes: ops that work in the background, with handles, or together with other processes.

The general fallback, a program that calls torch's kernel, does not work for such nodes, for three reasons:

- The result of an asynchronous op is not ready when the op returns. The program would copy the result before the data has arrived, and the
  wait op would wait for the copy.
- A handle is not an array.
- XLA may run a program's callbacks in another order in each process. Two processes that call collectives in different orders deadlock.

So asynchronous nodes run between programs. The exceptions are the collectives in `COLLECTIVES` and the waits for them: their lowerings
(ops/collectives.py) fix the order of the calls, and return when the results have arrived.

A node is asynchronous if any of these holds:

- its op, or an op among its arguments (`with_effects`, `auto_functionalized`), is in a namespace for collectives, streams or memory that
  several processes share (`NAMESPACES`);
- the op's schema takes or returns an object of a class (ProcessGroup, Work, any class of `torch.classes`), a future, an awaitable, a
  remote reference, a stream or a storage;
- an argument or a result is neither a tensor nor plain data;
- an asynchronous op with "wait" in its name reads the node's result. This condition also finds collectives that a library defines.
"""

from __future__ import annotations

import functools
import operator
import types
from typing import Any

import torch
from torch.fx import Node

# The namespaces of ops for collectives, streams and memory that several processes share.
NAMESPACES = frozenset(
    ["_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "c10d", "_dtensor", "device_mesh", "fsdp", "streams", "symm_mem"]
)

# The kinds (`kind()`) of the schema types that are handles.
_HANDLE_KINDS = frozenset(
    ["AnyClassType", "AnyType", "AwaitType", "CapsuleType", "ClassType", "FutureType", "InterfaceType", "PyObjectType", "RRefType"]
).union(["StorageType", "StreamObjType"])

# The collectives that return their results, instead of writing to operands. Their lowerings are in ops/collectives.py.
COLLECTIVES = (
    "_c10d_functional::all_gather_into_tensor",
    "_c10d_functional::all_gather_into_tensor_coalesced",
    "_c10d_functional::all_reduce",
    "_c10d_functional::all_reduce_coalesced",
    "_c10d_functional::all_to_all_single",
    "_c10d_functional::broadcast",
    "_c10d_functional::reduce_scatter_tensor",
    "_c10d_functional::reduce_scatter_tensor_coalesced",
    "_dtensor::shard_dim_alltoall",
)
WAIT = "_c10d_functional::wait_tensor"
# Torch's types of the devices on which a program can call back into torch.
_CALLBACK_DEVICES = ("cpu", "cuda")

# The types of tensors and plain data. An argument or a result of another type makes a node asynchronous.
_PLAIN_TYPES = (
    *(torch.Tensor, int, float, complex, str, bytes, type(None), torch.SymInt, torch.SymFloat, torch.SymBool, slice, range, type(Ellipsis)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, torch.Generator, torch.nn.Module, type),
    *(torch._ops.OpOverload, torch._ops.OpOverloadPacket, torch._ops.HigherOrderOperator, Node),
    *(types.FunctionType, types.BuiltinFunctionType),
)


def is_asynchronous(node: Node) -> bool:
    """True if a node's op works in the background, with handles, or together with other processes."""
    values = leaves(node)
    # The node's op, and the ops among its arguments, which the node's op calls.
    ops = [item for item in (node.target, *values) if isinstance(item, torch._ops.OpOverload)]
    if any(map(_is_asynchronous_op, ops)) or not all(isinstance(value, _PLAIN_TYPES) for value in values):
        return True
    users = [user.target for user in node.users if isinstance(user.target, torch._ops.OpOverload)]
    return any("wait" in op._opname and _is_asynchronous_op(op) for op in users)


def is_collective(node: Node) -> bool:
    """True if a node's op is one of the collectives that return their result (`COLLECTIVES`)."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.name in COLLECTIVES


def groups_in(graph: torch.fx.Graph) -> tuple[str, ...]:
    """Returns the names of the process groups that a graph's collectives use, each once."""
    return tuple(dict.fromkeys(str(node.args[-1]) for node in graph.nodes if is_collective(node)))


def can_be_in_program(node: Node) -> bool:
    """True if a program can contain an asynchronous node: a collective, the wait for it, or the getitem that selects one of its results."""
    if is_collective(node):
        tensors = [value for value in leaves(node) if isinstance(value, torch.Tensor)]
        return all(tensor.device.type in _CALLBACK_DEVICES and tensor.layout == torch.strided for tensor in tensors)
    waits = isinstance(node.target, torch._ops.OpOverload) and node.target._schema.name == WAIT
    return (waits or node.target is operator.getitem) and isinstance(node.args[0], Node) and can_be_in_program(node.args[0])


def leaves(node: Node) -> list[Any]:
    """Returns a flat list of the fake values that a node takes and returns, and of its arguments (nodes and plain data)."""
    found: list[Any] = []
    _collect([node.meta.get("val"), *(source.meta.get("val") for source in node.all_input_nodes), node.args, node.kwargs], found)
    return found


def _collect(values: Any, found: list[Any]) -> None:
    """Appends the leaves of nested tuples, lists and dicts to `found`."""
    for value in values:
        if isinstance(value, (tuple, list)):
            _collect(value, found)
        elif isinstance(value, dict):
            _collect(value.values(), found)
        else:
            found.append(value)


@functools.cache
def _is_asynchronous_op(op: torch._ops.OpOverload) -> bool:
    return op.namespace in NAMESPACES or any(_holds_handle(argument.type) for argument in (*op._schema.arguments, *op._schema.returns))


def _holds_handle(schema_type: Any) -> bool:
    """True if a schema's type is a handle, or a container of handles, such as a list of streams."""
    inner = schema_type.containedTypes() if hasattr(schema_type, "containedTypes") else ()
    return schema_type.kind() in _HANDLE_KINDS or any(map(_holds_handle, inner))
