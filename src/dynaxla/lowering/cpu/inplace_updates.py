"""Restores in-place updates of tensors and of their slices, which functionalization has replaced by copies.

Examples are gradients of Fourier transforms, and a tensor of zeros with one slice filled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from ...torch_ops import aten

# Factory functions: ops that return a new tensor filled with one value.
FACTORY_OPS = (
    aten.full.default, aten.zeros.default, aten.ones.default, aten.new_full.default, aten.new_zeros.default, aten.new_ones.default,
    aten.full_like.default, aten.zeros_like.default, aten.ones_like.default,
)  # fmt: skip

# Ops whose kernels always allocate their result. Other ops may return an operand if there is nothing to compute.
_ALLOCATING = (*FACTORY_OPS, aten._fft_c2c.default, aten._fft_r2c.default, aten.clone.default)

# For each op that writes an updated slice back: the view op that takes the slice.
_VIEWS = {aten.select_scatter.default: aten.select.int, aten.slice_scatter.default: aten.slice.Tensor}


@dataclass(frozen=True)
class SliceWrite:
    """An update of a slice of a tensor by one op.

    Attributes:
        base: The node of the tensor.
        view: The node that takes the slice.
        result: The node of the op, whose result is written back to the slice.
        in_place: The in-place overload of the op.
    """

    base: Node
    view: Node
    result: Node
    in_place: torch._ops.OpOverload

    @property
    def operands(self) -> list[Node]:
        """The nodes that the update reads: the tensor, and the op's inputs other than the slice."""
        return [self.base, *(node for node in self.result.all_input_nodes if node is not self.view)]


def slice_write_of(node: Node) -> SliceWrite | None:
    """Returns the update of a slice that `node` writes back; None if there is none, or if other nodes read the old tensor or the slice."""
    if node.target not in _VIEWS:
        return None
    base, result, *slice_arguments = node.args
    if not (isinstance(base, Node) and isinstance(result, Node) and result.args and base.target in _ALLOCATING):
        return None
    view, in_place = result.args[0], inplace_overload(result)
    if in_place is None or not (isinstance(view, Node) and view.target is _VIEWS[node.target] and view.args[0] is base):
        return None
    are_only_users = set(base.users) == {view, node} and list(view.users) == [result] and list(result.users) == [node]
    is_same_slice = _with_defaults(slice_arguments) == _with_defaults(view.args[1:]) and not node.kwargs and not view.kwargs
    if are_only_users and is_same_slice and have_same_metadata(base, node) and _have_same_shape_and_dtype(view, result):
        return SliceWrite(base, view, result, in_place)
    return None


def inplace_overload(node: Node) -> torch._ops.OpOverload | None:
    """Returns the in-place overload of the node's op; None if there is none, or if the node reads its first operand twice."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten" or target._schema.is_mutable:
        return None
    packet = getattr(torch.ops.aten, f"{target._schema.name.removeprefix('aten::')}_", None)
    overload = getattr(packet, target._overloadname, None)
    uses = sum(operand is node.args[0] for operand in pytree.tree_leaves((node.args, node.kwargs))) if node.args else 0
    return overload if overload is not None and overload._schema.is_mutable and uses == 1 else None


def have_same_metadata(a: Node, b: Node) -> bool:
    """True if both values are tensors with the same static shape, strides, dtype and device."""
    first, second = a.meta.get("val"), b.meta.get("val")
    if not (isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor)):
        return False
    if not all(isinstance(size, int) for size in (*first.shape, *second.shape)):
        return False
    metadata = [(tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in (first, second)]
    return metadata[0] == metadata[1]


def write_in_place(graph: Graph) -> None:
    """Replaces ops by their in-place overloads if no other node reads the operand: a new tensor (see FACTORY_OPS), or a slice of one.

    Changes `graph`. Each replacement saves a copy.
    """
    for node in list(graph.nodes):
        if (update := slice_write_of(node)) is not None:
            update.result.target = update.in_place
            node.replace_all_uses_with(update.base)
            graph.erase_node(node)
            continue
        new = node.args[0] if node.args else None
        is_new = isinstance(new, Node) and new.target in FACTORY_OPS and list(new.users) == [node] and have_same_metadata(new, node)
        if is_new and (in_place := inplace_overload(node)) is not None:
            node.target = in_place


def _with_defaults(slice_arguments: Any) -> list[Any]:
    """Returns the arguments of a slice (dim, start, end, step), with defaults for missing ones."""
    return [*slice_arguments, *[0, None, None, 1][len(slice_arguments) :]]


def _have_same_shape_and_dtype(view: Node, result: Node) -> bool:
    first, second = view.meta.get("val"), result.meta.get("val")
    if not (isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor)):
        return False
    return (first.shape, first.dtype, first.device) == (second.shape, second.dtype, second.device)
