"""Graphs for inference that outlive the process, as JSON: a later process that captures the same need not have AOTAutograd trace it.

Kept is what AOTAutograd has made of a graph of TorchDynamo's, where nothing is wanted of its wrapper, or no more than that the first
results are written to inputs (wrapper.py). The key has all that decides what AOTAutograd makes: the captured graph and its inputs, the
options, the versions, the sources of dynaxla, and torch's settings. What cannot be written down, as text or as JSON, is not kept.
"""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch._functorch.config
from torch._decomp import global_decomposition_table
from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput, PlainAOTInput, PlainAOTOutput
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes

from ..lowering import registry
from ..lowering.graphs import user_frame
from ..runtime import machine, private
from ..runtime.store import Store
from .aten_graph import AtenGraph, written_inputs
from .fingerprint import captured_text, fingerprint

_AUTOCAST = ("cpu", "cuda")


def key_of(module: GraphModule, example_inputs: Sequence[Any], facts: Sequence[Any]) -> str | None:
    """The name of what AOTAutograd and `facts` make of a graph of TorchDynamo's; None for one that is not to be kept.

    facts: plain data.
    """
    sources, text, lowerings = machine.sources(), captured_text(module, example_inputs), registry.places()
    if sources is None or text is None or lowerings is None:
        return None
    if private.mode_count() or private.saved_tensor_hooks() is not None or private.functorch_level() is not None:
        return None
    if any(type(mode) is not DeviceContext for mode in _get_current_function_mode_stack()):
        return None
    overridden = sorted(filter(_may_change_traces, private.implemented_in_python()))
    if not all(name.startswith("prims/") for name in overridden):  # torch's own; what another one does its name does not say
        return None
    decompositions = [function.__module__ for table in global_decomposition_table.values() for function in table.values()]
    if any(name.partition(".")[0] != "torch" for name in decompositions):
        return None
    settings = (
        torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled(), torch.is_inference_mode_enabled(),
        [(torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in _AUTOCAST],
        torch.is_autocast_cache_enabled(), torch.is_anomaly_enabled(), private.is_forward_mode_enabled(),
        torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory, [ask() for ask in private.BACKEND_SETTINGS],
        [private.float32_precision(*place) for place in private.FLOAT32_PRECISIONS], torch.backends.cpu.get_cpu_capability(),
        torch._functorch.config.get_hash(), torch.fx.experimental._config.get_hash(),
    )  # fmt: skip
    told = machine.versions(), sources, tuple(facts), lowerings, overridden, len(decompositions), settings, text
    return hashlib.blake2b(repr(told).encode(), digest_size=32).hexdigest()


def _may_change_traces(kernel: str) -> bool:
    """Whether a kernel that Python has registered, as op/key, can be part of what AOTAutograd does on a CPU."""
    return kernel.startswith(("aten/", "prims/")) and not kernel.endswith(("Meta", "CUDA", "MPS", "XPU"))


@dataclass(frozen=True)
class KeptGraph:
    """A graph for inference, and what is wanted around its program.

    Attributes: nodes (JSON); static (as of an `AtenGraph`); written (the positions of the inputs that the first results are written to).
    """

    nodes: list[Any]
    static: tuple[int, ...]
    written: tuple[int, ...]

    @staticmethod
    def of(graph: AtenGraph, written: Sequence[int]) -> KeptGraph | None:
        """None for a graph that JSON would not give back as it is."""
        text = fingerprint(graph.module, described=False)
        if text is None or graph.remade or graph.phase != "inference" or graph.waits:
            return None
        if list(written_inputs(graph.module.graph).items()) != list(enumerate(written)):
            return None
        try:
            with _disable_current_modes():
                kept = KeptGraph(_encoded_nodes(graph.module), graph.static, tuple(written))
        except _Unwritable:
            return None
        again = KeptGraph.read(kept.text())
        return again if fingerprint(again.module(), described=False) == text else None

    def text(self) -> bytes:
        """What `read` reads."""
        return json.dumps({"static": self.static, "written": self.written, "nodes": self.nodes}, separators=(",", ":")).encode()

    @staticmethod
    def read(text: bytes) -> KeptGraph:
        found = json.loads(text)
        return KeptGraph(found["nodes"], tuple(found["static"]), tuple(found["written"]))

    @staticmethod
    def find(store: Store, key: str) -> KeptGraph | None:
        """What a store has under a key."""
        text = store.get(key)
        return KeptGraph.read(text) if text is not None else None

    def graph(self, name: str) -> AtenGraph:
        """As AOTAutograd would give it."""
        return AtenGraph(name, self.module(), self.static)

    def module(self) -> GraphModule:
        """The graph, with fake tensors of the present capture's."""
        context = TracingContext.try_get()
        mode = (context.fake_mode if context is not None else None) or FakeTensorMode()
        with _disable_current_modes():
            return _decoded_nodes(self.nodes, self.written, mode)

    def around(self, program: Callable[[list[Any]], Sequence[Any]]) -> Callable[..., Any]:
        """The program as TorchDynamo calls it, with what AOTAutograd's wrapper would do."""
        written, count = self.written, len(self.written)
        if not written:
            return lambda *args: program(list(args))

        def call(*args: Any) -> Sequence[Any]:
            results = program(list(args))
            for position, value in zip(written, results[:count], strict=True):
                args[position].copy_(value)
            return results[count:]

        return call


class _Unwritable(Exception):
    """Something that JSON would not give back."""


# What pickles would be for: each with a letter, since JSON has neither tuples nor dtypes.
_NAMED = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}


