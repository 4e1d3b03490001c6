"""Changes of a part of a tensor, in place, as they were before functionalization made copies of them: gradients of Fourier transforms have
such, and zeros of which a part is filled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from ...torch_ops import aten

# What gives a tensor of its own, all of whose numbers are the same.
NEW = (
    aten.full.default, aten.zeros.default, aten.ones.default, aten.new_full.default, aten.new_zeros.default, aten.new_ones.default,
    aten.full_like.default, aten.zeros_like.default, aten.ones_like.default,
)  # fmt: skip

# Whose kernels always give memory of their own. Others may give an operand back where they have nothing to do.
_OWN = (*NEW, aten._fft_c2c.default, aten._fft_r2c.default, aten.clone.default)

# What puts a changed part back, and the view that shows the part.
_VIEWS = {aten.select_scatter.default: aten.select.int, aten.slice_scatter.default: aten.slice.Tensor}


@dataclass(frozen=True)
class Update:
    """A part that one op changes. Attributes: base (the whole); view (of the part); changed (the part behind the op); in_place (the op that
    changes the view itself)."""

    base: Node
    view: Node
    changed: Node
    in_place: torch._ops.OpOverload

    @property
    def operands(self) -> list[Node]:
        """What it is made of: the whole, and what changes the part."""
        return [self.base, *(node for node in self.changed.all_input_nodes if node is not self.view)]


def update_of(node: Node) -> Update | None:
    """What has become of a part that a node puts back, if nothing else sees the whole as it was, or the part alone; else None."""
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
        return Update(base, view, changed, in_place)
    return None


def in_place_of(node: Node) -> torch._ops.OpOverload | None:
    """The op that writes the node's result to its first operand; None if there is none, or the node uses that operand twice."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten" or target._schema.is_mutable:
        return None
    packet = getattr(torch.ops.aten, f"{target._schema.name.removeprefix('aten::')}_", None)
    found = getattr(packet, target._overloadname, None)
    uses = sum(operand is node.args[0] for operand in pytree.tree_leaves((node.args, node.kwargs))) if node.args else 0
    return found if found is not None and found._schema.is_mutable and uses == 1 else None


def are_alike(one: Node, other: Node) -> bool:
    """Whether their values are tensors of one layout, whatever symbols are."""
    mine, theirs = one.meta.get("val"), other.meta.get("val")
    if not (isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor)):
        return False
    if not all(isinstance(size, int) for size in (*mine.shape, *theirs.shape)):
        return False
    facts = [(tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in (mine, theirs)]
    return facts[0] == facts[1]


def write_in_place(graph: Graph) -> None:
    """Let ops write to tensors that nothing else reads: to a new one (see NEW), or to a part of one, and save a copy."""
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
    """Where a slice is: dimension, start, end, step."""
    return [*place, *[0, None, None, 1][len(place) :]]


def _are_of_a_kind(view: Node, changed: Node) -> bool:
    mine, theirs = view.meta.get("val"), changed.meta.get("val")
    if not (isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor)):
        return False
    return (mine.shape, mine.dtype, mine.device) == (theirs.shape, theirs.dtype, theirs.device)
