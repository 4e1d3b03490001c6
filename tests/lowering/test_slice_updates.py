"""Products with an updated tensor: they can read the old tensor and the new slices instead."""

from __future__ import annotations

import pytest
import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from cases.cache_readers import READERS, Inputs
from dynaxla.capture.decompositions import decompositions
from dynaxla.lowering import Context
from dynaxla.lowering.slice_updates import PRODUCTS, UpdatedOperand, updated_operand


def updated_operands(graph: GraphModule) -> list[UpdatedOperand]:
    """The updated operands of all products of a graph."""
    ctx, found = Context("cpu"), []
    for node in graph.graph.nodes:
        ctx.node = node
        found += [updated_operand(ctx, position) for position in PRODUCTS.get(node.target, ())]
    return [item for item in found if item is not None]


def graph_of(name: str) -> GraphModule:
    def run(*tensors: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        return READERS[name].run(Inputs(*tensors))

    with torch.no_grad():
        graph: GraphModule = make_fx(run, decompositions("cpu"), "fake")(*vars(Inputs.make(torch.float32)).values())
    return graph


@pytest.mark.parametrize("name", READERS)
def test_number_of_updated_operands(name: str) -> None:
    found = updated_operands(graph_of(name))
    assert len(found) == READERS[name].by_parts
    assert all(item.slice_count >= 4 for item in found)


def test_properties_of_updated_operands() -> None:
    scores, sums = updated_operands(graph_of("twice"))
    assert not scores.sums_slices
    assert sums.sums_slices
    for item in (scores, sums):
        assert [update.count for update in item.updates] == [2, 1]
        assert item.rows == 9  # three queries of each of three heads
        assert item.updates[0].base.op == "placeholder"
        assert not item.is_moved


def test_operands_in_rows_are_moved() -> None:
    assert all(item.is_moved for item in updated_operands(graph_of("in rows")))
