"""Finds the values of a functional graph that are views of an input after a chain of writes to parts of that input.

Functionalization turns `c[0, :, 3] = k` into reads and writes of whole tensors:

    part = select(select(c, 0, 0), 1, 3);  new = copy(part, k)
    row = select_scatter(select(c, 0, 0), new, 1, 3)
    c' = select_scatter(c, row, 0, 0)

Each of these values is a view of c after some writes to views of c: `part` after no write, and the other values after one write, a `copy_`
of k to the view `part`. This module derives the *state* of each node: the view and the writes. A state describes only the elements of a
node's result, not its memory: the result may be a copy.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch.fx import Graph, Node

from ...capture.graph import add_call
from ...lowering.kernel_refusals import refusal_of_node
from ...torch_ops import aten

_IDENTITIES = (aten.alias.default, aten.detach.default, aten.clone.default)
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
# View ops that return several views.
_SPLITS = (aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int)
# The view op of each scatter op. The scatter op returns its operand with this view replaced; both ops take the same further arguments.
_SCATTERS = {
    aten.select_scatter.default: aten.select.int,
    aten.slice_scatter.default: aten.slice.Tensor,
    aten.diagonal_scatter.default: aten.diagonal.default,
}
# Ops that overwrite their whole operand, each with its in-place variant.
_OVERWRITES = {
    aten.copy.default: aten.copy_.default,
    aten.fill.Scalar: aten.fill_.Scalar,
    aten.fill.Tensor: aten.fill_.Tensor,
    aten.zero.default: aten.zero_.default,
}
# Ops that write to positions given by index tensors, each with its in-place variant.
_INDEXED = {
    aten.index_copy.default: aten.index_copy_.default,
    aten.index_put.default: aten.index_put_.default,
    aten.index_add.default: aten.index_add_.default,
    aten.index_fill.int_Scalar: aten.index_fill_.int_Scalar,
    aten.scatter.src: aten.scatter_.src,
    aten.scatter.value: aten.scatter_.value,
    aten.scatter_add.default: aten.scatter_add_.default,
}

# Identifies a view of one tensor: sizes, strides and storage offset.
_Spec = tuple[Any, ...]


@dataclass(frozen=True)
class ViewOp:
    """One view of a tensor, as the call of an op.

    Attributes:
        op: the view op.
        args: the arguments after the tensor.
        item: the index of the view if the op returns several views, else None.
    """

    op: Any
    args: tuple[Any, ...]
    item: int | None = None


@dataclass(frozen=True)
class InputView:
    """A view of an input.

    Attributes:
        steps: the view ops that lead from the input to the view.
        specs: sizes, strides and offset of the input, and of the view after each step.
        value: a fake tensor with the view's metadata.
    """

    steps: tuple[ViewOp, ...]
    specs: tuple[_Spec, ...]
    value: torch.Tensor

    def lies_in(self, other: InputView) -> bool:
        """True if this view is `other` or is known to be a part of `other`: one of its steps led to `other`."""
        return other.specs[-1] in self.specs

    def is_same(self, other: InputView) -> bool:
        """True if two views of one input have the same elements in the same order."""
        return self.specs[-1] == other.specs[-1]

    @property
    def is_whole(self) -> bool:
        """True if the view is the whole input."""
        return self.specs[-1] == self.specs[0]

    def is_disjoint(self, other: InputView) -> bool:
        """True if two views of one input are known to share no element.

        Only the first step that differs is compared: both steps must select disjoint ranges of the same dimension.
        """
        for step, other_step, spec in zip(self.steps, other.steps, self.specs, strict=False):
            if step != other_step:
                sizes = spec[: len(spec) // 2]
                selected, other_selected = _selected_range(step, sizes), _selected_range(other_step, sizes)
                if selected is None or other_selected is None or selected[0] != other_selected[0]:
                    return False
                return selected[2] <= other_selected[1] or other_selected[2] <= selected[1]
        return False

    def with_step(self, step: ViewOp) -> InputView | None:
        """Returns the view after one more step, or None if the result of the step cannot be a view of the input's memory."""
        mode = detect_fake_mode(self.value)
        if mode is None:
            return None
        args = torch.fx.node.map_arg(step.args, lambda node: node.meta["val"])
        try:
            with mode, torch.no_grad():
                value = step.op(self.value, *args)
        except (RuntimeError, ValueError):  # for these strides, torch would have to copy
            return None
        value = value if step.item is None else value[step.item]
        spec = _spec(value)
        if spec in self.specs:  # the step undoes earlier steps, such as a second transpose of the same dimensions
            length = self.specs.index(spec)
            return InputView(self.steps[:length], self.specs[: length + 1], value)
        return InputView((*self.steps, step), (*self.specs, spec), value)


