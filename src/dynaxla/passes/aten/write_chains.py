"""Finds the values of a functional graph that are views of an input after a chain of writes to parts of that input.

Functionalization turns `c[0, :, 3] = k` into reads and writes of whole tensors:

    part = select(select(c, 0, 0), 1, 3);  new = copy(part, k)
    row = select_scatter(select(c, 0, 0), new, 1, 3)
    c' = select_scatter(c, row, 0, 0)

Each of these values is a place (a view) of c after some writes to places of c: `part` after no write, the others after one, a `copy_` of k
to the place of `part`. This module derives that state node by node. It describes values only, not the memory that results lie in.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch.fx import Graph, Node

from ...lowering.kernel_refusals import reason
from ...torch_ops import aten

_SAME = (aten.alias.default, aten.detach.default, aten.clone.default)
_VIEWS = (
    aten.select.int,
    aten.slice.Tensor,
    aten.transpose.int,
    aten.t.default,
    aten.permute.default,
    aten.diagonal.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.view.default,
)
# Ops that return several views.
_SPLITS = (aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int)
# Scatter ops, each with its view op: the result is the operand with that view replaced. Both take the same further arguments.
_PUTS_BACK = {
    aten.select_scatter.default: aten.select.int,
    aten.slice_scatter.default: aten.slice.Tensor,
    aten.diagonal_scatter.default: aten.diagonal.default,
}
# Ops that overwrite their whole operand, each with its in-place variant.
_FILLS = {
    aten.copy.default: aten.copy_.default,
    aten.fill.Scalar: aten.fill_.Scalar,
    aten.fill.Tensor: aten.fill_.Tensor,
    aten.zero.default: aten.zero_.default,
}
# Ops that write to the positions that indices choose, each with its in-place variant.
_INDEXED = {
    aten.index_copy.default: aten.index_copy_.default,
    aten.index_put.default: aten.index_put_.default,
    aten.index_add.default: aten.index_add_.default,
    aten.index_fill.int_Scalar: aten.index_fill_.int_Scalar,
    aten.scatter.src: aten.scatter_.src,
    aten.scatter.value: aten.scatter_.value,
    aten.scatter_add.default: aten.scatter_add_.default,
}

# Identifies a place within one tensor: sizes, strides and offset.
_Spec = tuple[Any, ...]


@dataclass(frozen=True)
class ViewOp:
    """One view of a tensor, as the call of an op.

    Attributes:
        op: the view op.
        args: the arguments after the tensor.
        item: the index of the view if the op returns several, else None.
    """

    op: Any
    args: tuple[Any, ...]
    item: int | None = None


@dataclass(frozen=True)
class InputView:
    """A part of an input, reached by views.

    Attributes:
        steps: the views, from the input on.
        specs: sizes, strides and offset of the input and after each step.
        value: a fake tensor like the part.
    """

    steps: tuple[ViewOp, ...]
    specs: tuple[_Spec, ...]
    value: torch.Tensor

    def lies_in(self, other: InputView) -> bool:
        """True if this place is `other` or, as its steps show, a part of it."""
        return other.specs[-1] in self.specs

    def is_same(self, other: InputView) -> bool:
        return self.specs[-1] == other.specs[-1]

    @property
    def is_whole(self) -> bool:
        """True if the place is the whole input."""
        return self.specs[-1] == self.specs[0]

    def is_apart(self, other: InputView) -> bool:
        """True if the steps show that two places of one input share no element.

        Only the first step that differs is compared: both places must take parts of the same dimension there, without overlap.
        """
        for mine, theirs, spec in zip(self.steps, other.steps, self.specs, strict=False):
            if mine != theirs:
                sizes = spec[: len(spec) // 2]
                one, another = _chosen(mine, sizes), _chosen(theirs, sizes)
                if one is None or another is None or one[0] != another[0]:
                    return False
                return one[2] <= another[1] or another[2] <= one[1]
        return False

    def after(self, step: ViewOp) -> InputView | None:
        """Returns the place that a view of this one is, or None if the input's memory cannot be viewed so."""
        mode = detect_fake_mode(self.value)
        if mode is None:
            return None
        args = torch.fx.node.map_arg(step.args, lambda node: node.meta["val"])
        try:
            with mode, torch.no_grad():
                value = step.op(self.value, *args)
        except (RuntimeError, ValueError):  # these strides have no such view: torch would have to copy
            return None
        value = value if step.item is None else value[step.item]
        spec = _spec(value)
        if spec in self.specs:  # the step undoes earlier ones, as a second transpose does
            length = self.specs.index(spec)
            return InputView(self.steps[:length], self.specs[: length + 1], value)
        return InputView((*self.steps, step), (*self.specs, spec), value)


