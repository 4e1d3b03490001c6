"""Restores in-place updates of tensors and of their slices, which functionalization has turned into copies.

Examples are gradients of Fourier transforms, and zeros of which a slice is filled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from ...torch_ops import aten

# Ops that return a new tensor of one repeated value.
NEW = (
    aten.full.default, aten.zeros.default, aten.ones.default, aten.new_full.default, aten.new_zeros.default, aten.new_ones.default,
    aten.full_like.default, aten.zeros_like.default, aten.ones_like.default,
)  # fmt: skip

# Ops whose kernels always return new memory. Other ops may return an operand if there is nothing to compute.
_OWN = (*NEW, aten._fft_c2c.default, aten._fft_r2c.default, aten.clone.default)

# The ops that write an updated slice back, and the view ops that take the slice.
_VIEWS = {aten.select_scatter.default: aten.select.int, aten.slice_scatter.default: aten.slice.Tensor}


@dataclass(frozen=True)
class SliceWrite:
    """An update of a slice of a tensor by one op.

    Attributes:
        base: the whole tensor.
        view: the slice of it.
        changed: the op's result, which is written back to base.
        in_place: the in-place overload of that op.
    """

    base: Node
    view: Node
    changed: Node
    in_place: torch._ops.OpOverload

    @property
    def operands(self) -> list[Node]:
        """The nodes that the update reads: the whole tensor, and the op's inputs other than the slice."""
        return [self.base, *(node for node in self.changed.all_input_nodes if node is not self.view)]


def update_of(node: Node) -> SliceWrite | None:
    """Returns the update of which `node` writes back the slice; None if there is none, or if other nodes read the old tensor or a slice."""
    if node.target not in _VIEWS:
        return None
    base, changed, *place = node.args
    if not (isinstance(base, Node) and isinstance(changed, Node) and changed.args and base.target in _OWN):
        return None
    view, in_place = changed.args[0], in_place_of(changed)
    if in_place is None or not (isinstance(view, Node) and view.target is _VIEWS[node.target] and view.args[0] is base):
        return None
    are_alone = set(base.users) == {view, node} and list(view.users) == [changed] and list(changed.users) == [node]
    is_same_place = _with_defaults(place) == _with_defaults(view.args[1:]) and not node.kwargs and not view.kwargs
    if are_alone and is_same_place and are_alike(base, node) and _are_of_a_kind(view, changed):
        return SliceWrite(base, view, changed, in_place)
    return None


def in_place_of(node: Node) -> torch._ops.OpOverload | None:
    """Returns the in-place overload of the node's op; None if there is none, or if the node reads its first operand twice."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten" or target._schema.is_mutable:
        return None
    packet = getattr(torch.ops.aten, f"{target._schema.name.removeprefix('aten::')}_", None)
    found = getattr(packet, target._overloadname, None)
    uses = sum(operand is node.args[0] for operand in pytree.tree_leaves((node.args, node.kwargs))) if node.args else 0
    return found if found is not None and found._schema.is_mutable and uses == 1 else None


def are_alike(one: Node, other: Node) -> bool:
    """True if both values are tensors of the same static shape, strides, dtype and device. False for symbolic sizes."""
    mine, theirs = one.meta.get("val"), other.meta.get("val")
    if not (isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor)):
        return False
    if not all(isinstance(size, int) for size in (*mine.shape, *theirs.shape)):
        return False
    facts = [(tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in (mine, theirs)]
    return facts[0] == facts[1]


def write_in_place(graph: Graph) -> None:
    """Replaces ops by their in-place overloads where no other node reads the operand: a new tensor (see NEW), or a slice of one.

    This changes `graph` and saves a copy for each such op.
    """
    for node in list(graph.nodes):
        if (update := update_of(node)) is not None:
            update.changed.target = update.in_place
            node.replace_all_uses_with(update.base)
            graph.erase_node(node)
            continue
        new = node.args[0] if node.args else None
        is_new = isinstance(new, Node) and new.target in NEW and list(new.users) == [node] and are_alike(new, node)
        if is_new and (in_place := in_place_of(node)) is not None:
            node.target = in_place


def _with_defaults(place: Any) -> list[Any]:
    """Returns the arguments of a slice (dim, start, end, step), with defaults for missing ones."""
    return [*place, *[0, None, None, 1][len(place) :]]


def _are_of_a_kind(view: Node, changed: Node) -> bool:
    mine, theirs = view.meta.get("val"), changed.meta.get("val")
    if not (isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor)):
        return False
    return (mine.shape, mine.dtype, mine.device) == (theirs.shape, theirs.dtype, theirs.device)
