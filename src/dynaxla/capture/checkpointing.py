"""Random draws in checkpointed regions, which the backward graph makes again with the same numbers.

torch's partitioner knows such draws by a tag. It has the forward graph save the generator's state before each of them, and the backward
graph restore it: work for torch between programs (`draws_by_state`), which option exact_rng wants. Else the draws that have a lowering
are written, before the partitioner sees them, as pure functions of a key, and the key is saved.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

import torch
from torch._functorch import config
from torch._guards import detect_fake_mode
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from ..errors import UnsupportedOp
from ..lowering.interpreter import draws_random, find_rule
from ..lowering.keyed import keyed, random_key

_COMPUTED_AGAIN = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def draws_by_state(node: Node) -> bool:
    """Whether a node draws as torch's partitioner wrote it: it saves the generator's state, or draws from a saved one."""
    return node.target in (run_and_save_rng_state, run_with_rng_state)


def give_keys(joint: GraphModule, platform: str, exact_rng: bool) -> None:
    """Write the draws that are computed again as functions of keys; and what only could draw, as attention without dropout, without one,
    so that torch's partitioner takes it for an op as any other. To be undone by `complete` in that case."""
    numbers = itertools.count()
    for node in list(joint.graph.nodes):
        if not _may_draw(node) or node.meta.get("recompute") not in _COMPUTED_AGAIN:
            continue
        if not draws_random(node):
            _wrap(node, None)
        elif not exact_rng and _has_lowering(node, platform):
            with joint.graph.inserting_before(node):
                key = joint.graph.call_function(random_key, (next(numbers),), {"device": _device(node)})
            with detect_fake_mode(node.meta["val"]) or contextlib.nullcontext():
                key.meta = {"val": random_key(*key.args, **key.kwargs), "recompute": CheckpointPolicy.MUST_SAVE}
            _wrap(node, key)


@contextlib.contextmanager
def states_as_tensors(platform: str) -> Iterator[None]:
    """Inside, torch's partitioner saves generators' states as tensors, on CUDA too, where else the graphs would get generators.

    Nothing is set for the CPU: before torch 2.12 all threads would see it.
    """
    name = "graphsafe_rng_functionalization"
    with config.patch({name: False}) if platform != "cpu" and hasattr(config, name) else contextlib.nullcontext():
        yield


def complete(module: GraphModule) -> None:
    """Of a graph that the partitioner made: ops without keys as they were, and what the nodes that it added give (`meta["val"]`)."""
    for node in list(module.graph.nodes):
        if node.target is keyed and node.args[1] is None:
            node.target, node.args = node.args[0], node.args[2:]
        elif node.target is run_and_save_rng_state:
            state, result = (next(user for user in node.users if user.args[1] == place) for place in (0, 1))
            state.meta["val"] = _state_like(state)
            node.meta["val"] = (state.meta["val"], result.meta["val"])
        elif node.target is run_with_rng_state:
            state, op, *args = node.args
            state.meta["val"] = _state_like(state)
            values, keywords = torch.fx.node.map_arg((tuple(args), node.kwargs), lambda source: source.meta["val"])
            with detect_fake_mode(values) or contextlib.nullcontext():
                node.meta["val"] = op(*values, **keywords)
    module.recompile()


def _may_draw(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def _has_lowering(node: Node, platform: str) -> bool:
    rule = find_rule(node, platform)
    if rule is None:
        return False
    try:
        rule.bind(node.args, node.kwargs)
    except UnsupportedOp:
        return False
    return True


def _wrap(node: Node, key: Node | None) -> None:
    node.args = (node.target, key, *node.args)
    node.target = keyed


def _device(node: Node) -> torch.device:
    value = node.meta["val"]
    return next(item.device for item in (value if isinstance(value, (tuple, list)) else [value]) if isinstance(item, torch.Tensor))


def _state_like(node: Node) -> torch.Tensor:
    """What a generator's state looks like. The partitioner makes its size a symbol, though it never changes."""
    value = node.meta["val"]
    size = value.shape[0]
    known = size if isinstance(size, int) else size.node.hint
    with detect_fake_mode(value) or contextlib.nullcontext():
        return torch.empty((known,), dtype=value.dtype, device=value.device)
