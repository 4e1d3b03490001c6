"""Puts regions of `torch.compiler.nested_compile_region` that write to what they get in the place of their calls.

TorchDynamo captures such a region once, and the graph calls it by the op `invoke_subgraph`. Of calls that write, such as to a key/value
cache or to a batch norm's running statistics, AOTAutograd makes an op that copies whole tensors, and with gradients it refuses them. A
region's code means the same in place of its calls: so that is where it is put before AOTAutograd sees the graph, and equal blocks are found
as in any other graph. A region that writes nothing stays a region.
"""

from __future__ import annotations

import contextlib
import operator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node

from ..lowering.interpreter import constant_value
from ..runtime import private

_CALL = torch.ops.higher_order.invoke_subgraph


def inline_writing_regions(module: GraphModule) -> None:
    """Change a graph of TorchDynamo's, and what its ops call (as checkpointed code): no region is called that writes to an operand."""
    if _inline_within(module, set()):
        module.recompile()


def _inline_within(module: GraphModule, done: set[GraphModule]) -> bool:
    """Change the graph, not its code. done: modules that have been looked at. Returns: whether it had calls of regions that write."""
    for source in module.graph.find_nodes(op="get_attr"):
        called = constant_value(module, source)
        if isinstance(called, GraphModule) and called not in done:
            done.add(called)
            _inline_within(called, done)
            called.recompile()  # TorchDynamo, too, puts a region with one call in its place, and leaves the code as it was
    writing: dict[GraphModule, bool] = {}
    for call in module.graph.find_nodes(op="call_function", target=_CALL):
        source = call.args[0]
        region = constant_value(module, source)
        if region not in writing:
            writing[region] = _writes(region)
        if writing[region]:
            _inline(module, call, region)
            if not source.users:
                module.graph.erase_node(source)
    return any(writing.values())


def _writes(region: GraphModule) -> bool:
    """Whether a region changes a tensor that it is given: run on fake tensors, it changes their versions. One that cannot be is left."""
    values = [node.meta.get("example_value") for node in region.graph.find_nodes(op="placeholder")]
    fakes = [value for value in values if isinstance(value, FakeTensor)]
    if not fakes:
        return False
    mode = fakes[0].fake_mode
    symbols = mode.shape_env.ignore_fresh_unbacked_symbols() if mode.shape_env is not None else contextlib.nullcontext()
    with contextlib.suppress(Exception), torch.inference_mode(False), torch.no_grad(), mode, symbols:
        # Of the same kind, in memory of their own: these versions are nobody else's.
        given = [torch.empty_like(value) if isinstance(value, torch.Tensor) else value for value in values]
        tensors = [value for value in given if isinstance(value, torch.Tensor)]
        before = list(map(private.version_of, tensors))
        region(*given)
        return list(map(private.version_of, tensors)) != before
    return False


def _inline(module: GraphModule, call: Node, region: GraphModule) -> None:
    """Put a region's nodes in front of a call, and their results in place of what the call gives."""
    graph = module.graph
    copies: dict[Node, Any] = dict(zip(region.graph.find_nodes(op="placeholder"), call.args[2:], strict=True))
    with graph.inserting_before(call):
        for node in region.graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            copies[node] = graph.node_copy(node, copies.__getitem__)
            if node.op in ("get_attr", "call_module"):
                copies[node].target = _adopted(module, constant_value(region, node))
    results: Any = torch.fx.node.map_arg(region.graph.output_node().args[0], copies.__getitem__)
    for item in list(call.users):
        assert item.target is operator.getitem
        result = results[item.args[1]]
        for user in list(item.users):
            given = user.args, user.kwargs
            user.args, user.kwargs = torch.fx.node.map_arg(given, lambda node, item=item, to=result: to if node is item else node)
        graph.erase_node(item)
    graph.erase_node(call)


def _adopted(module: GraphModule, value: Any) -> str:
    """The name under which a module has an attribute of a region's, from now on at least."""
    for name, known in (*module.named_children(), *module.named_parameters(), *module.named_buffers(), *vars(module).items()):
        if known is value:
            return name
    number = len(module.graph.nodes)
    while hasattr(module, name := f"of_region_{number}"):
        number += 1
    setattr(module, name, value)
    return name
