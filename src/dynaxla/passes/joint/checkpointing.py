"""Random ops in checkpointed regions: the backward graph recomputes these ops and must get the same random numbers.

torch's partitioner recognizes such ops by a tag. The partitioner makes the forward graph save the generator's state before each op, and the
backward graph restore the state. torch runs these nodes between programs (`draws_by_state`), as the option exact_rng requires. Without this
option, a random op with a lowering is rewritten before the partitioner runs, as a pure function of a key, and the forward graph saves the
key.
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

from ...errors import UnsupportedOp
from ...lowering.interpreter import draws_random, find_rule
from ...lowering.keyed_random import keyed, random_key

_RECOMPUTE_POLICIES = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def draws_by_state(node: Node) -> bool:
    """True if torch's partitioner made this node from a random op: the node saves the generator's state, or draws from a saved state."""
    return node.target in (run_and_save_rng_state, run_with_rng_state)


def key_draws(joint: GraphModule, platform: str, exact_rng: bool) -> None:
    """Rewrites the random ops that the backward graph recomputes as `keyed` calls.

    A call that draws no random numbers, such as attention without dropout, is rewritten without a key, so that torch's partitioner treats
    the call as deterministic. `complete` restores the op of such a call.
    """
    numbers = itertools.count()
    for node in list(joint.graph.nodes):
        if not _is_random_op(node) or node.meta.get("recompute") not in _RECOMPUTE_POLICIES:
            continue
        if not draws_random(node):
            _make_keyed(node, None)
        elif not exact_rng and _has_lowering(node, platform):
            with joint.graph.inserting_before(node):
                key = joint.graph.call_function(random_key, (next(numbers),), {"device": _device(node)})
            with detect_fake_mode(node.meta["val"]) or contextlib.nullcontext():
                key.meta = {"val": random_key(*key.args, **key.kwargs), "recompute": CheckpointPolicy.MUST_SAVE}
            _make_keyed(node, key)


@contextlib.contextmanager
def states_as_tensors(platform: str) -> Iterator[None]:
    """Makes torch's partitioner save generator states as tensors also on CUDA, where graphs would otherwise receive generators.

    Changes no setting for the CPU: before torch 2.12, a changed setting is visible to all threads.
    """
    name = "graphsafe_rng_functionalization"
    with config.patch({name: False}) if platform != "cpu" and hasattr(config, name) else contextlib.nullcontext():
        yield


def complete(module: GraphModule) -> None:
    """Finishes a graph of the partitioner: restores ops without keys, and sets `meta["val"]` of the nodes that the partitioner added."""
    for node in list(module.graph.nodes):
        if node.target is keyed and node.args[1] is None:
            node.target, node.args = node.args[0], node.args[2:]
        elif node.target is run_and_save_rng_state:
            state, result = (next(user for user in node.users if user.args[1] == index) for index in (0, 1))
            state.meta["val"] = _fake_state(state)
            node.meta["val"] = (state.meta["val"], result.meta["val"])
        elif node.target is run_with_rng_state:
            state, op, *args = node.args
            state.meta["val"] = _fake_state(state)
            values, keywords = torch.fx.node.map_arg((tuple(args), node.kwargs), lambda source: source.meta["val"])
            with detect_fake_mode(values) or contextlib.nullcontext():
                node.meta["val"] = op(*values, **keywords)
    module.recompile()


def _is_random_op(node: Node) -> bool:
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


def _make_keyed(node: Node, key: Node | None) -> None:
    node.args = (node.target, key, *node.args)
    node.target = keyed


def _device(node: Node) -> torch.device:
    value = node.meta["val"]
    return next(item.device for item in (value if isinstance(value, (tuple, list)) else [value]) if isinstance(item, torch.Tensor))


def _fake_state(node: Node) -> torch.Tensor:
    """Returns a fake tensor for a generator's state. The size is fixed, although the partitioner's node may have a symbol."""
    value = node.meta["val"]
    size = value.shape[0]
    fixed_size = size if isinstance(size, int) else size.node.hint
    with detect_fake_mode(value) or contextlib.nullcontext():
        return torch.empty((fixed_size,), dtype=value.dtype, device=value.device)
