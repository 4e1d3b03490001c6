"""ATen graphs as JSON data: their nodes, with the metadata of fake tensors and AOTAutograd's descriptors.

A graph with parts that JSON would not reproduce, such as subgraphs or symbolic sizes, is refused. No object is pickled.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._functorch._aot_autograd import descriptors
from torch._guards import TracingContext
from torch._inductor import inductor_prims as inductor_prims  # defines prims.fma, which graphs may have
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.utils._python_dispatch import _disable_current_modes

from ..lowering.graphs import user_frame
from ..runtime import private


class Unwritable(Exception):
    """Raised for an object that JSON would not reproduce. The message names the object."""


def encoded(module: GraphModule, max_constant_bytes: int | None = None) -> list[Any]:
    """Returns a graph's nodes as JSON data.

    max_constant_bytes: the maximum size of a constant in bytes; None: no limit.
    Raises: Unwritable.
    """
    with _disable_current_modes():
        return _encoded_nodes(module, max_constant_bytes)


def decoded(nodes: Sequence[Any]) -> GraphModule:
    """Returns the graph of these nodes, with fake tensors of the current capture's fake mode.

    Raises: AttributeError for an op that this process does not have.
    """
    context = TracingContext.try_get()
    mode = (context.fake_mode if context is not None else None) or FakeTensorMode()
    with _disable_current_modes():
        return _decoded_nodes(nodes, mode)


# The classes of torch's named constants. A constant is written as its kind (the key here) and its name.
_NAMED = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}


def _encoded_nodes(module: GraphModule, max_constant_bytes: int | None) -> list[Any]:
    numbers: dict[Node, int] = {}
    storages: dict[int, int] = {}
    encoded = []
    for node in module.graph.nodes:
        numbers[node] = len(numbers)
        constant = None
        if node.op == "get_attr":
            constant = _encoded_constant(module, str(node.target), max_constant_bytes)
        elif node.op not in ("placeholder", "call_function", "output"):
            raise Unwritable(f"a node of the kind {node.op}")
        if node.op == "call_function" and not isinstance(node.target, torch._ops.OpOverload) and node.target is not operator.getitem:
            raise Unwritable(f"a call of {node.target}")
        target = None if node.target is operator.getitem else str(node.target)
        original = node.meta.get("original_aten")
        # A missing metadata entry is written as None, since consumers do not distinguish a missing entry from None.
        op = str(original) if original is not None else None
        described = node.meta.get("val"), node.meta.get("desc"), op, user_frame(node.meta.get("stack_trace"))
        parts = node.args, dict(node.kwargs), *described
        encoded.append([node.op, node.name, target, constant, *(_encoded(part, numbers, storages) for part in parts)])
    return encoded


def _encoded_constant(module: GraphModule, name: str, max_constant_bytes: int | None) -> Any:
    """Returns shape, dtype and bytes of a constant tensor. The caller must check, by `graph_text`, that the decoded constant is the same.

    Raises: Unwritable.
    """
    value = getattr(module, name, None)
    if not isinstance(value, torch.Tensor):
        raise Unwritable(f"a constant of the class {type(value).__name__}")
    if type(value) is not torch.Tensor or value.device.type != "cpu" or not value.is_contiguous() or not value.nbytes:
        raise Unwritable(f"a constant tensor of the class {type(value).__name__} and shape {list(value.shape)} on {value.device}")
    if value.is_conj() or value.is_neg():
        raise Unwritable(f"a constant of shape {list(value.shape)} with the {'conjugate' if value.is_conj() else 'negative'} bit")
    if max_constant_bytes is not None and value.nbytes > max_constant_bytes:
        raise Unwritable(f"a constant of {value.nbytes} bytes, which is more than {max_constant_bytes}")
    return [list(value.shape), str(value.dtype), value.detach().reshape(-1).view(torch.uint8).numpy().tobytes().hex()]


def _decoded_constant(shape: list[int], dtype: str, content: str) -> torch.Tensor:
    torch_dtype: torch.dtype = _DECODERS["dtype"](dtype)
    return torch.frombuffer(bytearray.fromhex(content), dtype=torch_dtype).reshape(shape)


def _encoded(value: Any, numbers: Mapping[Node, int], storages: dict[int, int]) -> Any:
    def inner(items: Any) -> list[Any]:
        return [_encoded(item, numbers, storages) for item in items]

    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, Node):
        return ["node", numbers[value]]
    if isinstance(value, torch.Tensor):
        if not _is_plain(value):
            raise Unwritable(f"a {value.dtype} value of shape {list(value.shape)} that has dynamic sizes or is not a plain tensor")
        storage = storages.setdefault(private.storage_id(value), len(storages))
        sizes = list(value.shape), list(value.stride()), value.storage_offset(), value.untyped_storage().nbytes()
        return ["tensor", *sizes, storage, str(value.dtype), str(value.device), value.requires_grad]
    if type(value) is float:
        return ["float", value.hex()]
    if type(value) is complex:
        return ["complex", value.real.hex(), value.imag.hex()]
    if isinstance(value, slice):
        return ["slice", *inner((value.start, value.stop, value.step))]
    if isinstance(value, Mapping):
        return ["dict", list(value), inner(value.values())]
    if isinstance(value, (list, tuple)):
        return ["tuple" if isinstance(value, tuple) else "list", *inner(value)]
    if isinstance(value, torch.device):
        return ["device", str(value)]
    for kind, type_ in _NAMED.items():
        if isinstance(value, type_):
            return [kind, str(value)]
    if isinstance(value, descriptors.AOTInput | descriptors.AOTOutput) and type(value).__module__ == descriptors.__name__:
        return ["desc", type(value).__name__, *inner(getattr(value, field.name) for field in dataclasses.fields(value))]
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        raise Unwritable(f"the number {value}, which depends on dynamic sizes")
    raise Unwritable(f"an argument of the class {type(value).__name__}")


def _is_plain(value: torch.Tensor) -> bool:
    """True if `_encoded` writes all properties of a fake tensor: a strided tensor with fixed sizes, and no conjugate or negative bit."""
    if value.layout != torch.strided or value.is_conj() or value.is_neg():
        return False
    return all(type(size) is int for size in (*value.shape, *value.stride(), value.storage_offset(), value.untyped_storage().nbytes()))


def _decoded_nodes(encoded: Sequence[Any], mode: FakeTensorMode) -> GraphModule:
    graph = Graph()
    decoded_nodes: list[Node] = []
    storages: dict[int, torch.UntypedStorage] = {}

    def decoded(value: Any) -> Any:
        if not isinstance(value, list):
            return value
        kind, *parts = value
        return _DECODERS[kind](*parts) if kind in _DECODERS else inner(kind, parts)

    def inner(kind: str, parts: list[Any]) -> Any:
        if kind == "node":
            return decoded_nodes[parts[0]]
        if kind == "tensor":
            return _fake(mode, storages, *parts)
        if kind == "dict":
            return dict(zip(parts[0], map(decoded, parts[1]), strict=True))
        if kind == "desc":
            return getattr(descriptors, parts[0])(*map(decoded, parts[1:]))
        items = list(map(decoded, parts))
        return items if kind == "list" else tuple(items) if kind == "tuple" else slice(*items)

    constants: dict[str, torch.Tensor] = {}
    for op, name, target, constant, *parts in encoded:
        args, kwargs, value, description, original, frame = map(decoded, parts)
        node = graph.create_node(op, _function(target) if op == "call_function" else target, args, kwargs, name)
        if constant is not None:
            constants[target] = _decoded_constant(*constant)
        if op != "output":
            node.meta["val"] = value
        if description is not None:
            node.meta["desc"] = description
        if original is not None:
            node.meta["original_aten"] = original
        if frame:
            node.meta["stack_trace"] = frame
        decoded_nodes.append(node)
    return GraphModule(constants, graph)


_DECODERS: dict[str, Callable[..., Any]] = {
    "float": float.fromhex,
    "complex": lambda real, imag: complex(float.fromhex(real), float.fromhex(imag)),
    "device": torch.device,
    **dict.fromkeys(_NAMED, lambda name: getattr(torch, name.removeprefix("torch."))),
}


def _function(name: str | None) -> Callable[..., Any]:
    if name is None:
        return operator.getitem
    namespace, packet, overload = name.split(".")
    found: Callable[..., Any] = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    return found


def _fake(
    mode: FakeTensorMode, storages: dict[int, torch.UntypedStorage], shape: list[int], stride: list[int], offset: int, nbytes: int,
    storage_number: int, dtype: str, device: str, requires_grad: bool,
) -> FakeTensor:  # fmt: skip
    storage = storages.get(storage_number)
    if storage is None:
        storage = storages[storage_number] = torch.empty(nbytes, dtype=torch.uint8, device="meta").untyped_storage()
    torch_dtype: torch.dtype = _DECODERS["dtype"](dtype)
    fake = FakeTensor(mode, torch.empty(0, dtype=torch_dtype, device="meta").set_(storage, offset, shape, stride), torch.device(device))
    return fake.requires_grad_() if requires_grad else fake
