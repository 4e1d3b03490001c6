"""Random draws in checkpointed regions: the backward graph recomputes them and must get the same numbers.

torch's partitioner recognizes such draws by a tag. It makes the forward graph save the generator's state before each draw, and the backward
graph restore it. torch does that work between programs (`draws_by_state`), as the option exact_rng requires. Without that option, draws
that have a lowering are rewritten before the partitioner runs, as pure functions of a key, and the key is saved.
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

_COMPUTED_AGAIN = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def draws_by_state(node: Node) -> bool:
    """True if torch's partitioner made this node of a draw: it saves the generator's state, or draws from a saved state."""
    return node.target in (run_and_save_rng_state, run_with_rng_state)


def key_draws(joint: GraphModule, platform: str, exact_rng: bool) -> None:
    """Rewrites the random ops that the backward graph recomputes as `keyed` calls.

    Draws become functions of keys. Random ops that draw nothing here, such as attention without dropout, are wrapped without a key, so that
    torch's partitioner treats them as deterministic; `complete` unwraps these.
    """
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
    """Makes torch's partitioner save generator states as tensors on CUDA, too, where graphs would otherwise receive generators.

    Sets nothing for the CPU: before torch 2.12 all threads would see the setting.
    """
    name = "graphsafe_rng_functionalization"
    with config.patch({name: False}) if platform != "cpu" and hasattr(config, name) else contextlib.nullcontext():
        yield


def complete(module: GraphModule) -> None:
    """Finishes a graph from the partitioner: unwraps ops without keys, and sets `meta["val"]` of the nodes that the partitioner added."""
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
    """Returns a fake tensor like a generator's state. The partitioner makes its size a symbol, though it never changes."""
    value = node.meta["val"]
    size = value.shape[0]
    known = size if isinstance(size, int) else size.node.hint
    with detect_fake_mode(value) or contextlib.nullcontext():
        return torch.empty((known,), dtype=value.dtype, device=value.device)
