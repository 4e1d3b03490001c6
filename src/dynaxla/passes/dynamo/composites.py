"""Preserves composite ops that torch decomposes under torch.compile whatever decompositions a backend asks for.

For resampling and two shrinking functions, torch has Python decompositions at the Autograd dispatch key. The decomposed gradient of
resampling is a scatter. With its own lowering (`lowering/ops/upsample.py`) or torch's kernel, the gradient takes a half to a sixth of that
time on the CPU. While AOTAutograd traces, calls of these functions in TorchDynamo's graph therefore run without torch's Python dispatcher;
torch's C++ code computes the same sizes as in eager mode. It does not support symbolic sizes: with these, the functions are decomposed.

Circular padding is composite in eager mode, too: torch copies into parts of a new tensor, and functionalization turns each copy into a
whole new tensor. Here it is made of concatenations. Products have derivatives of their own (product_derivatives.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from ...runtime import private
from . import product_derivatives

_RESAMPLES = ("upsample_", "_upsample_")
_SHRINKS = (torch.hardshrink, F.softshrink)
_SHRINKING_OPS = ("aten::hardshrink", "aten::softshrink")


@contextlib.contextmanager
def keep_composites(module: GraphModule) -> Iterator[None]:
    """Patches TorchDynamo's graph and its subgraphs, within the context, so that the calls of these functions are not decomposed."""
    graphs = [inner for inner in module.modules() if isinstance(inner, GraphModule)]
    nodes = {node: (node.op, node.target) for inner in graphs for node in inner.graph.nodes if _is_taken_apart(node)}
    changed = [inner for inner in graphs if not nodes.keys().isdisjoint(inner.graph.nodes)]
    try:
        for node, (op, target) in nodes.items():
            function = getattr(torch.Tensor, str(target)) if op == "call_method" else target
            node.op, node.target = "call_function", _whole(function)
        for inner in changed:
            inner.recompile()
        yield
    finally:
        for node, (op, target) in nodes.items():
            node.op, node.target = op, target
        for inner in changed:
            inner.recompile()


def _is_taken_apart(node: Node) -> bool:
    target: Any = node.target
    if node.op != "call_function":
        return node.op == "call_method" and target in ("prod", "cumprod")
    if isinstance(target, torch._ops.OpOverload):
        name = target._schema.name
        return name in _SHRINKING_OPS or (name.startswith(tuple(f"aten::{start}" for start in _RESAMPLES)) and "backward" not in name)
    if getattr(target, "__name__", "").startswith(_RESAMPLES):
        return getattr(target, "__module__", None) == private.NATIVE_FUNCTIONS
    return target is F.interpolate or target in _SHRINKS or target in _OTHERWISE


def _whole(function: Callable[..., Any]) -> Callable[..., Any]:
    run = _OTHERWISE.get(function, _below_python)

    def call(*args: Any, **kwargs: Any) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        sizes = [size for leaf in leaves if isinstance(leaf, torch.Tensor) for size in leaf.shape]
        # For tensors without elements, torch's fake implementations fail where eager mode returns an empty result.
        if 0 in sizes or any(isinstance(size, (torch.SymInt, torch.SymFloat)) for size in (*sizes, *leaves)):
            return function(*args, **kwargs)
        return run(function, *args, **kwargs)

    return call


def _below_python(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with private.without_python_dispatcher():
        return function(*args, **kwargs)


def _padded(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    given = dict(zip(("input", "pad", "mode", "value"), args, strict=False)) | kwargs
    x, pad = given["input"], given["pad"]
    places = list(zip(range(x.ndim - 1, 1, -1), pad[::2], pad[1::2], strict=False))
    is_plain = 2 * len(places) == len(pad) and len(places) == x.ndim - 2
    if given.get("mode") != "circular" or not is_plain or not all(0 <= side <= x.shape[dim] for dim, *sides in places for side in sides):
        return function(*args, **kwargs)
    for dim, before, behind in reversed(places):  # outer dimensions first: whole rows are copied at once
        size = x.shape[dim]
        x = torch.cat((x.narrow(dim, size - before, before), x, x.narrow(dim, 0, behind)), dim)
    return x.contiguous()


# The replacement of each function. It is called with the function and then the function's arguments.
_OTHERWISE: dict[Callable[..., Any], Callable[..., Any]] = {
    F.pad: _padded,
    **({private.native_pad: _padded} if private.native_pad is not None else {}),
    **dict.fromkeys((torch.prod, torch.Tensor.prod), product_derivatives.prod),
    **dict.fromkeys((torch.cumprod, torch.Tensor.cumprod), product_derivatives.cumprod),
}