@dataclass(frozen=True, eq=False)
class Write:
    """The write of one op of the graph.

    Attributes:
        node: the op's node.
        op: the in-place variant of the op.
        place: the part of the input that is written.
        args: the arguments after the tensor that is written.
        kwargs: the keyword arguments.
    """

    node: Node
    op: Any
    place: InputView
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def is_indexed(self) -> bool:
        """True if the op writes by index, and so checks indices."""
        return self.node.target in _INDEXED


@dataclass(frozen=True)
class WrittenView:
    """A value that is a place of an input after writes.

    Attributes:
        source: the input's node.
        writes: the writes, in their order.
        place: the part of the input.
    """

    source: Node
    writes: tuple[Write, ...]
    place: InputView

    @property
    def seen(self) -> tuple[Write, ...]:
        """The writes that the value may depend on: all but those to places that are known to be disjoint from this one."""
        return tuple(write for write in self.writes if not write.place.is_apart(self.place))


def states(graph: Graph, inputs: Collection[Node]) -> dict[Node, WrittenView]:
    """Returns the state of every value that is a place of one of these inputs after writes.

    An input whose elements share memory has no states.
    """
    found: dict[Node, WrittenView] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            if node in inputs and _has_memory_of_its_own(node.meta["val"]):
                found[node] = WrittenView(node, (), InputView((), (_spec(node.meta["val"]),), node.meta["val"]))
        elif node.op == "call_function" and (state := _state(node, found)) is not None:
            found[node] = state
    return found


def reads_through_writes(node: Node) -> bool:
    """True if a node that has a state is a view of the result of a scatter op (`_PUTS_BACK`)."""
    source = node
    while source.target in _VIEWS or source.target is operator.getitem:
        source = source.args[0].args[0] if source.target is operator.getitem else source.args[0]
    return source is not node and source.target in _PUTS_BACK


def call(graph: Graph, op: Any, *args: Any) -> Node:
    """Adds the call of an op at the graph's insertion point, with its fake value."""
    node = graph.call_function(op, args)
    values = torch.fx.node.map_arg(args, lambda source: source.meta["val"])
    with detect_fake_mode(values) or contextlib.nullcontext(), torch.no_grad():
        node.meta["val"] = op(*values)
    return node


def viewed_at(graph: Graph, place: InputView, source: Node, copies: Mapping[Node, Node]) -> Node:
    """Adds the views that lead from an input to a place of it, and returns the last one.

    copies: the nodes of `graph` for those of the place's graph.
    """
    view = copies[source]
    for step in place.steps:
        view = call(graph, step.op, view, *torch.fx.node.map_arg(step.args, copies.__getitem__))
        view = view if step.item is None else call(graph, operator.getitem, view, step.item)
    return view


def _state(node: Node, found: dict[Node, WrittenView]) -> WrittenView | None:
    op = node.target
    if op is operator.getitem:
        parts = node.args[0]
        if not isinstance(parts, Node) or parts.target not in _SPLITS or (base := found.get(parts.args[0])) is None or parts.kwargs:
            return None
        return _at(base, base.place.after(ViewOp(parts.target, tuple(parts.args[1:]), node.args[1])))
    base = found.get(node.args[0]) if node.args and isinstance(node.args[0], Node) else None
    if base is None:
        return None
    if op in _SAME:
        return base
    if op in _VIEWS:
        return _at(base, base.place.after(ViewOp(op, tuple(node.args[1:])))) if not node.kwargs else None
    if op in _PUTS_BACK and not node.kwargs:
        return _put_back(node, base, found)
    if op in _FILLS and not base.place.is_whole:
        return _written(base, Write(node, _FILLS[op], base.place, tuple(node.args[1:]), dict(node.kwargs)))
    if op in _INDEXED and _takes(node):
        return _written(base, Write(node, _INDEXED[op], base.place, tuple(node.args[1:]), dict(node.kwargs)))
    return None


