"""Ops without a lowering: the program calls torch's own kernel on its own buffers, through XLA's foreign function interface."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import torch
from jax.experimental.buffer_callback import buffer_callback
from torch.utils import _pytree as pytree

from ..errors import UnsupportedOp
from ..runtime.kernels import Kernel
from ..runtime.layout import Layout
from .context import Context, TensorSpec

# XLA can call back into this process on these platforms.
PLATFORMS = ("cpu", "cuda", "rocm")

# What these read depends on the storage behind their operand, and a buffer holds the operand alone.
_READS_STORAGE = frozenset({"aten::as_strided", "aten::as_strided_copy", "aten::as_strided_scatter"})


def can_stand_in(op: Any) -> bool:
    """Whether torch's kernel, given an operand's values, computes what it would in eager mode."""
    return not isinstance(op, torch._ops.OpOverload) or op._schema.name not in _READS_STORAGE


def call_kernel(ctx: Context, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The current node's results, computed by the op's own kernel when the program runs.

    args, kwargs: the node's, with arrays for tensors; tensors reach the kernel with the strides that they have in eager mode.
    Raises: UnsupportedOp if a result is neither a tensor nor None.
    """
    function: Any = ctx.node.target
    leaves, tree = pytree.tree_flatten((list(args), dict(kwargs)))
    specs = [ctx.spec_of(leaf) for leaf in pytree.tree_leaves((list(ctx.node.args), dict(ctx.node.kwargs)))]
    positions = [index for index, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]
    arrays, views = [], []
    for index in positions:
        spec = specs[index]
        layout = Layout.of(spec.shape, spec.stride)
        if layout.dense and not layout.is_row_major:
            arrays.append(layout.pack(leaves[index]))
            views.append((spec.shape, spec.stride))
        else:
            arrays.append(leaves[index])
            views.append((spec.shape, torch.empty(spec.shape, device="meta").stride()))
    outputs, output_tree = pytree.tree_flatten(_as_list(ctx.output))
    tensor_outputs = [spec for spec in outputs if isinstance(spec, TensorSpec)]
    if any(not isinstance(spec, TensorSpec) and spec is not None for spec in outputs):
        raise UnsupportedOp(f"{function} returns numbers, which a program cannot", op=str(function))

    def write(buffers: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
        values = list(leaves)
        for index, tensor in zip(positions, tensors, strict=True):
            values[index] = tensor
        real_args, real_kwargs = pytree.tree_unflatten(values, tree)
        results = pytree.tree_leaves(function(*real_args, **real_kwargs))
        tensors = [result for result in results if isinstance(result, torch.Tensor)]
        for buffer, result, spec in zip(buffers, tensors, tensor_outputs, strict=True):
            if result.shape != spec.shape or result.dtype != spec.dtype:
                raise RuntimeError(
                    f"{function} returned {result.dtype} of shape {list(result.shape)}, "
                    f"its fake (meta) implementation promised {spec.dtype} of shape {list(spec.shape)}"
                )
            buffer.copy_(result)

    kernel = Kernel(write, views, ctx.kernel_errors)
    ctx.kernels.append((ctx.node.name, tuple(str(leaf) for index, leaf in enumerate(leaves) if index not in positions)))
    shapes = [jax.ShapeDtypeStruct(spec.shape, spec.jax_dtype) for spec in tensor_outputs]
    # Without this, XLA would merge two draws of random numbers that look the same, and drop an op that is called for its effect.
    has_effect = not tensor_outputs or not isinstance(function, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded in function.tags
    found = iter(buffer_callback(kernel, shapes, has_side_effect=has_effect)(*arrays))
    values = [next(found) if isinstance(spec, TensorSpec) else None for spec in outputs]
    return pytree.tree_unflatten(values, output_tree)


def _as_list(output: Any) -> Any:
    return list(output) if isinstance(output, tuple) else output
