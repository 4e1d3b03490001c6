"""Random ops whose PRNG key is an explicit operand, so that a draw can be repeated.

The backward pass recomputes a checkpointed region, and must then draw the random numbers of the forward pass again. So a draw in such a
region is two nodes: `random_key`, whose value the forward graph passes to the backward graph, and `keyed`, the op as a pure function of the
key.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import torch
from jax import Array, lax
from torch.fx import Graph, GraphModule, Node

from .context import Context
from .ops.control_flow import Subgraph
from .registry import lowers

_library = torch.library.Library("dynaxla", "FRAGMENT")
_library.define("random_key(int number, *, Device device) -> Tensor")

# The argument `number` makes the keys of a graph distinct nodes: torch merges equal nodes.
random_key = torch.ops.dynaxla.random_key.default

KEY_SHAPE, KEY_DTYPE = (2,), torch.int32


@torch.library.register_fake("dynaxla::random_key", lib=_library)
def _fake_key(number: int, *, device: torch.device) -> torch.Tensor:
    return torch.empty(KEY_SHAPE, dtype=KEY_DTYPE, device=device)


@lowers(random_key)
def _random_key(number: int, ctx: Context) -> Array:
    return lax.bitcast_convert_type(jax.random.key_data(ctx.key()), np.int32)


def keyed(op: torch._ops.OpOverload, key: Any, *args: Any, **kwargs: Any) -> Any:
    """The target of a node that is evaluated as op(*args, **kwargs), with the value of a `random_key` as PRNG key.

    Only the interpreter evaluates such nodes. A call of this function raises.
    """
    raise AssertionError(f"{op} with a key can only be evaluated in a program")


def single_op_graph(node: Node) -> GraphModule:
    """Returns the op of a `keyed` node as a graph. Its inputs are the op's operands, in the order of `operands`."""
    op, _, *args = node.args
    graph = Graph()
    copies: dict[Node, Node] = {}
    for source in operands(node):
        copies[source] = graph.placeholder(source.name)
        copies[source].meta = dict(source.meta)
    mapped_args, mapped_kwargs = torch.fx.node.map_arg((tuple(args), dict(node.kwargs)), copies.__getitem__)
    result = graph.call_function(op, mapped_args, mapped_kwargs)
    result.meta = dict(node.meta)
    graph.output((result,))
    return GraphModule(torch.nn.Module(), graph)


def operands(node: Node) -> list[Node]:
    """Returns the nodes among the arguments of a `keyed` node's op, without duplicates."""
    found: dict[Node, None] = {}
    torch.fx.node.map_arg((node.args[2:], dict(node.kwargs)), lambda source: found.setdefault(source))
    return list(found)


def draw_keyed(graph: Subgraph, key: Array, inputs: Sequence[Any], ctx: Context) -> Any:
    """Returns, in a traced program, the value of a `keyed` node.

    Args:
        graph: The op's graph; see `single_op_graph`.
        key: The value of the `random_key`, int32[2].
        inputs: The values of the op's operands.
    """
    inner = ctx.nested(jax.random.wrap_key_data(lax.bitcast_convert_type(key, np.uint32), impl="threefry2x32"))
    (value,) = graph.run(inputs, inner)
    ctx.checks += inner.checks
    return value