def _encoded_nodes(module: GraphModule) -> list[Any]:
    numbers: dict[Node, int] = {}
    storages: dict[int, int] = {}
    encoded = []
    for node in module.graph.nodes:
        numbers[node] = len(numbers)
        constant = None
        if node.op == "get_attr":
            constant = _encoded_constant(getattr(module, str(node.target), None))
        elif node.op not in ("placeholder", "call_function", "output"):
            raise _Unwritable(node.op)
        target = None if node.target is operator.getitem else str(node.target)
        original = node.meta.get("original_aten")
        # A value of None and no value are one to whoever asks.
        op = str(original) if original is not None else None
        parts = node.args, dict(node.kwargs), node.meta.get("val"), op, user_frame(node.meta.get("stack_trace"))
        encoded.append([node.op, node.name, target, constant, *(_encoded(part, numbers, storages) for part in parts)])
    return encoded


# Bytes of a constant; a graph with larger ones is not kept.
_MOST = 1 << 16


def _encoded_constant(value: Any) -> Any:
    """Its bytes. Whether that is all of it, a fingerprint tells."""
    if (
        type(value) is not torch.Tensor
        or value.device.type != "cpu"
        or not value.is_contiguous()
        or value.nbytes > _MOST
        or not value.nbytes
    ):
        raise _Unwritable("a constant")
    return [list(value.shape), str(value.dtype), value.detach().reshape(-1).view(torch.uint8).numpy().tobytes().hex()]


def _decoded_constant(shape: list[int], dtype: str, content: str) -> torch.Tensor:
    kind: torch.dtype = _DECODERS["dtype"](dtype)
    return torch.frombuffer(bytearray.fromhex(content), dtype=kind).reshape(shape)


def _encoded(value: Any, numbers: Mapping[Node, int], storages: dict[int, int]) -> Any:
    def inner(items: Any) -> list[Any]:
        return [_encoded(item, numbers, storages) for item in items]

    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, Node):
        return ["node", numbers[value]]
    if isinstance(value, torch.Tensor):
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
    raise _Unwritable(type(value).__name__)


def _decoded_nodes(encoded: Sequence[Any], written: Sequence[int], mode: FakeTensorMode) -> GraphModule:
    graph = Graph()
    made: list[Node] = []
    inputs: list[Any] = []
    storages: dict[int, torch.UntypedStorage] = {}

    def decoded(value: Any) -> Any:
        if not isinstance(value, list):
            return value
        kind, *parts = value
        return _DECODERS[kind](*parts) if kind in _DECODERS else inner(kind, parts)

    def inner(kind: str, parts: list[Any]) -> Any:
        if kind == "node":
            return made[parts[0]]
        if kind == "tensor":
            return _fake(mode, storages, *parts)
        if kind == "dict":
            return dict(zip(parts[0], map(decoded, parts[1]), strict=True))
        items = list(map(decoded, parts))
        return items if kind == "list" else tuple(items) if kind == "tuple" else slice(*items)

    constants: dict[str, torch.Tensor] = {}
    for op, name, target, constant, *parts in encoded:
        args, kwargs, value, original, frame = map(decoded, parts)
        node = graph.create_node(op, _function(target) if op == "call_function" else target, args, kwargs, name)
        if constant is not None:
            constants[target] = _decoded_constant(*constant)
        if op == "placeholder":
            node.meta["desc"] = PlainAOTInput(len(inputs))
            inputs.append(node.meta["desc"])
        if op == "output":
            count = len(written)
            mutations = [InputMutationAOTOutput(inputs[position]) for position in written]
            node.meta["desc"] = [*mutations, *(PlainAOTOutput(index) for index in range(len(args[0]) - count))]
        else:
            node.meta["val"] = value
        if original is not None:
            node.meta["original_aten"] = original
        if frame:
            node.meta["stack_trace"] = frame
        made.append(node)
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
    number: int, dtype: str, device: str, requires_grad: bool,
) -> FakeTensor:  # fmt: skip
    storage = storages.get(number)
    if storage is None:
        storage = storages[number] = torch.empty(nbytes, dtype=torch.uint8, device="meta").untyped_storage()
    kind: torch.dtype = _DECODERS["dtype"](dtype)
    fake = FakeTensor(mode, torch.empty(0, dtype=kind, device="meta").set_(storage, offset, shape, stride), torch.device(device))
    return fake.requires_grad_() if requires_grad else fake
