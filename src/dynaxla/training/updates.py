"""In-place updates at the end of a step. torch's own kernels run them after the program has succeeded.

XLA cannot write to torch's memory. New parameters and optimizer state would be results of the program, which torch would copy to the old
tensors. Such copies take twice the memory, and nearly twice the passes over memory, of torch's fused steps. So an update is taken out of
the program if no later op in the program reads the tensors that the update writes. The program then ends with the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from ..guards.dispatch import written_arguments
from ..guards.object_graph import storage_of
from ..runtime import devices
from ..torch_ops import aten
from .fused_steps import FusedStep
from .traced_numbers import is_number

_COUNT_UPDATES = {aten.add_.Tensor, aten._foreach_add_.Scalar, aten._foreach_add_.Tensor}
# Moving averages of parameters. They read the parameters that the optimizer writes, so they can only run after the optimizer's updates.
_MOVING_AVERAGES = {aten.lerp_.Scalar, aten._foreach_lerp_.Scalar}
_ZERO_FILLS = {aten.zero_.default, aten._foreach_zero_.default}
# Ops that make a new tensor for a later update to fill, such as SGD's first momentum.
_STATE_CREATING_OPS = {aten.empty_like.default, aten.detach.default}


@dataclass(frozen=True)
class InplaceUpdate:
    """A call of a torch op that writes in place, or that makes a tensor for a later update to write to.

    Attributes:
        node: the recorded node.
        op: torch's op.
        args: its positional arguments. Nodes in them are inputs of the graph, results of the graph, or results of earlier updates.
        kwargs: its keyword arguments, with nodes as in `args`.
        strides: the strides that the op expects, by the node of a tensor.
        written: the nodes whose memory the op writes.
    """

    node: Node
    op: torch._ops.OpOverloadPacket
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    strides: Mapping[Node, tuple[int, ...]]
    written: Sequence[Node]

    def nodes(self) -> list[Node]:
        """Returns the nodes among the op's arguments."""
        found: list[Node] = []
        map_arg((self.args, dict(self.kwargs)), found.append)
        return found

    def run(self, value_of: Callable[[Node], Any], failed: torch.Tensor | None = None) -> Any:
        """Runs the update in eager mode, and returns the op's result.

        Args:
            value_of: returns the tensor of a node.
            failed: float32[], which only the device reads: if it is 1, no existing tensor is written. None: the program has succeeded.
        """
        copies: dict[Node, torch.Tensor] = {}

        def with_strides(node: Node) -> Any:
            value, strides = value_of(node), self.strides.get(node)
            if strides is None or value.stride() == strides or _has_strides(value, strides):
                return value
            copies[node] = torch.empty_strided(value.shape, self.strides[node], dtype=value.dtype, device=value.device).copy_(value)
            return copies[node]

        args, kwargs = map_arg((self.args, dict(self.kwargs)), with_strides)
        result = self.op(*args, **kwargs) if failed is None else self._run_unless(failed, args, kwargs, value_of)
        for node in copies.keys() & set(self.written):
            value_of(node).copy_(copies[node])
        return result

    def _run_unless(self, failed: torch.Tensor, args: Any, kwargs: Any, value_of: Callable[[Node], Any]) -> Any:
        """Runs the op so that it writes nothing if `failed` is 1. torch's fused steps have the argument `found_inf` for this purpose."""
        if isinstance(self.node.target, FusedStep):
            found = kwargs.get("found_inf")
            return self.op(*args, **{**kwargs, "found_inf": failed if found is None else torch.maximum(found, failed)})
        if self.node.target in _ZERO_FILLS:
            for node in self.written:
                value = value_of(node)
                value.masked_fill_(failed.to(value.device) == 0, 0)
            return None
        if self.node.target in _COUNT_UPDATES and (found := self._add_unless(failed, *args, **kwargs)) is not None:
            return found[0]
        before = {node: value_of(node).clone() for node in self.written}
        result = self.op(*args, **kwargs)
        for node, old in before.items():
            value = value_of(node)
            value.copy_(torch.where(failed.to(value.device) == 0, value, old))
        # A new tensor is set to zero, because the fused step that would fill it may write nothing.
        return result.zero_() if self.node.target is aten.empty_like.default else result

    def _add_unless(self, failed: torch.Tensor, counts: Any, other: Any, *, alpha: float = 1) -> tuple[Any] | None:
        """Adds a number, or 0 if `failed` is 1, to all counts, with one kernel.

        Returns: the op's result in a tuple; None if the addition would not be exact, and then nothing has been added.
        """
        tensors = counts if isinstance(counts, (list, tuple)) else [counts]
        device, dtype = tensors[0].device, tensors[0].dtype
        # torch adds a Python number to a half-type tensor in float32. The number as a half-type tensor would lose precision.
        if isinstance(other, torch.Tensor) or dtype.itemsize < 4 or any((item.device, item.dtype) != (device, dtype) for item in tensors):
            return None
        step = torch.full((), other * alpha, dtype=dtype, device=device)  # created on the device, without a synchronization
        # The overload is named: while torch tries overloads, it formats the tensor's value into an error message, which synchronizes.
        add = aten.add_.Tensor if tensors is not counts else aten._foreach_add_.Tensor
        return (add(counts, torch.where(failed.to(device) == 0, step, 0)),)


def written_nodes(node: Node) -> list[Node]:
    """Returns the nodes of the tensors that a node writes to."""
    op = _op(node)
    if not isinstance(op, torch._ops.OpOverload):
        return []
    found = []
    for name, value in written_arguments(op, node.args, node.kwargs).items():
        # A fused step writes gradients only to divide them by `grad_scale`.
        is_unwritten = isinstance(node.target, FusedStep) and name == "grads" and node.kwargs.get("grad_scale") is None
        if not is_unwritten:
            found += [item for item in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(item, Node)]
    return found


