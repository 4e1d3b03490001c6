"""Preserves composite functions that torch.compile always decomposes, even if the backend's table of decompositions lacks them.

For resampling, hardshrink and softshrink, torch has Python decompositions at the Autograd dispatch key. The decomposed gradient of
resampling is a scatter. On the CPU, the gradient's own lowering (`lowering/ops/upsample.py`) or torch's kernel takes a half to a sixth of
the scatter's time. So these functions run without torch's Python dispatcher while AOTAutograd traces TorchDynamo's graph, and torch's C++
code traces the same ops as in eager mode. The C++ code does not support symbolic sizes: with symbolic sizes, the functions are decomposed.

Two kinds of functions are replaced. Circular padding is decomposed in eager mode, too: torch copies into parts of a new tensor, and
functionalization would turn each copy into a whole new tensor. Concatenations replace the copies. Products get derivatives of their own
(product_derivatives.py).
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

_RESAMPLING_PREFIXES = ("upsample_", "_upsample_")
_SHRINKING_FUNCTIONS = (torch.hardshrink, F.softshrink)
_SHRINKING_OPS = ("aten::hardshrink", "aten::softshrink")


@contextlib.contextmanager
def keep_composites(module: GraphModule) -> Iterator[None]:
    """A context in which TorchDynamo's graph and its subgraphs call functions that are not decomposed. On exit, the graphs are restored."""
    graphs = [inner for inner in module.modules() if isinstance(inner, GraphModule)]
    originals = {node: (node.op, node.target) for inner in graphs for node in inner.graph.nodes if _is_decomposed(node)}
    changed = [inner for inner in graphs if not originals.keys().isdisjoint(inner.graph.nodes)]
    try:
        for node, (op, target) in originals.items():
            function = getattr(torch.Tensor, str(target)) if op == "call_method" else target
            node.op, node.target = "call_function", _undecomposed(function)
        for inner in changed:
            inner.recompile()
        yield
    finally:
        for node, (op, target) in originals.items():
            node.op, node.target = op, target
        for inner in changed:
            inner.recompile()


def _is_decomposed(node: Node) -> bool:
    """True if a node calls a function that torch.compile would decompose and that this module preserves or replaces."""
    target: Any = node.target
    if node.op != "call_function":
        return node.op == "call_method" and target in ("prod", "cumprod")
    if isinstance(target, torch._ops.OpOverload):
        name = target._schema.name
        return name in _SHRINKING_OPS or (
            name.startswith(tuple(f"aten::{start}" for start in _RESAMPLING_PREFIXES)) and "backward" not in name
        )
    if getattr(target, "__name__", "").startswith(_RESAMPLING_PREFIXES):
        return getattr(target, "__module__", None) == private.NATIVE_FUNCTIONS
    return target is F.interpolate or target in _SHRINKING_FUNCTIONS or target in _REPLACEMENTS


def _undecomposed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that calls `function` without its decomposition, or calls its replacement.

    With symbolic sizes, or for tensors without elements, the returned function calls `function` itself.
    """
    run = _REPLACEMENTS.get(function, _without_python_dispatcher)

    def call(*args: Any, **kwargs: Any) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        sizes = [size for leaf in leaves if isinstance(leaf, torch.Tensor) for size in leaf.shape]
        # For tensors without elements, torch's fake implementations fail where eager mode returns an empty result.
        if 0 in sizes or any(isinstance(size, (torch.SymInt, torch.SymFloat)) for size in (*sizes, *leaves)):
            return function(*args, **kwargs)
        return run(function, *args, **kwargs)

    return call


def _without_python_dispatcher(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with private.without_python_dispatcher():
        return function(*args, **kwargs)


def _circular_pad(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Pads circularly by concatenations. For other modes and unusual sizes, calls `function`: F.pad or its C++ implementation."""
    arguments = dict(zip(("input", "pad", "mode", "value"), args, strict=False)) | kwargs
    x, pad = arguments["input"], arguments["pad"]
    sides_by_dim = list(zip(range(x.ndim - 1, 1, -1), pad[::2], pad[1::2], strict=False))
    is_plain = 2 * len(sides_by_dim) == len(pad) and len(sides_by_dim) == x.ndim - 2
    if arguments.get("mode") != "circular" or not is_plain:
        return function(*args, **kwargs)
    if not all(0 <= side <= x.shape[dim] for dim, *sides in sides_by_dim for side in sides):
        return function(*args, **kwargs)
    for dim, before, after in reversed(sides_by_dim):  # outer dimensions first: whole rows are copied at once
        size = x.shape[dim]
        x = torch.cat((x.narrow(dim, size - before, before), x, x.narrow(dim, 0, after)), dim)
    return x.contiguous()


# The replacement of each function. A replacement takes the function and the function's arguments.
_REPLACEMENTS: dict[Callable[..., Any], Callable[..., Any]] = {
    F.pad: _circular_pad,
    **({private.native_pad: _circular_pad} if private.native_pad is not None else {}),
    **dict.fromkeys((torch.prod, torch.Tensor.prod), product_derivatives.prod),
    **dict.fromkeys((torch.cumprod, torch.Tensor.cumprod), product_derivatives.cumprod),
}
