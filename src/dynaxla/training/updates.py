"""Updates at the end of a step that torch's own kernels do in place, after the program has succeeded.

XLA cannot write to torch's memory: new parameters and optimizer state would be results of the program, which are then copied over the old
ones. That is twice the memory, and nearly twice the passes over it, of torch's fused steps. So where nothing in the step reads
any more what such an update writes, the program ends with the gradients, and torch does the update.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from .optimizers import Fused

aten = torch.ops.aten

_COUNTS = {aten.add_.Tensor, aten._foreach_add_.Scalar, aten._foreach_add_.Tensor}
_ZEROS = {aten.zero_.default, aten._foreach_zero_.default}
# How new state is made for an update to fill, such as SGD's first momentum.
_MAKERS = {aten.empty_like.default, aten.detach.default}


@dataclass(frozen=True)
class Update:
    """A call of one of torch's ops that writes in place, or makes a tensor for a later one to write to.

    Attributes: node (of the recording); op, args, kwargs (nodes in them stand for inputs of the graph, what it computes, and what
    earlier updates have made).
    """

    node: Node
    op: torch._ops.OpOverloadPacket
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def nodes(self) -> list[Node]:
        found: list[Node] = []
        map_arg((self.args, dict(self.kwargs)), found.append)
        return found

    def run(self, value_of: Callable[[Node], Any]) -> Any:
        args, kwargs = map_arg((self.args, dict(self.kwargs)), value_of)
        return self.op(*args, **kwargs)


def written(node: Node) -> list[Node]:
    """The nodes whose memory a node writes to."""
    op = _op(node)
    if not isinstance(op, torch._ops.OpOverload) or not op._schema.is_mutable:
        return []
    found = []
    for argument, value in zip(op._schema.arguments, node.args, strict=False):
        untouched = isinstance(node.target, Fused) and argument.name == "grads" and node.kwargs.get("grad_scale") is None
        if argument.alias_info is not None and argument.alias_info.is_write and not untouched:
            found += [item for item in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(item, Node)]
    return found


def take_updates(graph: Graph, outputs: Collection[Node]) -> list[Update]:
    """Take out of a recorded graph (which has no output node yet) the updates that can be done after it, in their order.

    outputs: what the graph will give.
    """
    kept_reads: set[int] = set()
    kept_writes: set[int] = set()
    taken: list[Node] = []
    for node in reversed(graph.nodes):
        if node.op == "placeholder":
            continue
        writes, reads = _storages(written(node)), _storages(node.all_input_nodes)
        can_wait = writes.isdisjoint(kept_reads | kept_writes) and reads.isdisjoint(kept_writes)
        lasting = all(item.op == "placeholder" or item in outputs for item in written(node))
        is_update = writes and can_wait and lasting and not node.users and _is_one_pass(node)
        if is_update or (node.target in _MAKERS and node.users and node.users.keys() <= set(taken)):
            taken.append(node)
        else:
            kept_reads |= reads
            kept_writes |= writes
    taken.reverse()
    updates = [Update(node, _op(node).overloadpacket, node.args, node.kwargs) for node in taken]
    for node in reversed(taken):
        graph.erase_node(node)
    return updates


def _op(node: Node) -> Any:
    return node.target.op if isinstance(node.target, Fused) else node.target


def _is_one_pass(node: Node) -> bool:
    """Whether torch does it in one pass over memory: a fused step, the step counts before it, gradients that are zeroed after it."""
    if not isinstance(node.target, Fused):
        return node.target in _ZEROS or (node.target in _COUNTS and not any(item.meta["val"].dim() for item in written(node)))
    # torch's kernels for the CPU read a parameter, its gradient and states as if all had one dtype and one order of elements.
    lists: Any = [items for items in node.args[: node.target.written] if items]
    return all(
        len({_description(item) for item in items}) == 1
        and aten.is_non_overlapping_and_dense.default(items[0].meta["val"])
        and (node.target.takes_halves or items[0].meta["val"].itemsize >= 4)
        for items in zip(*lists, strict=True)
    )


def _description(node: Node) -> Any:
    tensor = node.meta["val"]
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.device


def _storages(nodes: Collection[Node]) -> set[int]:
    return {node.meta["val"].untyped_storage()._cdata for node in nodes if "val" in node.meta}
