"""The candidate engines: backends of torch.compile by name."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._dynamo.exc import RestartAnalysis, SkipFrame
from torch.fx import Graph, GraphModule, Node

from ..errors import OptionError
from .contest import DEFAULT_ENGINE, first_line
from .verification import Call

# Backends that cannot be engines: dynaxla_auto selects among engines itself, and dynaxla_retrace is a baseline.
_NOT_ENGINES = ("dynaxla_auto", "dynaxla_retrace")


def check_names(names: Sequence[str]) -> None:
    """Raises: OptionError for a name that is not a backend of torch.compile, or that is in `_NOT_ENGINES`."""
    available = [name for name in torch._dynamo.list_backends(exclude_tags=()) if name not in _NOT_ENGINES]
    for name in names:
        if name != DEFAULT_ENGINE and name not in available:
            hint = "register your own engine with torch._dynamo.register_backend(function, name=...)"
            there_are = ", ".join(sorted({*available, DEFAULT_ENGINE}))
            raise OptionError(f"option engines={list(names)!r}: {name!r} cannot be an engine; the valid names are: {there_are}", hint=hint)


def compile_with(name: str, module: GraphModule, example_inputs: Sequence[Any], device: torch.device) -> Call | str:
    """Compiles a TorchDynamo graph with a backend of torch.compile. Returns the compiled function, or the reason (str) why this fails.

    It must be called during TorchDynamo's capture.
    """
    if name == "inductor" and device.type == "cpu" and (obstacle := no_cpp_compiler()):
        return obstacle
    backend: Any = torch._dynamo.lookup_backend(name)
    return compiled_or_reason(lambda: backend(copy_graph(module), list(example_inputs)))


def compiled_or_reason(compile: Callable[[], Any]) -> Call | str:
    """Calls a compiler, and returns the function that it returns, or the reason (str) why it fails.

    Raises: the exceptions with which TorchDynamo restarts or skips a capture; OptionError.
    """
    try:
        function = compile()
    except (RestartAnalysis, SkipFrame, OptionError):
        raise
    except Exception as error:
        return f"it cannot compile the graph: {first_line(error)}"
    # TorchDynamo disables itself around a backend's function. A second wrapper with the same purpose would only cost time in every call.
    return getattr(function, "_torchdynamo_orig_callable", function)


def no_cpp_compiler() -> str:
    """Returns the reason why Inductor cannot compile for the CPU on this machine; "" if there is none."""
    compilers = [os.environ.get("CXX", ""), "g++", "clang++", "cl"]
    return "" if any(name and shutil.which(name) for name in compilers) else "Inductor needs a C++ compiler (g++ or clang++)"


def copy_graph(module: GraphModule) -> GraphModule:
    """Returns a copy of a graph and of its nested graphs, for a compiler that changes graphs. The copy shares the tensors."""
    graph, copies = Graph(), dict[Node, Node]()
    output = graph.graph_copy(module.graph, copies)
    graph.output(output).meta = dict(module.graph.output_node().meta)
    for node, copy in copies.items():  # attributes that TorchDynamo sets on nodes, besides `meta`
        for name in vars(node).keys() - vars(copy).keys():
            setattr(copy, name, getattr(node, name))
    result = GraphModule(module, graph, type(module).__name__)
    result.meta = dict(module.meta)
    for name, part in module.named_children():
        if isinstance(part, GraphModule):
            setattr(result, name, copy_graph(part))
    for name in ("_param_name_to_source",):
        if hasattr(module, name):
            setattr(result, name, getattr(module, name))
    return result
