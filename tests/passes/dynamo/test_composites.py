"""Tests of passes/dynamo/composites.py: ops that torch decomposes above autograd are traced whole, and TorchDynamo's graph is restored."""

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
    "circular and cut": lambda x: F.pad(x, (1, -2, 3, 0), mode="circular"),
    "softshrink": F.softshrink,
    "in a checkpoint": lambda x: checkpoint(lambda y: F.interpolate(y, scale_factor=2.0).sin(), x, use_reentrant=False),
    "under vmap": lambda x: torch.vmap(lambda y: F.interpolate(y[None], scale_factor=2.0)[0])(x),
}


OP_NAMES = {"hardshrink": "aten.hardshrink", "softshrink": "aten.softshrink"}
PADDED = ("circular", "circular volume", "circular and cut")


def ops_of(function: Callable[..., Any], x: torch.Tensor, **settings: Any) -> list[str]:
    """Returns the ops of the functional graphs. Asserts that results equal eager mode's, and that TorchDynamo's graph is unchanged."""
    torch._dynamo.reset()
    graphs: list[tuple[GraphModule, list[Any]]] = []

    def counting(module: GraphModule, inputs: Any) -> Any:
        graphs.append((module, [node.target for node in module.graph.nodes]))
        return backend.dynaxla(module, inputs)

    def record_ops(event: Any) -> None:
        if isinstance(event, events.GraphFunctionalized):
            ops.extend(event.ops)

    ops: list[str] = []
    results = []
    with events.listening(record_ops):
        for call in (function, torch.compile(function, backend=counting, fullgraph=True, **settings)):
            leaf = x.clone().requires_grad_()
            out = call(leaf)
            (grad,) = torch.autograd.grad(out, leaf, out.detach().cos())
            results.append((out.detach(), grad))
    assert_equal(results[1], results[0])
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
def test_op_is_not_decomposed(name: str, order: torch.memory_format) -> None:
    ops = ops_of(SCALED[name], torch.randn(IMAGES).to(memory_format=order))
    kind = OP_NAMES.get(name, "upsample_")
    assert [op for op in ops if kind in op and "backward" not in op] != []
    assert [op for op in ops if kind in op and "backward" in op] != []
    assert [op for op in ops if "index" in op or "where" in op] == []


@pytest.mark.sample(usual=3)
@pytest.mark.parametrize("name", PADDED)
@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_circular_padding_is_concatenated(name: str, order: torch.memory_format) -> None:
    ops = ops_of(SCALED[name], torch.randn(IMAGES).to(memory_format=order))
    assert ("aten.cat.default" in ops) is (name != "circular and cut")


def test_ops_with_dynamic_sizes_are_decomposed() -> None:
    ops = ops_of(SCALED["bilinear"], torch.randn(IMAGES), dynamic=True)
    assert [op for op in ops if "upsample" in op] == []


def test_bfloat16_without_gradients() -> None:
    x = torch.randn(IMAGES, dtype=torch.bfloat16)
    with torch.no_grad():
        for name in ("nearest", "bilinear", "bicubic", "hardshrink"):
            torch._dynamo.reset()
            assert_equal(torch.compile(SCALED[name], backend="dynaxla")(x), SCALED[name](x))


def test_graph_is_restored_after_exception() -> None:
    module = symbolic_trace(lambda x: F.interpolate(x, scale_factor=2.0))
    code = module.code
    inside = []

    def fail() -> None:
        with keep_composites(module):
            inside.append((module.code, module(torch.ones(IMAGES))))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert_equal(inside[0][1], torch.ones(2, 3, 12, 14))
    assert inside[0][0] != code == module.code
