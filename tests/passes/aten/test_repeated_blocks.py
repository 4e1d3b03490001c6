"""Tests of passes/aten/repeated_blocks.py: equal blocks of a graph are found; blocks that differ are not equal. Nothing is compiled."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from dynaxla.lowering import SymbolValues
from dynaxla.passes.aten.repeated_blocks import Segment, split_into_segments
from support import internals

Step = Callable[[torch.Tensor, Sequence[torch.Tensor], int], torch.Tensor]
WEIGHTS = [torch.randn(4, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(12)]


@pytest.fixture(autouse=True)
def allow_small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    internals.repeated_blocks_of(monkeypatch, 1)


def segments_of(step: Step, count: int = 4, x: torch.Tensor | None = None, weights: list[torch.Tensor] = WEIGHTS) -> list[Segment] | None:
    """Returns the segments of a graph that runs the step for the numbers 0 to count - 1."""

    def function(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        for number in range(count):
            x = step(x, weights, number)
        return x.exp()

    module = make_fx(function, tracing_mode="fake")(torch.randn(3, 4) if x is None else x, *weights)
    nodes = [node for node in module.graph.nodes if node.op == "call_function"]
    segments = split_into_segments(nodes, SymbolValues(), lambda node: None)
    assert segments is None or [node for segment in segments for node in segment.nodes] == nodes
    return segments


def count_equal(step: Step, **given: Any) -> int:
    """Returns the maximum number of segments with the same structural key."""
    keys = [segment.structural_key for segment in segments_of(step, **given) or () if segment.structural_key is not None]
    return max(map(keys.count, keys), default=0)


def test_equal_blocks() -> None:
    segments = segments_of(lambda x, w, i: (x @ w[i]).relu() + x) or []
    assert [len(segment.nodes) for segment in segments] == [3, 3, 3, 3, 1]
    assert len({segment.structural_key for segment in segments[:4]}) == 1
    assert segments[4].structural_key is None
    assert [len(segment.inputs) for segment in segments] == [2, 2, 2, 2, 1]
    assert segments[1].inputs[0] is segments[0].nodes[-1]


def test_subgraph_computes_the_same_as_its_segment() -> None:
    first, *_ = segments_of(lambda x, w, i: (x @ w[i]).relu() + x) or []
    x = torch.randn(3, 4)
    assert [node.name for node in first.inputs] == ["arg0_1", "arg1_1"]
    added, product = first.subgraph([first.nodes[2], first.nodes[0]])(x, WEIGHTS[0])
    assert torch.equal(product, x @ WEIGHTS[0])
    assert torch.equal(added, product.relu() + x)


def test_two_kinds_of_blocks() -> None:
    segments = segments_of(lambda x, w, i: (x @ w[i]).relu() if i < 4 else (x @ w[i]).tanh() + x, count=8) or []
    keys = [segment.structural_key for segment in segments]
    assert sorted(keys.count(key) for key in {*keys} - {None}) == [4, 4]


def test_few_blocks_are_left_alone() -> None:
    assert segments_of(lambda x, w, i: (x @ w[i]).relu() + x, count=2) is None


def test_small_blocks_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(x: torch.Tensor, w: Sequence[torch.Tensor], i: int) -> torch.Tensor:
        return (x @ w[i]).relu() + x

    internals.repeated_blocks_of(monkeypatch, 4 * (12 + 16 + 12))
    assert segments_of(step) is not None
    internals.repeated_blocks_of(monkeypatch, 4 * (12 + 16 + 12) + 1)
    assert segments_of(step) is None
    internals.repeated_blocks_of(monkeypatch, 1)
    assert segments_of(lambda x, w, i: x.sin().cos() * 2) is None, "XLA fuses blocks without products"


@pytest.mark.parametrize(
    "step",
    [
        lambda x, w, i: (x @ w[i]) * (2.0 if i % 2 else 2.5),
        lambda x, w, i: (x @ w[i]) * (1.0 if i % 2 else 1),
        lambda x, w, i: (x @ w[i]) + (True if i % 2 else 1),
        lambda x, w, i: (x @ w[i]) + (0.0 if i % 2 else -0.0),
        lambda x, w, i: torch.softmax(x @ w[i], 0 if i % 2 else 1),
        lambda x, w, i: torch.sub(x @ w[i], x) if i % 2 else torch.sub(x, x @ w[i]),
        lambda x, w, i: (y := x @ w[i]) * y if i % 2 else (x @ w[i]) * x,
        lambda x, w, i: (x @ w[i]).sin() @ w[i] if i % 2 else (x @ w[i]).sin() @ w[i + 4],
        lambda x, w, i: (x @ w[i]) + torch.tensor([1.0, 2.0, 3.0, float(i % 2)]),
        lambda x, w, i: (x @ w[i]).to(torch.float64 if i % 2 else torch.float16).float(),
    ],
    ids=["number", "type", "bool", "sign", "dim", "operand order", "operand", "same-weight", "constant", "dtype"],
)
def test_different_blocks_are_not_equal(step: Step) -> None:
    """Every second block differs. Two blocks together are equal to the next two, but such a pair repeats too seldom."""
    assert count_equal(step) == 0
    assert count_equal(lambda x, w, i: step(x, w, 2 * i)) >= 3


def test_different_shapes_are_not_equal() -> None:
    """Each block has the same ops on half as many rows."""
    assert count_equal(lambda x, w, i: (x @ w[i])[: x.shape[0] // 2], x=torch.randn(64, 4)) == 0


def test_different_strides_are_not_equal() -> None:
    weights = [weight.t().contiguous().t() if number % 2 else weight for number, weight in enumerate(WEIGHTS)]
    assert count_equal(lambda x, w, i: (x @ w[i]).relu(), weights=weights) == 0
    assert count_equal(lambda x, w, i: (x @ w[2 * i]).relu(), weights=weights) == 4


def test_layouts_of_operands_are_compared() -> None:
    module = make_fx(lambda x, *w: (((x @ w[0]).relu() @ w[1]).relu() @ w[2]).relu(), tracing_mode="fake")(torch.randn(3, 4), *WEIGHTS[:3])
    nodes = [node for node in module.graph.nodes if node.op == "call_function"]
    assert split_into_segments(nodes, SymbolValues(), lambda node: None) is not None

    assert split_into_segments(nodes, SymbolValues(), lambda node: node.name == "arg2_1") is None


def test_inner_graphs_are_compared() -> None:
    """Two branches that read their inputs in a different order are not equal."""

    def step(x: torch.Tensor, w: Sequence[torch.Tensor], i: int, swapped: bool) -> torch.Tensor:
        y = x @ w[i]
        body = (lambda a, b: b - a) if swapped and i % 2 else (lambda a, b: a - b)
        return torch.cond(y.sum() > 0, body, lambda a, b: a + b, (x, y))

    assert count_equal(lambda x, w, i: step(x, w, i, False)) == 4
    assert count_equal(lambda x, w, i: step(x, w, i, True)) == 0


def test_cuts_minimize_values_between_blocks() -> None:
    """One value passes from block to block. The results of a layer norm stay in one block."""
    segments = segments_of(lambda x, w, i: x + torch.native_layer_norm(x, [4], w[10][0], w[11][0], 1e-5)[0] @ w[i]) or []
    assert [segment.structural_key is not None for segment in segments] == [True] * 4 + [False]
    for before, after in itertools.pairwise(segments[:4]):
        assert len(set(before.nodes) & set(after.inputs)) == 1
