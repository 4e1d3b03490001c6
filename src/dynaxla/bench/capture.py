"""Counts the graphs that TorchDynamo captures from a model, their sizes, and their share of the ops that eager mode runs."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True)
class Capture:
    """Counts of graphs, and of ATen ops below autograd.

    Attributes:
        graphs: the number of compiled graphs.
        graph_calls: the number of calls of graphs in one call of the model.
        ops_per_graph: the mean number of ops in a call of a graph.
        largest_graph: the number of ops in the largest graph.
        eager_ops: the number of ops in one eager call of the model.
        captured_share: the number of ops in all calls of graphs, divided by `eager_ops`.
        breaks: the number of graph breaks during compilation, by reason.
    """

    graphs: int
    graph_calls: int
    ops_per_graph: float
    largest_graph: int
    eager_ops: int
    captured_share: float
    breaks: dict[str, int]


class OpCounter(TorchDispatchMode):
    """A mode that counts the ops dispatched below autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def count_captures(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> Capture:
    """Compiles a model with a backend that runs each graph unchanged, and counts graphs and ops.

    Calls the compiled model three times, and the model once.
    """
    reset_dynamic_sizes()
    graph_sizes: list[int] = []
    calls: list[int] = []

    def counting_backend(module: torch.fx.GraphModule, _: Sequence[Any]) -> Any:
        number = len(graph_sizes)
        graph_sizes.append(0)

        def run(*args: Any) -> Any:
            with OpCounter() as ops:
                result = module.forward(*args)
            graph_sizes[number] = ops.count
            calls.append(ops.count)
            return result

        return run

    earlier_breaks = len(torch._dynamo.utils.graph_break_reasons)
    compiled = torch.compile(model, backend=counting_backend)
    for _ in range(2):  # the second call may compile more graphs, for example for a size that has changed
        compiled(*inputs)
    calls.clear()
    compiled(*inputs)
    with OpCounter() as eager_ops:
        model(*inputs)
    reasons = [reason.reason.strip().partition("\n")[0] for reason in torch._dynamo.utils.graph_break_reasons[earlier_breaks:]]
    captured_ops = sum(calls)
    return Capture(
        len(graph_sizes),
        len(calls),
        captured_ops / len(calls) if calls else 0.0,
        max(graph_sizes, default=0),
        eager_ops.count,
        captured_ops / eager_ops.count if eager_ops.count else 0.0,
        dict(Counter(reasons)),
    )


def reset_dynamic_sizes() -> None:
    """Resets TorchDynamo's memory of sizes that have changed, so that one engine's calls do not alter another engine's graphs.

    Compiled code is kept.
    """
    with contextlib.suppress(ImportError, AttributeError):
        from torch._dynamo.pgo import reset_code_state

        reset_code_state()