@dataclass(frozen=True, eq=False)
class Write:
    """A write to a view of an input, by one op of the functional graph.

    Attributes:
        node: the functional op's node.
        op: the in-place op that does the same write.
        view: the view of the input to which the op writes.
        args: the in-place op's arguments after its target.
        kwargs: the in-place op's keyword arguments.
    """

    node: Node
    op: Any
    view: InputView
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def is_indexed(self) -> bool:
        """True if index tensors give the written positions, so that the op checks indices."""
        return self.node.target in _INDEXED


@dataclass(frozen=True)
class WrittenView:
    """The state of a node: its value is a view of an input after writes to this input.

    Attributes:
        source: the input's node.
        writes: the writes, in the order in which they happen.
        view: the view of the input.
    """

    source: Node
    writes: tuple[Write, ...]
    view: InputView

    @property
    def visible_writes(self) -> tuple[Write, ...]:
        """The writes on which the value may depend: all except writes to views that are known to share no element with this view."""
        return tuple(write for write in self.writes if not write.view.is_disjoint(self.view))


def written_views(graph: Graph, inputs: Collection[Node]) -> dict[Node, WrittenView]:
    """Returns the state of each node whose value is a view of one of these inputs, before or after writes.

    Inputs whose elements may share memory are left out.
    """
    state_by_node: dict[Node, WrittenView] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            if node in inputs and _has_distinct_elements(node.meta["val"]):
                state_by_node[node] = WrittenView(node, (), InputView((), (_spec(node.meta["val"]),), node.meta["val"]))
        elif node.op == "call_function" and (state := _state(node, state_by_node)) is not None:
            state_by_node[node] = state
    return state_by_node


def reads_through_writes(node: Node) -> bool:
    """True if a node that has a state is a view of the result of a scatter op (`_SCATTERS`)."""
    source = node
    while source.target in _VIEWS or source.target is operator.getitem:
        source = source.args[0].args[0] if source.target is operator.getitem else source.args[0]
    return source is not node and source.target in _SCATTERS


def add_view(graph: Graph, view: InputView, source: Node, copies: Mapping[Node, Node]) -> Node:
    """Adds the view ops that lead from an input to a view of the input, and returns the node of the last op.

    Args:
        graph: the graph to change.
        view: the view.
        source: the input's node in the graph of `view`.
        copies: from the nodes of the graph of `view` to their copies in `graph`.
    """
    node = copies[source]
    for step in view.steps:
        node = add_call(graph, step.op, node, *torch.fx.node.map_arg(step.args, copies.__getitem__))
        node = node if step.item is None else add_call(graph, operator.getitem, node, step.item)
    return node


