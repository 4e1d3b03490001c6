"""Ops without a lowering: the program calls torch's own kernel on its own buffers, through XLA's foreign function interface.

Two kinds of op never go this way, but run between programs (`dynaxla.capture.between`): what works in the background or with handles
(`asynchronous.py` says how such ops are known), since its result would be read before it has arrived; and what writes to an operand, since
a buffer of the program would be written.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import torch
from jax import numpy as jnp
from jax.experimental.buffer_callback import buffer_callback
from torch.utils import _pytree as pytree

from ..errors import UnsupportedOp
from ..runtime import private
from ..runtime.callbacks import Kernel, Strided
from ..runtime.layout import Layout
from .asynchronous import is_asynchronous
from .context import Context
from .metadata import TensorSpec

# XLA can call back into this process on these platforms.
PLATFORMS = ("cpu", "cuda", "rocm")

# What these read depends on the storage behind their operand, and a buffer holds the operand alone.
_READS_STORAGE = frozenset({"aten::as_strided", "aten::as_strided_copy", "aten::as_strided_scatter"})


def can_stand_in(op: Any) -> bool:
    """Whether torch's kernel, given an operand's values, computes what it would in eager mode."""
    return not isinstance(op, torch._ops.OpOverload) or op._schema.name not in _READS_STORAGE


def writes(op: Any) -> bool:
    """Whether an op changes one of its operands."""
    return isinstance(op, torch._ops.OpOverload) and op._schema.is_mutable


# The namespaces of torch's own kernels, which keep nothing of what they are called with.
_KEEPS_NOTHING = ("aten", "prims")


def may_keep(op: Any) -> bool:
    """Whether an op may keep its operands, or what shares their memory, after it has returned. Ops of other libraries may, to log or to
    cache them.
    """
    return not isinstance(op, torch._ops.OpOverload) or op.namespace not in _KEEPS_NOTHING


def call_kernel(ctx: Context, args: Sequence[Any], kwargs: Mapping[str, Any], must_run: bool = False, into: bool = False) -> Any:
    """The current node's results, computed by the op's own kernel when the program runs.

    args, kwargs: the node's, with arrays for tensors; tensors reach the kernel with the strides that they have in eager mode. A kernel
    that is not ATen's gets them in memory of its own. must_run: also where nothing is to be computed, as the kernel will raise.
    into: whether it may write its results into the program's memory itself, as an op may whose results are known to be as promised.
    Raises: UnsupportedOp if a result is neither a tensor nor None, or for an op that must not go this way.
    """
    function: Any = ctx.node.target
    if is_asynchronous(ctx.node) or writes(function):
        raise UnsupportedOp(f"{function} works in the background, or writes to an operand, which a program's buffers do not allow")
    given, tree = pytree.tree_flatten((list(args), dict(kwargs)))
    specs = [ctx.spec_of(leaf) for leaf in pytree.tree_leaves((list(ctx.node.args), dict(ctx.node.kwargs)))]
    positions = [index for index, leaf in enumerate(given) if isinstance(leaf, jax.Array)]
    # The kernel lives as long as the program, so it must hold no tracers: these hold the whole trace.
    leaves = [None if isinstance(leaf, jax.Array) else leaf for leaf in given]
    arrays, views = [], []
    for index in positions:
        spec = specs[index]
        layout = Layout.of(spec.shape, spec.stride)
        if layout.dense and not layout.is_row_major:
            arrays.append(layout.pack(given[index]))
            views.append((spec.shape, spec.stride))
        else:
            arrays.append(given[index])
            views.append((spec.shape, torch.empty(spec.shape, device="meta").stride()))
    outputs, output_tree = pytree.tree_flatten(_as_list(ctx.output))
    tensor_outputs = [spec for spec in outputs if isinstance(spec, TensorSpec)]
    if any(not isinstance(spec, TensorSpec) and spec is not None for spec in outputs):
        raise UnsupportedOp(f"{function} returns numbers, which a program cannot", op=str(function))

    # Without this, XLA would merge two draws of random numbers that look the same, and drop an op that is called for its effect.
    draws = not isinstance(function, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded in function.tags

    variant = _out_variant(function) if into and len(tensor_outputs) == len(outputs) else None
    is_checked = not may_keep(function)

    def write(buffers: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
        values = list(leaves)
        for index, tensor in zip(positions, tensors, strict=True):
            values[index] = tensor
        real_args, real_kwargs = pytree.tree_unflatten(values, tree)
        if variant is not None and len(variant.names) == len(buffers):
            variant.op(*real_args, **real_kwargs, **dict(zip(variant.names, buffers, strict=True)))
            return
        nonlocal is_checked
        with contextlib.nullcontext() if is_checked else private.check_of_aliases():
            is_checked = True
            results = pytree.tree_leaves(function(*real_args, **real_kwargs))
        found = [result for result in results if isinstance(result, torch.Tensor)]
        if len(found) != len(tensor_outputs):
            raise RuntimeError(f"{function} returned {len(found)} tensors, its fake (meta) implementation promised {len(tensor_outputs)}")
        for buffer, result, spec in zip(buffers, found, tensor_outputs, strict=True):
            if result.shape != spec.shape or result.dtype != spec.dtype:
                raise RuntimeError(
                    f"{function} returned {result.dtype} of shape {list(result.shape)}, "
                    f"its fake (meta) implementation promised {spec.dtype} of shape {list(spec.shape)}"
                )
            buffer.copy_(result)

    plain = tuple(str(leaf) for index, leaf in enumerate(leaves) if index not in positions)
    acts = must_run or draws or not tensor_outputs
    found = iter(call_back(ctx, write, arrays, tensor_outputs, views=views, plain=plain, acts=acts, copies=may_keep(function)))
    values = [next(found) if isinstance(spec, TensorSpec) else None for spec in outputs]
    return pytree.tree_unflatten(values, output_tree)


@dataclass(frozen=True)
class _OutVariant:
    """An overload that writes its results where it is told. Attributes: op; names (of the arguments that say where, in order)."""

    op: torch._ops.OpOverload
    names: tuple[str, ...]


@functools.cache
def _out_variant(op: Any) -> _OutVariant | None:
    """That of an op of ATen's; None if it has none."""
    if not isinstance(op, torch._ops.OpOverload) or op.namespace != "aten":
        return None
    packet = getattr(torch.ops.aten, op._schema.name.removeprefix("aten::"))
    wanted = [(argument.name, str(argument.type)) for argument in op._schema.arguments]
    for name in packet.overloads():
        other = getattr(packet, name)
        out = [argument for argument in other._schema.arguments if argument.is_out]
        given = [(argument.name, str(argument.type)) for argument in other._schema.arguments if not argument.is_out]
        if out and given == wanted and all(str(argument.type) == "Tensor" for argument in out):
            return _OutVariant(other, tuple(argument.name for argument in out))
    return None


