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
from .contest import UNTRIED, first_line
from .verification import Call

# Backends that cannot be engines: one that selects among engines itself, and a baseline.
_NOT_HERE = ("dynaxla_auto", "dynaxla_retrace")


def check_names(names: Sequence[str]) -> None:
    """Raises OptionError for a name that is not a backend of torch.compile."""
    known = [name for name in torch._dynamo.list_backends(exclude_tags=()) if name not in _NOT_HERE]
    for name in names:
        if name != UNTRIED and name not in known:
            hint = "register your own engine by torch._dynamo.register_backend(function, name=...)"
            raise OptionError(f"option engines names {name!r}; there are: {', '.join(sorted({*known, UNTRIED}))}", hint=hint)


def compiled(name: str, module: GraphModule, example_inputs: Sequence[Any], device: torch.device) -> Call | str:
    """Compiles a TorchDynamo graph with a backend of torch.compile, during a capture. Returns the reason (str) if that fails."""
    if name == "inductor" and device.type == "cpu" and (obstacle := no_cpp_compiler()):
        return obstacle
    backend: Any = torch._dynamo.lookup_backend(name)
    return by(lambda: backend(copied(module), list(example_inputs)))


def by(compile: Callable[[], Any]) -> Call | str:
    """Returns the function that a compiler makes, or the reason (str) why it fails.

    Raises: the exceptions with which TorchDynamo restarts or skips a capture; OptionError.
    """
    try:
        made = compile()
    except (RestartAnalysis, SkipFrame, OptionError):
        raise
    except Exception as error:
        return f"it cannot compile the graph: {first_line(error)}"
    # TorchDynamo disables itself around a backend's function; a wrapper that does so too costs every call.
    return getattr(made, "_torchdynamo_orig_callable", made)


def no_cpp_compiler() -> str:
    """Returns the reason why Inductor cannot compile for the CPU here, or ""."""
    found = [os.environ.get("CXX", ""), "g++", "clang++", "cl"]
    return "" if any(name and shutil.which(name) for name in found) else "Inductor needs a C++ compiler (g++ or clang++)"


def copied(module: GraphModule) -> GraphModule:
    """Returns a copy of a graph and of the graphs nested in it, which a compiler may change. The tensors are shared."""
    graph, copies = Graph(), dict[Node, Node]()
    result = graph.graph_copy(module.graph, copies)
    graph.output(result).meta = dict(module.graph.output_node().meta)
    for node, copy in copies.items():  # attributes that TorchDynamo sets on nodes, besides `meta`
        for name in vars(node).keys() - vars(copy).keys():
            setattr(copy, name, getattr(node, name))
    made = GraphModule(module, graph, type(module).__name__)
    made.meta = dict(module.meta)
    for name, part in module.named_children():
        if isinstance(part, GraphModule):
            setattr(made, name, copied(part))
    for name in ("_param_name_to_source",):
        if hasattr(module, name):
            setattr(made, name, getattr(module, name))
    return made