def _at(state: WrittenView, place: InputView | None) -> WrittenView | None:
    return WrittenView(state.source, state.writes, place) if place is not None else None


def _written(state: WrittenView, write: Write) -> WrittenView:
    return WrittenView(state.source, (*state.writes, write), state.place)


def _put_back(node: Node, base: WrittenView, found: dict[Node, WrittenView]) -> WrittenView | None:
    """Returns the state of a scatter op's result: `base` with one part replaced.

    If the new part is the old one after further writes to it, the result has these writes. Any other value counts as a `copy_` to the part.
    """
    part, args = node.args[1], tuple(node.args[2:])
    place = base.place.after(ViewOp(_PUTS_BACK[node.target], args))
    if place is None or not isinstance(part, Node):
        return None
    state = found.get(part)
    count = len(base.writes)
    if (
        state is not None
        and state.source is base.source
        and state.writes[:count] == base.writes
        and state.place.is_same(place)
        and all(write.place.lies_in(place) for write in state.writes[count:])
    ):
        return WrittenView(base.source, state.writes, base.place)
    return _written(base, Write(node, aten.copy_.default, place, (part,), {}))


def _takes(node: Node) -> bool:
    """True if torch's in-place op accepts the operands of a program's op whenever their indices pass the program's checks."""
    is_put = node.target is aten.index_put.default
    chosen, others = (node.args[1], node.args[2:]) if is_put else (node.args[2:3], node.args[3:])
    indices, dtype = _tensors(chosen), node.args[0].meta["val"].dtype
    kinds = {item.dtype for item in indices}
    is_known = kinds == {torch.int64} or (is_put and kinds == {torch.bool} and len(indices) == 1)
    return is_known and all(item.dtype == dtype for item in _tensors(others)) and not reason(node)


def _chosen(step: ViewOp, sizes: Sequence[Any]) -> tuple[int, int, int] | None:
    """Returns the dimension that a `select` or `slice` takes a part of, the part's start, and an upper bound of its end.

    None if they are not known.
    """
    if step.op is aten.select.int:
        dim, start = step.args
        end = start + 1 if isinstance(start, int) and start != -1 else None
    elif step.op is aten.slice.Tensor:
        dim, start, end = (*step.args, *(0, None, None)[len(step.args) :])[:3]
    else:
        return None
    size = sizes[dim]
    start, end = (size if item is None and at else item or 0 for at, item in enumerate((start, end)))
    start, end = (item + size if isinstance(item, int) and item < 0 else item for item in (start, end))
    return (dim % len(sizes), start, end) if isinstance(start, int) and isinstance(end, int) else None


def _tensors(args: Any) -> list[torch.Tensor]:
    values = [node.meta.get("val") for node in _nodes(args)]
    return [value for value in values if isinstance(value, torch.Tensor)]


def _nodes(args: Any) -> list[Node]:
    found: list[Node] = []
    torch.fx.node.map_arg(args, found.append)
    return found


def _spec(value: torch.Tensor) -> _Spec:
    return tuple(map(_number, (*value.shape, *value.stride(), value.storage_offset())))


def _number(value: Any) -> Any:
    """Returns a number that is comparable without a guard: the expression of a symbol, any other number as it is."""
    return value.node.expr if isinstance(value, torch.SymInt) else value


def _has_memory_of_its_own(value: Any) -> bool:
    """True for a strided tensor whose elements are not known to share memory, with neither the conjugate nor the negative bit."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.is_conj() or value.is_neg():
        return False
    pairs: Sequence[tuple[Any, Any]] = list(zip(map(_number, value.shape), map(_number, value.stride()), strict=True))
    return not any(step == 0 and size != 1 for size, step in pairs)
