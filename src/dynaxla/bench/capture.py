"""What TorchDynamo captures of a model: how many graphs, how large, and what share of the ops that eager mode runs."""

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
    """Counts of ATen ops, as the dispatcher sees them.

    Attributes: graphs compiled; graph_calls in one call of the model; ops_per_graph, the mean over those calls; largest_graph;
    eager_ops in one call of the model; captured_share of them that ran inside graphs, 0 to 1; breaks, the reasons for which TorchDynamo
    ended a graph, with how often each occurred while compiling.
    """

    graphs: int
    graph_calls: int
    ops_per_graph: float
    largest_graph: int
    eager_ops: int
    captured_share: float
    breaks: dict[str, int]


class OpCounter(TorchDispatchMode):
    """Counts the ops that are dispatched below autograd while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def examine(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> Capture:
    """Compile the model with a backend that runs each graph as it is, and count. Inputs are used as they are, three times."""
    forget_sizes()
    graph_sizes: list[int] = []
    calls: list[int] = []

    def counting(module: torch.fx.GraphModule, _: Sequence[Any]) -> Any:
        number = len(graph_sizes)
        graph_sizes.append(0)

        def run(*args: Any) -> Any:
            with OpCounter() as ops:
                result = module.forward(*args)
            graph_sizes[number] = ops.count
            calls.append(ops.count)
            return result

        return run

    already = len(torch._dynamo.utils.graph_break_reasons)
    compiled = torch.compile(model, backend=counting)
    for _ in range(2):  # the second call may compile more graphs: of a size that has changed, for example
        compiled(*inputs)
    calls.clear()
    compiled(*inputs)
    with OpCounter() as eager:
        model(*inputs)
    reasons = [reason.reason.strip().partition("\n")[0] for reason in torch._dynamo.utils.graph_break_reasons[already:]]
    captured = sum(calls)
    return Capture(
        len(graph_sizes),
        len(calls),
        captured / len(calls) if calls else 0.0,
        max(graph_sizes, default=0),
        eager.count,
        captured / eager.count if eager.count else 0.0,
        dict(Counter(reasons)),
    )


def forget_sizes() -> None:
    """Make TorchDynamo forget which sizes it has seen change, so that what one engine has met does not alter another's graphs. Compiled
    code stays."""
    with contextlib.suppress(ImportError, AttributeError):
        from torch._dynamo.pgo import reset_code_state

        reset_code_state()
