"""The engines that compete: backends of torch.compile by their names."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._dynamo.exc import RestartAnalysis, SkipFrame
from torch.fx import Graph, GraphModule, Node

from ..errors import OptionError
from .check import Call
from .contest import UNTRIED, first_line

# Those that are made of others, or are there to be compared with.
_NOT_HERE = ("dynaxla_auto", "dynaxla_retrace")


def check_names(names: Sequence[str]) -> None:
    """Raises: OptionError for a name that is none of torch.compile's backends."""
    known = [name for name in torch._dynamo.list_backends(exclude_tags=()) if name not in _NOT_HERE]
    for name in names:
        if name != UNTRIED and name not in known:
            hint = "an engine of your own: torch._dynamo.register_backend(function, name=...)"
            raise OptionError(f"option engines names {name!r}; there are: {', '.join(sorted({*known, UNTRIED}))}", hint=hint)


def compiled(name: str, module: GraphModule, example_inputs: Sequence[Any], device: torch.device) -> Call | str:
    """A graph of TorchDynamo's by a backend of torch.compile, inside of a capture; or why there is none."""
    if name == "inductor" and device.type == "cpu" and (obstacle := no_cpp_compiler()):
        return obstacle
    backend: Any = torch._dynamo.lookup_backend(name)
    return by(lambda: backend(copied(module), list(example_inputs)))


def by(compile: Callable[[], Any]) -> Call | str:
    """What a compiler gives, or why it gives nothing. Raises: what TorchDynamo wants to hear; OptionError."""
    try:
        made = compile()
    except (RestartAnalysis, SkipFrame, OptionError):
        raise
    except Exception as error:
        return f"it cannot compile the graph: {first_line(error)}"
    # TorchDynamo disables itself around what it gets; a wrapper that does the same costs every call.
    return getattr(made, "_torchdynamo_orig_callable", made)


def no_cpp_compiler() -> str:
    """Why Inductor cannot make programs for a CPU here, or ""."""
    found = [os.environ.get("CXX", ""), "g++", "clang++", "cl"]
    return "" if any(name and shutil.which(name) for name in found) else "Inductor needs a C++ compiler (g++ or clang++)"


def copied(module: GraphModule) -> GraphModule:
    """The same graph, which a compiler may change, and the graphs within it; tensors are the same."""
    graph, copies = Graph(), dict[Node, Node]()
    result = graph.graph_copy(module.graph, copies)
    graph.output(result).meta = dict(module.graph.output_node().meta)
    for node, copy in copies.items():  # what TorchDynamo writes on nodes, besides their metadata
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
