"""Queries on graphs and nodes that several packages use.

fx itself lists inputs and outputs: `graph.find_nodes(op="placeholder")`, `graph.output_node()`.
"""

from __future__ import annotations

import contextlib
import operator
import re
from collections.abc import Iterator
from typing import Any

import jax
import torch
from torch.fx import Node

from .. import user_frames
from ..observe import events
from ..runtime import private
from ..torch_ops import aten
from . import dtypes

# The line of a frame in a stack trace.
_FILE = re.compile(r'\s*File "([^"]*)"')
# Matches a step of a module's path in torch's notation: `._modules['0']`.
_MODULE_STEP = re.compile(r"\._modules\['([^']*)'\]")

# Metadata key of nodes that are evaluated for their checks, even if nothing uses their values.
FOR_CHECKS = "dynaxla_for_checks"

# Ops whose results are views of their operand, although their schemas do not declare them as such to autograd.
_UNDECLARED_VIEWS = (aten._unsafe_view.default, aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default)


def is_tensor(value: Any) -> bool:
    """True if a node's argument is a node whose value is a tensor."""
    return isinstance(value, Node) and isinstance(value.meta.get("val"), torch.Tensor)


def is_view(node: Node) -> bool:
    """True if the node's value is a view of its argument's memory, according to the schema of the node's op."""
    if node.target is operator.getitem:
        return isinstance(node.args[0], Node) and is_view(node.args[0])
    return isinstance(node.target, torch._ops.OpOverload) and node.target.is_view


def is_result_used(node: Node, index: int) -> bool:
    """True if the graph uses the result at `index` of a node with several results."""
    return any(user.target is not operator.getitem or user.args[1] == index for user in node.users)


def view_source(node: Node) -> Node | None:
    """Returns the node whose memory a node's value aliases; None if the value has its own memory.

    A value that aliases another one is a view, declared or not, or the result of an op that mutates its operand.
    """
    producer = node.args[0] if node.target is operator.getitem else node
    if not isinstance(producer, Node) or not isinstance(producer.target, torch._ops.OpOverload):
        return None
    is_alias = producer.target in _UNDECLARED_VIEWS or any(result.alias_info is not None for result in producer.target._schema.returns)
    return producer.args[0] if is_alias and isinstance(producer.args[0], Node) else None


def is_undeclared_view(node: Node) -> bool:
    """True if the node's value is a view that autograd does not track as one."""
    source: Node | None = node
    while source is not None:
        producer = source.args[0] if source.target is operator.getitem else source
        if isinstance(producer, Node) and producer.target in _UNDECLARED_VIEWS:
            return True
        source = view_source(source)
    return False


def storage_of(node: Node) -> int:
    """Returns an id of the storage of a node's value. Values that share a storage have the same id.

    Each of an op's several results counts as a storage of its own, unless the op is a view: fake results of control-flow ops may share a
    storage that the real results do not share.
    """
    origin = node
    while (source := view_source(origin)) is not None:
        origin = source
    return id(origin) if origin.target is operator.getitem else private.storage_id(node.meta["val"])


def describe_inputs(node: Node) -> str:
    """Returns the node's arguments as text: tensors as `f32[8, 1024]`, other values with their names in the schema: `dim=1`."""
    parts: list[str] = []
    arguments = node.target._schema.arguments if isinstance(node.target, torch._ops.OpOverload) else ()
    for index, arg in enumerate(node.args):
        text = _describe(arg)
        is_tensor = isinstance(arg, Node) and isinstance(arg.meta.get("val"), torch.Tensor)
        parts.append(text if is_tensor or index >= len(arguments) else f"{arguments[index].name}={text}")
    parts += [f"{name}={_describe(arg)}" for name, arg in node.kwargs.items()]
    return ", ".join(parts)


def _describe(arg: Any) -> str:
    if isinstance(arg, Node):
        value = arg.meta.get("val")
        return dtypes.describe(value.dtype, tuple(value.shape)) if isinstance(value, torch.Tensor) else str(value)
    if isinstance(arg, (list, tuple)):
        return f"[{', '.join(map(_describe, arg))}]"
    return str(arg)


def user_line(node: Node) -> str:
    """Returns the innermost line of the user's own code that created this node: `model.py:41, in forward`.

    Returns the module, such as `module "0" (Linear)`, for a node that no line of the user created, as in a compiled nn.Sequential.
    """
    frame = user_frame_or_module(node).partition("\n")[0].strip()
    if not frame.startswith("File "):
        return frame
    path, number, function = frame.removeprefix("File ").split(", ", 2)
    return f"{path.strip(chr(34))}:{number.removeprefix('line ')}, {function}"


@contextlib.contextmanager
def line_scope(node: Node, *, on_mesh: bool) -> Iterator[None]:
    """Adds the user's line to the XLA op names of the operations that are traced in the context.

    On a mesh the name is `at[model.py:41, in forward]`. If events have listeners, `line[N]` is added, where `events.line_number` gives N.
    """
    line = user_line(node).rpartition("/")[2] if on_mesh else ""
    numbered = events.line_scope(user_frame_or_module(node)) if events.has_listeners() else contextlib.nullcontext()
    with jax.named_scope(f"at[{line}]") if line else contextlib.nullcontext(), numbered:
        yield


def user_frame(trace: str | None) -> str:
    """Returns the innermost frame of the user's own code in a node's stack trace; "" if there is none.

    The first line of the result is the location, the second line the code.
    """
    lines = (trace or "").splitlines()
    files = [(index, found[1]) for index, line in enumerate(lines) if (found := _FILE.match(line))]
    frames = [index for index, file in files if user_frames.is_user_file(file)]
    for index in frames[-1:]:
        return "\n".join(lines[index : index + 2])
    return ""


def user_frame_or_module(node: Node) -> str:
    """Returns the node's frame of `user_frame`, otherwise its module, such as `module "0" (Linear)`, otherwise ""."""
    if frame := user_frame(node.meta.get("stack_trace")):
        return frame
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    for path, kind in list(stack.values())[-1:]:
        name = _MODULE_STEP.sub(r".\1", path).removeprefix("L['self']").removeprefix("L['fn']").strip(".")
        return f'module "{name}" ({getattr(kind, "__name__", str(kind).rpartition(".")[2])})'
    return ""
