"""A persistent cache of inference graphs as JSON: a later process with the same captured graph skips AOTAutograd's trace.

A graph is cached if AOTAutograd's wrapper does nothing for this graph, or only writes the first results to inputs (runtime_wrapper.py). The
key covers all facts that determine AOTAutograd's graph: the captured graph and its inputs, the options, the versions, dynaxla's sources,
and torch's settings. A graph is not cached if it has no text (graph_text.py) or no JSON form (graph_json.py).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch._functorch.config
from torch._decomp import global_decomposition_table
from torch.fx import GraphModule
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from ..lowering import registry
from ..lowering.interpreter import find_rule, is_plain_python
from ..runtime import machine, private
from ..runtime.store import Store
from .graph import AtenGraph, written_inputs
from .graph_json import Unwritable, decoded, encoded
from .graph_text import captured_text, graph_text
from .runtime_wrapper import with_leading_writes

_AUTOCAST = ("cpu", "cuda")
# The maximum size of a constant. A graph with a larger constant is not cached.
_MAX_CONSTANT_BYTES = 1 << 16


def key_of(module: GraphModule, example_inputs: Sequence[Any], facts: Sequence[Any]) -> str | None:
    """Returns the cache key of a TorchDynamo graph, or None if the graph must not be cached.

    facts: further plain data on which AOTAutograd's graph depends.
    """
    sources, text, lowerings = machine.sources(), captured_text(module, example_inputs), registry.external_lowerings()
    if sources is None or text is None or lowerings is None:
        return None
    if private.mode_count() or private.saved_tensor_hooks() is not None or private.functorch_level() is not None:
        return None
    if any(type(mode) is not DeviceContext for mode in _get_current_function_mode_stack()):
        return None
    overridden = sorted(filter(_may_change_traces, private.implemented_in_python()))
    if foreign_kernels():
        return None
    decompositions = [function.__module__ for table in global_decomposition_table.values() for function in table.values()]
    if any(name.partition(".")[0] != "torch" for name in decompositions):
        return None
    settings = (
        torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled(), torch.is_inference_mode_enabled(),
        [(torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in _AUTOCAST],
        torch.is_autocast_cache_enabled(), torch.is_anomaly_enabled(), private.is_forward_mode_enabled(),
        torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory, [get_setting() for get_setting in private.BACKEND_SETTINGS],
        [private.float32_precision(*setting) for setting in private.FLOAT32_PRECISIONS], torch.backends.cpu.get_cpu_capability(),
        torch._functorch.config.get_hash(), torch.fx.experimental._config.get_hash(),
    )  # fmt: skip
    key_parts = machine.versions(), sources, tuple(facts), lowerings, overridden, len(decompositions), settings, text
    return hashlib.blake2b(repr(key_parts).encode(), digest_size=32).hexdigest()


def foreign_kernels() -> list[str]:
    """Returns the kernels of ATen's ops, as "op/dispatch key", that a package other than torch has registered from Python.

    If there is such a kernel, no traced graph is cached: the cache key does not cover the version of the kernel's package.
    """
    names = filter(_may_change_traces, private.implemented_in_python())
    return sorted(name for name in names if not name.startswith("prims/") and not private.is_registered_by_torch(name))


def _may_change_traces(kernel: str) -> bool:
    """True if a kernel that is registered from Python can change AOTAutograd's trace on a CPU. kernel: as "op/dispatch key"."""
    return kernel.startswith(("aten/", "prims/")) and not kernel.endswith(("Meta", "CUDA", "MPS", "XPU"))


@dataclass(frozen=True)
class CachedGraph:
    """An inference graph in the cache, with the writes that AOTAutograd's wrapper does after the graph.

    Attributes:
        nodes: the graph's nodes as JSON data (graph_json.py).
        static: the positions of parameters and buffers among the inputs.
        written: the positions of the inputs that the first results are written to.
        is_lowered: True if every op has a lowering.
    """

    nodes: list[Any]
    static: tuple[int, ...]
    written: tuple[int, ...]
    is_lowered: bool = False

    @staticmethod
    def of(graph: AtenGraph, written: Sequence[int]) -> CachedGraph | None:
        """Returns a graph's cache entry. None if the graph cannot be cached, for example because JSON does not reproduce the graph.

        Args:
            graph: the graph, for programs on the CPU.
            written: the positions of the inputs that the first results are written to.
        """
        text = graph_text(graph.module)
        if text is None or graph.rederived_outputs or graph.phase != "inference" or graph.waits_for_checks:
            return None
        if list(written_inputs(graph.module.graph).items()) != list(enumerate(written)):
            return None
        try:
            called = [node for node in graph.module.graph.nodes if node.op == "call_function"]
            is_lowered = all(is_plain_python(node) or find_rule(node, "cpu") is not None for node in called)
            cached = CachedGraph(encoded(graph.module, _MAX_CONSTANT_BYTES), graph.static, tuple(written), is_lowered)
        except Unwritable:
            return None
        reread = CachedGraph.read(cached.text())
        return reread if graph_text(reread.module()) == text else None

    def text(self) -> bytes:
        """Returns the entry as the JSON text that `read` parses."""
        return json.dumps(vars(self), separators=(",", ":")).encode()

    @staticmethod
    def read(text: bytes) -> CachedGraph:
        """Returns the entry with this JSON text, a result of the method `text`."""
        entry = json.loads(text)
        return CachedGraph(entry["nodes"], tuple(entry["static"]), tuple(entry["written"]), entry["is_lowered"])

    @staticmethod
    def find(store: Store, key: str) -> CachedGraph | None:
        """Returns the entry with this key in a store, or None."""
        text = store.get(key)
        return CachedGraph.read(text) if text is not None else None

    def graph(self, name: str) -> AtenGraph:
        """Returns the AtenGraph that AOTAutograd's trace would give."""
        return AtenGraph(name, self.module(), self.static, is_lowered=self.is_lowered)

    def module(self) -> GraphModule:
        """Returns the graph's module, with fake tensors of the current capture's fake mode."""
        return decoded(self.nodes)

    def with_writes(self, program: Callable[[list[Any]], Sequence[Any]]) -> Callable[..., Any]:
        """Returns a function for TorchDynamo that calls a program and then does the writes of AOTAutograd's wrapper."""
        return with_leading_writes(program, self.written)
