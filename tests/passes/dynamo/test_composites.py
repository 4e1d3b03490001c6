"""Ops that torch takes apart above autograd stay whole, and nothing tells it but the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import GraphModule, symbolic_trace
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dynaxla import backend
from dynaxla.observe import events
from dynaxla.passes.dynamo.composites import keep_composites
from support.comparisons.compare import assert_equal

IMAGES = (2, 3, 6, 7)
SCALED = {
    "nearest": lambda x: F.interpolate(x, scale_factor=1.7),
    "exact": lambda x: F.interpolate(x, (4, 9), mode="nearest-exact"),
    "bilinear": lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"),
    "corners": lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=True, recompute_scale_factor=True),
    "bicubic": lambda x: F.interpolate(x, (13, 5), mode="bicubic"),
    "antialiased": lambda x: F.interpolate(x, scale_factor=0.6, mode="bilinear", antialias=True),
    "line": lambda x: F.interpolate(x[0], scale_factor=3.0, mode="linear"),
    "volume": lambda x: F.interpolate(x[None], scale_factor=1.5, mode="trilinear"),
    "layer": torch.nn.Upsample(scale_factor=2, mode="bilinear"),
    "op": lambda x: torch._C._nn.upsample_nearest2d(x, [8, 8], None, None),
    "overload": lambda x: torch.ops.aten.upsample_bilinear2d.vec(x, None, False, [2.0, 2.0]),
    "hardshrink": F.hardshrink,
    "circular": lambda x: F.pad(x, (1, 7, 3, 0), mode="circular"),
    "circular volume": lambda x: F.pad(x, (0, 2, 1, 1), mode="circular")[0] * F.pad(x[:, None], (2, 0, 1, 1, 1, 2), "circular")[0, 0, 1],
    "wrapped and cut": lambda x: F.pad(x, (1, -2, 3, 0), mode="circular"),
    "softshrink": F.softshrink,
    "in a checkpoint": lambda x: checkpoint(lambda y: F.interpolate(y, scale_factor=2.0).sin(), x, use_reentrant=False),
    "under vmap": lambda x: torch.vmap(lambda y: F.interpolate(y[None], scale_factor=2.0)[0])(x),
}


OF_A_KIND = {"hardshrink": "aten.hardshrink", "softshrink": "aten.softshrink"}
PADDED = ("circular", "circular volume", "wrapped and cut")


def ops_of(function: Callable[..., Any], x: torch.Tensor, **settings: Any) -> list[str]:
    """The ops of the functional graphs. The compiled function does what eager mode does, and TorchDynamo's graph is as it was."""
    torch._dynamo.reset()
    graphs: list[tuple[GraphModule, list[Any]]] = []

    def counting(module: GraphModule, inputs: Any) -> Any:
        graphs.append((module, [node.target for node in module.graph.nodes]))
        return backend.dynaxla(module, inputs)

    def told(event: Any) -> None:
        if isinstance(event, events.GraphFunctionalized):
            ops.extend(event.ops)

    ops: list[str] = []
    found = []
    with events.listening(told):
        for call in (function, torch.compile(function, backend=counting, fullgraph=True, **settings)):
            leaf = x.clone().requires_grad_()
            out = call(leaf)
            (grad,) = torch.autograd.grad(out, leaf, out.detach().cos())
            found.append((out.detach(), grad))
    assert_equal(found[1], found[0])
    for module, targets in graphs:
        assert [node.target for node in module.graph.nodes] == targets
    return ops


@pytest.mark.sample(usual=4)
@pytest.mark.parametrize(
    ("name", "order"),
    [
        *((name, torch.contiguous_format) for name in SCALED if name not in PADDED),
        *((name, torch.channels_last) for name in ("nearest", "bilinear", "bicubic")),
    ],
)
def test_it_stays_whole(name: str, order: torch.memory_format) -> None:
    ops = ops_of(SCALED[name], torch.randn(IMAGES).to(memory_format=order))
    kind = OF_A_KIND.get(name, "upsample_")
    assert [op for op in ops if kind in op and "backward" not in op] != []
    assert [op for op in ops if kind in op and "backward" in op] != []
    assert [op for op in ops if "index" in op or "where" in op] == []


@pytest.mark.sample(usual=3)
@pytest.mark.parametrize("name", PADDED)
@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_circular_padding_is_concatenated(name: str, order: torch.memory_format) -> None:
    ops = ops_of(SCALED[name], torch.randn(IMAGES).to(memory_format=order))
    assert ("aten.cat.default" in ops) is (name != "wrapped and cut")


def test_sizes_that_are_symbols_are_taken_apart() -> None:
    ops = ops_of(SCALED["bilinear"], torch.randn(IMAGES), dynamic=True)
    assert [op for op in ops if "upsample" in op] == []


def test_without_gradients_and_in_halves() -> None:
    x = torch.randn(IMAGES, dtype=torch.bfloat16)
    with torch.no_grad():
        for name in ("nearest", "bilinear", "bicubic", "hardshrink"):
            torch._dynamo.reset()
            assert_equal(torch.compile(SCALED[name], backend="dynaxla")(x), SCALED[name](x))


def test_what_fails_leaves_the_graph_as_it_was() -> None:
    module = symbolic_trace(lambda x: F.interpolate(x, scale_factor=2.0))
    code = module.code
    seen = []

    def fail() -> None:
        with keep_composites(module):
            seen.append((module.code, module(torch.ones(IMAGES))))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert_equal(seen[0][1], torch.ones(2, 3, 12, 14))
    assert seen[0][0] != code == module.code
