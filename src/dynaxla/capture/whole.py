"""Keeps ops whole that torch takes apart under torch.compile, whatever decompositions a backend asks for.

For resampling and two shrinking functions torch has decompositions in Python at the dispatch key of autograd. In such terms a gradient of
resampling is a scatter: on the CPU, with its own lowering (`lowering/ops/upsample.py`) or torch's kernel, it takes a half to a sixth of the
time. While AOTAutograd traces, calls of these functions in TorchDynamo's graph run without torch's dispatcher in Python; torch's own C++
computes the same sizes as eager mode. Where sizes are symbols, which that cannot do, they are taken apart.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from ..runtime import private

_RESAMPLES = ("upsample_", "_upsample_")
_SHRINKS = (torch.hardshrink, F.softshrink)
_SHRINKING_OPS = ("aten::hardshrink", "aten::softshrink")


@contextlib.contextmanager
def kept_whole(module: GraphModule) -> Iterator[None]:
    """Inside, TorchDynamo's graph calls these functions, and those that its ops call, so that they stay whole."""
    graphs = [inner for inner in module.modules() if isinstance(inner, GraphModule)]
    nodes = {node: node.target for inner in graphs for node in inner.graph.nodes if node.op == "call_function" and _is_taken_apart(node)}
    changed = [inner for inner in graphs if not nodes.keys().isdisjoint(inner.graph.nodes)]
    try:
        for node, function in nodes.items():
            node.target = _whole(function)
        for inner in changed:
            inner.recompile()
        yield
    finally:
        for node, function in nodes.items():
            node.target = function
        for inner in changed:
            inner.recompile()


def _is_taken_apart(node: Node) -> bool:
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        name = target._schema.name
        return name in _SHRINKING_OPS or (name.startswith(tuple(f"aten::{start}" for start in _RESAMPLES)) and "backward" not in name)
    if getattr(target, "__name__", "").startswith(_RESAMPLES):
        return getattr(torch._C._nn, target.__name__, None) is target
    return target is F.interpolate or target in _SHRINKS


def _whole(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        sizes = [size for leaf in leaves for size in (leaf.shape if isinstance(leaf, torch.Tensor) else [leaf])]
        if any(isinstance(size, (torch.SymInt, torch.SymFloat)) for size in sizes):
            return function(*args, **kwargs)
        with private.without_python_dispatcher():
            return function(*args, **kwargs)

    return call
