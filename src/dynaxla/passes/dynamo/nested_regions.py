"""Inlines regions of `torch.compiler.nested_compile_region` that write to their operands.

TorchDynamo captures a region once, and the graph calls the region with the op `invoke_subgraph`. If a region writes to an operand, such as
a key/value cache or a batch norm's running statistics, AOTAutograd generates an op that copies whole tensors, and refuses the region if
gradients are needed. So these regions are inlined before AOTAutograd traces the graph, and repeated_blocks.py finds the repeated blocks as
in any other graph. A region that does not write to an operand stays a region.
"""

from __future__ import annotations

import contextlib
import operator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node

from ...lowering.interpreter import constant_value
from ...runtime import private

_INVOKE_SUBGRAPH = torch.ops.higher_order.invoke_subgraph


def inline_writing_regions(module: GraphModule) -> None:
    """Inlines the regions that write to an operand, in a TorchDynamo graph and in the subgraphs of its ops, such as checkpointed code."""
    if _inline_within(module, set()):
        module.recompile()


def _inline_within(module: GraphModule, visited: set[GraphModule]) -> bool:
    """Inlines regions in a module's graph, without recompiling the module's code.

    visited: the visited submodules.
    Returns: True if a region was inlined.
    """
    for source in module.graph.find_nodes(op="get_attr"):
        called = constant_value(module, source)
        if isinstance(called, GraphModule) and called not in visited:
            visited.add(called)
            _inline_within(called, visited)
            called.recompile()  # always: TorchDynamo inlines a region with a single call without recompiling the code
    has_writes: dict[GraphModule, bool] = {}
    for call in module.graph.find_nodes(op="call_function", target=_INVOKE_SUBGRAPH):
        source = call.args[0]
        region = constant_value(module, source)
        if region not in has_writes:
            has_writes[region] = _writes_to_operand(region)
        if has_writes[region]:
            _inline(module, call, region)
            if not source.users:
                module.graph.erase_node(source)
    return any(has_writes.values())


def _writes_to_operand(region: GraphModule) -> bool:
    """True if a region writes to an operand: if a run on fake tensors increases the version counter of an operand.

    False if the region cannot run on fake tensors.
    """
    values = [node.meta.get("example_value") for node in region.graph.find_nodes(op="placeholder")]
    fake_operands = [value for value in values if isinstance(value, FakeTensor)]
    if not fake_operands:
        return False
    mode = fake_operands[0].fake_mode
    ignore_new_symbols = mode.shape_env.ignore_fresh_unbacked_symbols() if mode.shape_env is not None else contextlib.nullcontext()
    with contextlib.suppress(Exception), torch.inference_mode(False), torch.no_grad(), mode, ignore_new_symbols:
        # New fake tensors with their own memory, so that no other code changes their version counters.
        operands = [torch.empty_like(value) if isinstance(value, torch.Tensor) else value for value in values]
        tensors = [value for value in operands if isinstance(value, torch.Tensor)]
        before = list(map(private.version_of, tensors))
        region(*operands)
        return list(map(private.version_of, tensors)) != before
    return False


def _inline(module: GraphModule, call: Node, region: GraphModule) -> None:
    """Replaces a call of a region by copies of the region's nodes."""
    graph = module.graph
    copies: dict[Node, Any] = dict(zip(region.graph.find_nodes(op="placeholder"), call.args[2:], strict=True))
    with graph.inserting_before(call):
        for node in region.graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            copies[node] = graph.node_copy(node, copies.__getitem__)
            if node.op in ("get_attr", "call_module"):
                copies[node].target = _attribute_name(module, constant_value(region, node))
    results: Any = torch.fx.node.map_arg(region.graph.output_node().args[0], copies.__getitem__)
    for item in list(call.users):
        assert item.target is operator.getitem
        result = results[item.args[1]]
        for user in list(item.users):
            arguments = user.args, user.kwargs
            user.args, user.kwargs = torch.fx.node.map_arg(arguments, lambda node, item=item, to=result: to if node is item else node)
        graph.erase_node(item)
    graph.erase_node(call)


def _attribute_name(module: GraphModule, value: Any) -> str:
    """Returns the name of the module's attribute with this value. Adds an attribute if the module has none."""
    for name, existing in (*module.named_children(), *module.named_parameters(), *module.named_buffers(), *vars(module).items()):
        if existing is value:
            return name
    number = len(module.graph.nodes)
    while hasattr(module, name := f"of_region_{number}"):
        number += 1
    setattr(module, name, value)
    return name