def call_back(
    ctx: Context,
    write: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], object],
    arrays: Sequence[jax.Array],
    outputs: Sequence[TensorSpec],
    *,
    views: Sequence[Strided],
    plain: tuple[str, ...] = (),
    acts: bool,
    copies: bool = False,
) -> list[jax.Array]:
    """What torch writes when the program runs, for the current node.

    write, views, copies: as of `Kernel`, for these arrays. outputs: what the results are like. plain: the node's arguments that are no
    tensors, by which programs that look the same are told apart. acts: whether it does more than compute; such calls have one order.
    Raises: UnsupportedOp for one that acts, over a mesh of devices.
    """
    if ctx.where is not None and acts:
        raise UnsupportedOp(
            f"{ctx.node.target} draws random numbers or is called for its effect, and each device of a mesh would call torch's kernel",
            op=str(ctx.node.target),
            hint="keep its operands on one device, or write a lowering: docs/add-an-op.md",
        )
    shapes = [jax.ShapeDtypeStruct(spec.shape, spec.jax_dtype) for spec in outputs]
    ctx.kernels.append((ctx.node.name, plain))
    if not acts:
        call = buffer_callback(Kernel(write, views, copies), shapes)
        if ctx.where is None:
            return list(call(*arrays))
        results = call(*(jax.lax.with_sharding_constraint(array, ctx.where) for array in arrays))
        return [jax.lax.with_sharding_constraint(result, ctx.where) for result in results]

    def in_turn(buffers: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
        buffers[-1].zero_()
        write(buffers[:-1], tensors[:-1])

    # A turn is handed on from one to the next, since XLA knows no order among them. AOTAutograd's tokens say it, but have no elements,
    # and XLA takes what has none for known.
    turn = jnp.zeros(1, jnp.uint8) if ctx.turn is None else ctx.turn
    kernel = Kernel(in_turn, [*views, ((1,), (1,))], copies)
    shapes.append(jax.ShapeDtypeStruct((1,), jnp.uint8))
    *results, ctx.turn = buffer_callback(kernel, shapes, has_side_effect=True)(*arrays, turn)
    return results


def _as_list(output: Any) -> Any:
    return list(output) if isinstance(output, tuple) else output
