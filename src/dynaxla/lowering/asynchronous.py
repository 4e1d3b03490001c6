"""Finds asynchronous nodes: ops that work in the background, with handles, or together with other processes.

Torch's kernels do not compute such a node from within a program. A program contains only the collectives whose results it waits for itself
(`can_be_in_program`). The reasons:

- The result of an asynchronous op is not ready yet. A program would copy it before the data has arrived, and the wait op would wait for
  the copy.
- A handle is not an array.
- Two programs of one graph may run their callbacks in different orders. Two processes that call collectives in different orders deadlock.

A node is asynchronous if any of these holds:

- its op, or an op among its arguments (`with_effects`, `auto_functionalized`), is in a namespace for collectives, streams or memory that
  several processes share (`NAMESPACES`);
- the op's schema takes or returns an object of a class (ProcessGroup, Work, any of `torch.classes`), a future, an awaitable, a remote
  reference, a stream or a storage;
- an argument or a result is neither a tensor nor plain data;
- a wait op in one of those namespaces reads its result; this also finds collectives that a library defines.
"""

from __future__ import annotations

import functools
import operator
import types
from typing import Any

import torch
from torch.fx import Node

NAMESPACES = frozenset(
    ["_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "c10d", "_dtensor", "device_mesh", "fsdp", "streams", "symm_mem"]
)

# The kinds of schema types of handles.
_HANDLES = frozenset(
    ["AnyClassType", "AnyType", "AwaitType", "CapsuleType", "ClassType", "FutureType", "InterfaceType", "PyObjectType", "RRefType"]
).union(["StorageType", "StreamObjType"])

# Collectives that return their results. Their lowerings, which can call torch's own collectives, are in ops/collectives.py.
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
# The devices on which a program can call back into torch.
_DEVICES = ("cpu", "cuda")

_PLAIN = (
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
    if any(map(_is_asynchronous_op, ops)) or not all(isinstance(value, _PLAIN) for value in values):
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
    """True if a program can contain an asynchronous node: a collective, or the wait for a collective that the program contains."""
    if is_collective(node):
        tensors = [value for value in leaves(node) if isinstance(value, torch.Tensor)]
        return all(tensor.device.type in _DEVICES and tensor.layout == torch.strided for tensor in tensors)
    waits = isinstance(node.target, torch._ops.OpOverload) and node.target._schema.name == WAIT
    return (waits or node.target is operator.getitem) and isinstance(node.args[0], Node) and can_be_in_program(node.args[0])


def leaves(node: Node) -> list[Any]:
    """Returns all values that a node takes and returns, as a flat list: fake values, and the arguments themselves (nodes included)."""
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


def _holds_handle(kind: Any) -> bool:
    inner = kind.containedTypes() if hasattr(kind, "containedTypes") else ()
    return kind.kind() in _HANDLES or any(map(_holds_handle, inner))