def take_updates(graph: Graph, outputs: Collection[Node]) -> list[InplaceUpdate]:
    """Removes from a recorded graph the updates that can run after the graph, and returns these updates in their order.

    Args:
        graph: the graph, which has no output node yet.
        outputs: the nodes that will be the graph's outputs.
    """
    if any(devices.is_in_xla(node.meta["val"].device) for node in graph.nodes if isinstance(node.meta.get("val"), torch.Tensor)):
        return []  # on XLA devices a program writes in place
    output_nodes = set(outputs)
    kept_reads: set[int] = set()
    kept_writes: set[int] = set()
    deferred: list[Node] = []
    for node in reversed(graph.nodes):
        if node.op == "placeholder":
            continue
        targets = written_nodes(node)
        if targets and not node.users and _is_one_pass(node) and all(item.op == "placeholder" or item in output_nodes for item in targets):
            writes = _storages(targets)
            can_be_deferred = not writes & kept_reads and not writes & kept_writes and not _storages(node.all_input_nodes) & kept_writes
        else:
            can_be_deferred = node.target in _STATE_CREATING_OPS and bool(node.users) and node.users.keys() <= set(deferred)
        if can_be_deferred:
            deferred.append(node)
        else:
            kept_reads |= _storages(node.all_input_nodes)
            kept_writes |= _storages(targets)
    deferred.reverse()
    updates = _merge_count_updates(map(_update, deferred))
    for node in reversed(deferred):
        graph.erase_node(node)
    return updates


def _merge_count_updates(updates: Iterable[InplaceUpdate]) -> list[InplaceUpdate]:
    """Merges consecutive updates that add the same number to counts. Batch norms, for example, each add 1 to their count of batches."""
    found: list[InplaceUpdate] = []
    for update in updates:
        if found and _increment(update) is not None and _increment(update) == _increment(found[-1]):
            written = [*found[-1].written, *update.written]
            if len(_storages(written)) == len(written):
                number = update.args[1]
                found[-1] = InplaceUpdate(update.node, aten._foreach_add_.Scalar.overloadpacket, (written, number), {}, {}, written)
                continue
        found.append(update)
    return found


def _increment(update: InplaceUpdate) -> Any:
    """Returns the number that an update adds to a count, and the count's dtype and device; None for other updates."""
    if update.node.target is not aten.add_.Tensor or update.kwargs or isinstance(number := update.args[1], Node):
        return None
    return type(number), number, update.written[0].meta["val"].dtype, update.written[0].meta["val"].device


def _update(node: Node) -> InplaceUpdate:
    read = node.all_input_nodes if isinstance(node.target, FusedStep) else []
    strides = {item: item.meta["val"].stride() for item in read if not is_number(item)}
    return InplaceUpdate(node, _op(node).overloadpacket, node.args, node.kwargs, strides, written_nodes(node))


def _has_strides(tensor: torch.Tensor, strides: Sequence[int]) -> bool:
    """True if a tensor has these strides. The strides of dimensions of size 1 are not compared."""
    return all(size == 1 or own == wanted for size, own, wanted in zip(tensor.shape, tensor.stride(), strides, strict=True))


def _op(node: Node) -> Any:
    """Returns a node's ATen op: of a `FusedStep` or a function of traced_numbers.py, the op that it replaces."""
    return node.target.op if isinstance(node.target, FusedStep) else getattr(node.target, "stands_for", node.target)


def _is_one_pass(node: Node) -> bool:
    """True if torch runs a node in one pass over memory.

    Such nodes are additions to step counts, fused steps, moving averages of parameters, and fills of gradients with zeros.
    """
    if not isinstance(node.target, FusedStep):
        if node.target in _MOVING_AVERAGES:
            return all(item.op == "placeholder" for item in node.all_input_nodes)
        return node.target in _ZERO_FILLS or (
            node.target in _COUNT_UPDATES and not any(item.meta["val"].dim() for item in written_nodes(node))
        )
    # torch's CPU kernels assume that a parameter, its gradient and states have one dtype and one order of elements.
    lists: Any = [[item.meta["val"] for item in items] for items in node.args[: node.target.written_list_count] if items]
    return _supports_device(node, lists[0]) and all(
        len({(item.dtype, item.shape, item.stride(), item.device) for item in items}) == 1
        and aten.is_non_overlapping_and_dense.default(items[0])
        and (node.target.supports_half or items[0].itemsize >= 4)
        for items in zip(*lists, strict=True)
    )


def _supports_device(node: Node, params: Sequence[torch.Tensor]) -> bool:
    """True if the device's kernel supports a fused step's arguments.

    CPU kernels process one parameter after the other. The kernels of other devices need parameters of one dtype, float32 step counts, and
    all tensors on one device.
    """
    assert isinstance(node.target, FusedStep)
    device, dtype = params[0].device, params[0].dtype
    if device.type == "cpu":
        return True
    counts: Any = [item.meta["val"] for items in node.args[node.target.written_list_count :] for item in items]
    settings = [item.meta["val"] for item in node.kwargs.values() if isinstance(item, Node) and not is_number(item)]
    return (
        all(item.dtype == dtype for item in params)
        and all(item.dtype == torch.float32 for item in counts)
        and all(item.device == device for item in [*params, *counts, *settings])
    )


def _storages(nodes: Collection[Node]) -> set[int]:
    return {storage_of(node.meta["val"]) for node in nodes if "val" in node.meta}
