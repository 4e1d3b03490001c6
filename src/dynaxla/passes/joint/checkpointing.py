"""Random ops in checkpointed regions: the backward graph recomputes these ops and must get the same random numbers.

torch's partitioner recognizes such ops by a tag. The partitioner makes the forward graph save the generator's state before each op, and the
backward graph draw from the saved state. torch's kernels run these nodes between programs (`uses_saved_state`), which gives eager mode's
numbers, as the option exact_rng requires. Without this option, a random op with a lowering is rewritten before the partitioner runs: as a
pure function of a random key, which the forward graph saves.
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


def uses_saved_state(node: Node) -> bool:
    """True if torch's partitioner made this node from a random op: the node saves the state and draws, or draws from a saved state."""
    return node.target in (run_and_save_rng_state, run_with_rng_state)


def key_recomputed_ops(joint: GraphModule, platform: str, exact_rng: bool) -> None:
    """Rewrites random ops that the backward graph recomputes as nodes with the target `keyed`.

    A node that draws no random numbers, such as attention without dropout, gets the target `keyed` without a key, so that torch's
    partitioner does not treat the node as random. `finish_partitioned` restores the node's op.

    Args:
        joint: the joint graph of the forward and the backward pass, which is changed.
        platform: the platform of the programs.
        exact_rng: the option exact_rng. If True, nodes that draw random numbers are not rewritten.
    """
    key_numbers = itertools.count()
    for node in list(joint.graph.nodes):
        if not _is_random_op(node) or node.meta.get("recompute") not in _RECOMPUTE_POLICIES:
            continue
        if not draws_random(node):
            _make_keyed(node, None)
        elif not exact_rng and _has_lowering(node, platform):
            with joint.graph.inserting_before(node):
                key = joint.graph.call_function(random_key, (next(key_numbers),), {"device": _device(node)})
            with detect_fake_mode(node.meta["val"]) or contextlib.nullcontext():
                key.meta = {"val": random_key(*key.args, **key.kwargs), "recompute": CheckpointPolicy.MUST_SAVE}
            _make_keyed(node, key)


@contextlib.contextmanager
def save_states_as_tensors(platform: str) -> Iterator[None]:
    """A context in which torch's partitioner saves generator states as tensors on every platform.

    By default, graphs on CUDA would have `torch.Generator` objects as inputs. On the CPU, torch saves tensors by default. There the setting
    is not changed, since before torch 2.12 all threads would see the change.
    """
    name = "graphsafe_rng_functionalization"
    with config.patch({name: False}) if platform != "cpu" and hasattr(config, name) else contextlib.nullcontext():
        yield


def finish_partitioned(module: GraphModule) -> None:
    """Restores the ops of `keyed` nodes without a key, and sets `meta["val"]` of the nodes that torch's partitioner has added."""
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
    lowering_rule = find_rule(node, platform)
    if lowering_rule is None:
        return False
    try:
        lowering_rule.bind(node.args, node.kwargs)
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
    """Returns a fake tensor for a generator's state. Its size is an int, even if torch's partitioner has made the size a symbol."""
    value = node.meta["val"]
    size = value.shape[0]
    fixed_size = size if isinstance(size, int) else size.node.hint
    with detect_fake_mode(value) or contextlib.nullcontext():
        return torch.empty((fixed_size,), dtype=value.dtype, device=value.device)
