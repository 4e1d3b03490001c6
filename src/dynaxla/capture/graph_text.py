"""Graphs as text: graphs with the same text compile to the same program, also if different processes captured them.

The text contains everything that a program depends on: ops and their arguments, the metadata of every fake tensor, which values share a
storage, and a hash of each constant's bytes. A graph has no text if its program depends on anything else: on ops of other libraries, whose
Python code is not compared, on symbolic sizes, or on subgraphs.
"""

from __future__ import annotations

import hashlib
import operator
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import BuiltinFunctionType, BuiltinMethodType, FunctionType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import _disable_current_modes

from ..lowering.graphs import FOR_CHECKS, user_frame
from ..runtime import private

# The namespaces of ops whose kernels, fake kernels and decompositions depend only on the versions of torch and dynaxla.
_KNOWN_NAMESPACES = ("aten", "prims")
_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


def graph_text(module: GraphModule) -> str | None:
    """Returns an ATen graph as text, or None if the graph has no text. The text leaves out node names and source lines."""
    try:
        with _disable_current_modes():
            return "\n".join(_lines(module))
    except _HasNoText:
        return None


def captured_text(module: GraphModule, example_inputs: Sequence[Any]) -> str | None:
    """Returns a TorchDynamo graph as text, with the metadata of its inputs and the user's source lines. None if the graph has no text.

    AOTAutograd traces into the functions that the graph calls, and the text has only their names. So a graph has a text only if all these
    functions belong to torch or Python, whose versions are known. The graph must have no two inputs that share memory: AOTAutograd detects
    this from the tensors, and the text does not record it.
    """
    if not all(type(item) in (torch.Tensor, torch.nn.Parameter, FakeTensor) for item in example_inputs):
        return None
    if len({private.storage_id(item) for item in example_inputs if item.layout == torch.strided}) < len(example_inputs):
        return None
    numbers: dict[Node, int] = {}
    try:
        lines = [f"{_value(item, {})} {item.is_leaf} {item.is_inference()} {type(item).__name__}" for item in example_inputs]
        for node in module.graph.nodes:
            numbers[node] = len(numbers)
            called = "" if node.op in ("placeholder", "output") else _called_function(node)
            value = _input_metadata(node) if node.op == "placeholder" else ""
            arguments = _argument(node.args, numbers), _argument(dict(node.kwargs), numbers)
            lines.append(" | ".join([node.op, called, *arguments, value, user_frame(node.meta.get("stack_trace"))]))
        return "\n".join(lines)
    except _HasNoText:
        return None


def _input_metadata(node: Node) -> str:
    """Returns TorchDynamo's metadata of an input as text: the fake tensor, and TorchDynamo's mark of parameters and buffers.

    Raises: _HasNoText, for example for symbolic sizes.
    """
    mark = (node.meta.get("tensor_dict") or {}).get("_dynamo_static_input_type")
    return f"{_value(node.meta.get('example_value'), {})} {mark}"


# Modules whose functions depend only on the versions of torch and Python. `_called_function` checks the functions of torch.ops separately,
# because other libraries register ops there.
_KNOWN_MODULES = ("torch", "_operator", "builtins", "math")


def _called_function(node: Node) -> str:
    """Returns the name of the function that a TorchDynamo node calls. Raises: _HasNoText."""
    target = node.target
    if node.op == "call_method" and isinstance(target, str):
        if not _is_known_code(getattr(torch.Tensor, target, None)):
            raise _HasNoText(target)
        return target
    if node.op != "call_function" or isinstance(target, torch._ops.HigherOrderOperator):
        raise _HasNoText(node.op)
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        if str(target).partition(".")[0] in _KNOWN_NAMESPACES:
            return str(target)
        raise _HasNoText(str(target))
    module, name = getattr(target, "__module__", None), getattr(target, "__name__", "")
    if isinstance(target, BuiltinFunctionType | BuiltinMethodType):
        owner = getattr(target, "__self__", None)
        return f"{module} {getattr(owner, '__name__', type(owner).__name__)} {getattr(target, '__qualname__', name)}"
    if str(module).partition(".")[0] not in _KNOWN_MODULES or getattr(sys.modules.get(str(module)), name, None) is not target:
        raise _HasNoText(str(target))
    if not _is_known_code(target):
        raise _HasNoText(str(target))
    return f"{module}.{name}"


def _is_known_code(function: Any) -> bool:
    """True if a function's code belongs to torch or Python, or is no Python code.

    The name of the function's module is not enough, because other packages can assign functions to names in torch's modules.
    """
    return not isinstance(function, FunctionType) or str(function.__globals__.get("__name__")).partition(".")[0] in _KNOWN_MODULES


class _HasNoText(Exception):
    """Raised for a graph that cannot be written as text. Users do not see the message."""


def _lines(module: GraphModule) -> Iterator[str]:
    numbers: dict[Node, int] = {}
    storages: dict[int, int] = {}
    for node in module.graph.nodes:
        numbers[node] = len(numbers)
        fields = [node.op, _target(module, node), _argument(node.args, numbers), _argument(dict(node.kwargs), numbers)]
        # The program depends on `is_called_by_user`, because kernel_refusals.py checks only ops that the user called directly.
        is_called_by_user = str(node.meta.get("original_aten") or node.target) == str(node.target)
        description = repr(node.meta.get("desc"))
        fields += [_value(node.meta.get("val"), storages), description, f"{FOR_CHECKS in node.meta} {is_called_by_user}"]
        yield " | ".join(fields)


def _target(module: GraphModule, node: Node) -> str:
    if node.op in ("placeholder", "output"):
        return ""
    if node.op == "get_attr":
        value: Any = module
        for name in str(node.target).split("."):
            value = getattr(value, name)
        return _constant(value)
    if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace in _KNOWN_NAMESPACES:
        return str(node.target)
    if node.target is operator.getitem:
        return "getitem"
    raise _HasNoText(str(node.target))


def _constant(value: Any) -> str:
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout != torch.strided or value.device.type != "cpu":
        raise _HasNoText(type(value).__name__)
    facts = tuple(value.shape), value.stride(), value.dtype, value.is_conj(), value.is_neg()
    content = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy()
    return f"{facts} {hashlib.blake2b(content, digest_size=32).hexdigest()}"


def _argument(value: Any, numbers: Mapping[Node, int]) -> str:
    if isinstance(value, Node):
        return f"%{numbers[value]}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name!r}: {_argument(item, numbers)}" for name, item in value.items()) + "}"
    if isinstance(value, slice):
        return f"slice{_argument((value.start, value.stop, value.step), numbers)}"
    if isinstance(value, tuple):
        return "(" + ", ".join(_argument(item, numbers) for item in value) + ",)"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ", ".join(_argument(item, numbers) for item in value) + "]"
    if type(value) in _PLAIN:
        return repr(value)
    raise _HasNoText(type(value).__name__)


def _value(value: Any, storages: dict[int, int]) -> str:
    """Returns the metadata of a node's value as text. Values that share a storage have the same number, which `storages` records by id."""
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(_value(item, storages) for item in value) + ",)"
    if not isinstance(value, torch.Tensor):
        return _argument(value, {})
    sizes = (*value.shape, *value.stride(), value.storage_offset()) if value.layout == torch.strided else (None,)
    if any(type(size) is not int for size in sizes):
        raise _HasNoText("a symbol")
    storage = storages.setdefault(private.storage_id(value), len(storages))
    facts = type(value).__name__, tuple(value.shape), value.stride(), value.storage_offset(), value.dtype, value.device
    return f"{facts} {storage} {value.is_conj()} {value.is_neg()} {value.requires_grad}"
