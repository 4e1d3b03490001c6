"""The tree of what lazy steps have recorded: where a tensor lies, which program serves a path, and how much is kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dynaxla.config import Options
from dynaxla.training.parts import Part
from dynaxla.training.traces import New, OpNode, Ref, Traces, View, extent, geometry, is_free_kind, number_arguments

aten = torch.ops.aten
X = torch.arange(12.0).view(3, 4)


@pytest.mark.parametrize(
    ("tensor", "wanted"),
    [(X, (0, 48)), (X[1:, ::2], (16, 44)), (X.t()[1], (4, 40)), (X[1, 2], (24, 28)), (X[:0], (0, 0)), (X[2:, 4:], (48, 48))],
)
def test_extent(tensor: torch.Tensor, wanted: tuple[int, int]) -> None:
    assert extent(geometry(tensor)) == wanted


def test_tensors_that_differ_lie_differently() -> None:
    number = torch.ones(2, dtype=torch.complex64)
    tensors = [X, X.t(), X[1:], X[:2], X.view(torch.int32), number, number.conj(), number.conj().imag, number.imag]
    assert len({geometry(tensor) for tensor in tensors}) == len(tensors)


def test_which_numbers_can_be_inputs() -> None:
    assert number_arguments(aten.add.Tensor) == {1, "other", "alpha", 0, "self"}
    assert number_arguments(aten._fused_adam_.default) >= {"lr"}
    assert number_arguments(aten.sum.dim_IntList) == frozenset()  # dims are no numbers to ATen
    assert [is_free_kind(value) for value in (1, 2.5, True, 1j, "1")] == [True, True, False, False, False]


def path(traces: Traces) -> OpNode:
    """x in slot 0: y = x * 2 in slot 1; y.t()[0] += 3.5."""
    whole = geometry(torch.empty(2, 3))
    turned, row = geometry(torch.empty(2, 3).t()), geometry(torch.empty(2, 3).t()[0])
    product = New(whole, torch.device("cpu"), 24)
    first = OpNode(traces.root, aten.mul.Tensor, (Ref(0, whole), 2.0), result=product, made=[1], roots=[(0, whole)], numbers=(2.0,))
    views = {
        (1, turned): View(aten.t.default, (), {}, whole, None),
        (1, row): View(aten.unbind.int, (0,), {}, turned, 0),
    }
    return OpNode(first, aten.add_.Tensor, (Ref(1, row), 3.5), views=views, numbers=(3.5,), free={0})


def test_a_path_is_a_program() -> None:
    """A write through views reaches what they are views of; a number that has changed is an input."""
    traces = Traces(Options())
    node = path(traces)
    assert [step.op for step in node.path()] == [aten.mul.Tensor, aten.add_.Tensor]
    x = torch.randn(2, 3)
    part = node.compile([1], 1, [x], [3.5], traces.options)
    for number in (3.5, 7.0):
        (result,) = part.run([x, number])
        expected = x * 2
        expected.t()[0] += number
        torch.testing.assert_close(result, expected)


def test_a_program_that_gives_enough_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Part, "compile", lambda self, options, values: None)
    traces = Traces(Options())
    node, x = path(traces), torch.ones(2, 3)
    none = node.compile([], 1, [x], [3.5], traces.options)
    assert node.program([], 1) is none
    assert node.program([1], 1) is None
    more = node.compile([1], 1, [x], [3.5], traces.options)
    assert node.program([], 1) is node.program([1], 1) is more
    assert node.program([1], 2) is None, "another number is an input now"


def test_what_is_kept_is_bounded() -> None:
    traces = Traces(Options(executables=1), most=20)
    nodes = [OpNode(traces.root) for _ in range(10)]
    for node in nodes:
        node.programs = {0: []}
        traces.used(node)
    assert [bool(node.programs) for node in nodes] == [False, False] + [True] * 8
    root = traces.root
    for node in nodes * 2:
        traces.add(node)
    traces.used(nodes[0])
    assert traces.root is root
    traces.add(nodes[0])
    traces.used(nodes[0])
    assert traces.root is not root


def test_programs_of_before_are_kept_where_they_are_used() -> None:
    traces = Traces(Options(executables=1))
    nodes: list[Any] = [OpNode(traces.root, programs={0: []}) for _ in range(9)]
    for node in nodes[:8]:
        traces.used(node)
    traces.used(nodes[0])
    traces.used(nodes[8])
    assert [bool(node.programs) for node in nodes[:3]] == [True, False, True]


def test_an_op_that_writes_elsewhere_at_each_call() -> None:
    """Two places have programs of their own, on the way from each node; other ops, and other sizes, are counted apart."""
    root, rest = OpNode(), (torch.float32, False, False)

    def is_too_many(offset: int, size: int = 1, slot: int = 0, op: Any = aten.copy_.default) -> bool:
        place = slot, (torch.Size([size]), (1,), offset, *rest)
        key = op, ((*place, "its root"), (7, geometry(X))), (), torch.float32
        return root.is_followed_by_too_many(op, key, frozenset([place]))

    assert [is_too_many(offset) for offset in (5, 6, 7, 8, 6)] == [False, False, True, True, False]
    assert not is_too_many(7, size=2)
    assert not is_too_many(7, slot=1)
    assert not is_too_many(7, op=aten.add_.Tensor)
    assert [root.is_followed_by_too_many(aten.relu.default, index, frozenset()) for index in range(17)] == [False] * 16 + [True]
