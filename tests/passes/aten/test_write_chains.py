"""Tests of passes/aten/write_chains.py: values that are views of an input, before or after writes, are recognized."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx

from dynaxla.passes.aten.write_chains import WrittenView, written_views

aten = torch.ops.aten


def view_of_result(function: Callable[..., Tensor], *args: Tensor) -> WrittenView | None:
    """Returns the description of a function's result as a view of its first input after writes; None if it is no such view."""
    module = make_fx(function, tracing_mode="fake")(*args)
    first = next(iter(module.graph.nodes))
    found = written_views(module.graph, {first})
    result = module.graph.output_node().args[0]
    assert isinstance(result, Node)
    return found.get(result)


def steps(state: WrittenView | None) -> list[tuple[str, list[str]]]:
    """Returns the writing ops, each with the views that select the written part."""
    assert state is not None
    return [(write.op._schema.name[6:], [step.op._schema.name[6:] for step in write.view.steps]) for write in state.writes]


def nested(c: Tensor, x: Tensor) -> Tensor:
    row = aten.select_scatter(c[0], aten.copy(c[0][1], x), 0, 1)
    return aten.select_scatter(c, row, 0, 0)


def through_transpose(c: Tensor, x: Tensor) -> Tensor:
    transposed = aten.transpose(c, 0, 2)
    return aten.transpose(aten.slice_scatter(transposed, aten.fill(transposed[1:], 2.0), 0, 1), 0, 2)


def two_writes(c: Tensor, x: Tensor) -> Tensor:
    after = aten.index_copy(c, 0, torch.ops.aten.select(torch.zeros_like(c), 0, 0).long()[0, :1], aten.unsqueeze(c[0], 0))
    return aten.slice_scatter(after, aten.zero(after[1:]), 0, 1)


def changed_and_moved(c: Tensor, x: Tensor) -> Tensor:
    """A part is changed, and put back at another position."""
    return aten.select_scatter(c, aten.fill(c[0], 1.0), 0, 1)


def moved(c: Tensor, x: Tensor) -> Tensor:
    """An unchanged part is put at another position."""
    return aten.select_scatter(c, c[0], 0, 1)


def old_row(c: Tensor, x: Tensor) -> Tensor:
    """The old first row is put back after a change."""
    old, after = c[0], aten.select_scatter(c, aten.fill(c[0], 1.0), 0, 0)
    return aten.select_scatter(after, old, 0, 0)


def part_of_changed_rows(c: Tensor, x: Tensor) -> Tensor:
    """Two rows are changed, and one of them is put back into the old value."""
    after = aten.slice_scatter(c, aten.fill(c[:2], 1.0), 0, 0, 2)
    return aten.select_scatter(c, after[0], 0, 0)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (nested, [("copy_", ["select", "select"])]),
        (through_transpose, [("fill_", ["transpose", "slice"])]),
        (two_writes, [("index_copy_", []), ("zero_", ["slice"])]),
        (changed_and_moved, [("copy_", ["select"])]),
        (moved, [("copy_", ["select"])]),
        (old_row, [("fill_", ["select"]), ("copy_", ["select"])]),
        (part_of_changed_rows, [("copy_", ["select"])]),
    ],
)
def test_recognized_values(function: Callable[..., Tensor], expected: list[tuple[str, list[str]]]) -> None:
    args = torch.randn(3, 4, 5), torch.randn(5)
    state = view_of_result(function, *args)
    assert state is not None
    assert state.view.is_whole
    assert steps(state) == expected


@pytest.mark.parametrize(
    "function",
    [
        lambda c, x: c + 1,
        lambda c, x: aten.copy(c, c * 2),
        lambda c, x: aten.select_scatter(c * 1, x.expand(4, 5), 0, 0),
        lambda c, x: aten.index_copy(c, 0, torch.zeros(1, dtype=torch.int64), c[:1].double().float()).expand(2, 5, 4, 5),
        lambda c, x: aten.index_put(c, [x > 0, torch.zeros(1, dtype=torch.int64)], x[0]),
        lambda c, x: aten.view(aten.clone(aten.transpose(c, 0, 1), memory_format=torch.contiguous_format), [4, 25]),
    ],
)
def test_other_values(function: Callable[..., Tensor]) -> None:
    assert view_of_result(function, torch.randn(5, 4, 5), torch.randn(5)) is None


def test_views_that_cancel_out_are_removed() -> None:
    state = view_of_result(lambda c: c.transpose(0, 1).transpose(0, 1)[1].unsqueeze(0)[0], torch.randn(3, 4))
    assert state is not None
    assert [step.op for step in state.view.steps] == [aten.select.int]


@pytest.mark.parametrize("shared", [torch.zeros(1).expand(4), torch.zeros(3, 1).expand(3, 2)])
def test_input_whose_elements_share_memory_is_not_recognized(shared: Tensor) -> None:
    assert view_of_result(lambda c: c[0], shared) is None