def _state(node: Node, earlier: dict[Node, WrittenView]) -> WrittenView | None:
    """Returns the state of a node's value from the states of earlier nodes; None if the node has no state."""
    op = node.target
    if op is operator.getitem:
        parts = node.args[0]
        if not isinstance(parts, Node) or parts.target not in _SPLITS or (base := earlier.get(parts.args[0])) is None or parts.kwargs:
            return None
        return _with_view(base, base.view.with_step(ViewOp(parts.target, tuple(parts.args[1:]), node.args[1])))
    base = earlier.get(node.args[0]) if node.args and isinstance(node.args[0], Node) else None
    if base is None:
        return None
    if op in _IDENTITIES:
        return base
    if op in _VIEWS:
        return _with_view(base, base.view.with_step(ViewOp(op, tuple(node.args[1:])))) if not node.kwargs else None
    if op in _SCATTERS and not node.kwargs:
        return _state_of_scatter(node, base, earlier)
    if op in _OVERWRITES and not base.view.is_whole:
        return _after_write(base, Write(node, _OVERWRITES[op], base.view, tuple(node.args[1:]), dict(node.kwargs)))
    if op in _INDEXED and _accepts_in_place(node):
        return _after_write(base, Write(node, _INDEXED[op], base.view, tuple(node.args[1:]), dict(node.kwargs)))
    return None


def _with_view(state: WrittenView, view: InputView | None) -> WrittenView | None:
    """Returns the state after the same writes with another view; None if there is no such view."""
    return WrittenView(state.source, state.writes, view) if view is not None else None


def _after_write(state: WrittenView, write: Write) -> WrittenView:
    return WrittenView(state.source, (*state.writes, write), state.view)


def _state_of_scatter(node: Node, base: WrittenView, earlier: dict[Node, WrittenView]) -> WrittenView | None:
    """Returns the state of a scatter op's result: `base` with one view replaced.

    If the replacement is the same view after further writes to this view, the result is `base` after these writes. Any other replacement is
    a `copy_` to the view.
    """
    part, args = node.args[1], tuple(node.args[2:])
    view = base.view.with_step(ViewOp(_SCATTERS[node.target], args))
    if view is None or not isinstance(part, Node):
        return None
    state = earlier.get(part)
    count = len(base.writes)
    if (
        state is not None
        and state.source is base.source
        and state.writes[:count] == base.writes
        and state.view.is_same(view)
        and all(write.view.lies_in(view) for write in state.writes[count:])
    ):
        return WrittenView(base.source, state.writes, base.view)
    return _after_write(base, Write(node, aten.copy_.default, view, (part,), {}))


def _accepts_in_place(node: Node) -> bool:
    """True if torch's in-place op accepts the operands of a node in each call in which the indices pass the program's checks."""
    is_put = node.target is aten.index_put.default
    index_args, others = (node.args[1], node.args[2:]) if is_put else (node.args[2:3], node.args[3:])
    indices, dtype = _tensors(index_args), node.args[0].meta["val"].dtype
    dtypes = {item.dtype for item in indices}
    has_safe_indices = dtypes == {torch.int64} or (is_put and dtypes == {torch.bool} and len(indices) == 1)
    return has_safe_indices and all(item.dtype == dtype for item in _tensors(others)) and not refusal_of_node(node)


def _selected_range(step: ViewOp, sizes: Sequence[Any]) -> tuple[int, int, int] | None:
    """Returns the dimension of a `select` or `slice`, the start of the selected range, and an upper bound of its end.

    None for other ops, and if the range depends on a symbolic size.
    """
    if step.op is aten.select.int:
        dim, start = step.args
        end = start + 1 if isinstance(start, int) and start != -1 else None
    elif step.op is aten.slice.Tensor:
        dim, start, end = (*step.args, *(0, None, None)[len(step.args) :])[:3]
    else:
        return None
    size = sizes[dim]
    start, end = (size if item is None and is_end else item or 0 for is_end, item in enumerate((start, end)))
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
    """Returns a number that can be compared without a guard: the expression of a symbolic number, any other number as it is."""
    return value.node.expr if isinstance(value, torch.SymInt) else value


def _has_distinct_elements(value: Any) -> bool:
    """True for a strided tensor without stride 0, and without the conjugate or negative bit."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.is_conj() or value.is_neg():
        return False
    pairs: Sequence[tuple[Any, Any]] = list(zip(map(_number, value.shape), map(_number, value.stride()), strict=True))
    return not any(step == 0 and size != 1 for size, step in pairs)
