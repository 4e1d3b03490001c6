"""The fallback for ops without a lowering: the program calls torch's own kernel on its buffers, through XLA's foreign function interface.

Two kinds of op run between programs instead (`dynaxla.passes.aten.unsupported_nodes`):

- asynchronous ops (see `asynchronous.py`), whose results a program would read before they have arrived;
- ops that write to an operand, because in a program the operand is a buffer of XLA, which must not change.
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

# The platforms on which XLA can call back into this process.
PLATFORMS = ("cpu", "cuda", "rocm")

# Ops whose results depend on the whole storage of their operand. A buffer of the program holds only the operand.
_READS_STORAGE = frozenset({"aten::as_strided", "aten::as_strided_copy", "aten::as_strided_scatter"})


def reads_values_only(op: Any) -> bool:
    """True if an op's result depends on the values of its operands only, not on the rest of their storages."""
    return not isinstance(op, torch._ops.OpOverload) or op._schema.name not in _READS_STORAGE


def mutates(op: Any) -> bool:
    """True if an op writes to one of its operands."""
    return isinstance(op, torch._ops.OpOverload) and op._schema.is_mutable


# The namespaces of torch's own kernels, which retain no operand.
_NON_RETAINING = ("aten", "prims")


def may_retain_operands(op: Any) -> bool:
    """True if an op may retain its operands, or tensors that share their memory, after it has returned.

    Torch's own ops do not. Ops of other libraries may log or cache operands.
    """
    return not isinstance(op, torch._ops.OpOverload) or op.namespace not in _NON_RETAINING


def call_kernel(ctx: Context, args: Sequence[Any], kwargs: Mapping[str, Any], must_run: bool = False, use_out_variant: bool = False) -> Any:
    """Returns the current node's results, which torch's kernel computes when the program runs.

    The kernel's operands have the strides of eager mode, or are contiguous if their distinct elements have gaps or overlaps in eager mode.
    A kernel of another library receives copies of the operands in torch's memory.

    Args:
        args, kwargs: The node's arguments, with arrays in place of tensors.
        must_run: True to call the kernel even if nothing uses its results, because the kernel will raise.
        use_out_variant: True to let the op's out overload write its results into the program's memory. Only for ops whose results certainly
            have the shapes and dtypes of their fake tensors.

    Raises:
        UnsupportedOp: A result is neither a tensor nor None, or the op is one that must run between programs.
    """
    function: Any = ctx.node.target
    if is_asynchronous(ctx.node) or mutates(function):
        raise UnsupportedOp(f"{function} runs in the background or writes to an operand, and a program cannot call such an op")
    flat_args, tree = pytree.tree_flatten((list(args), dict(kwargs)))
    specs = [ctx.spec_of(leaf) for leaf in pytree.tree_leaves((list(ctx.node.args), dict(ctx.node.kwargs)))]
    positions = [index for index, leaf in enumerate(flat_args) if isinstance(leaf, jax.Array)]
    # The callback lives as long as the program. So the callback must not hold tracers, which would keep the whole trace alive.
    leaves = [None if isinstance(leaf, jax.Array) else leaf for leaf in flat_args]
    operands = [_in_memory_order(flat_args[index], specs[index]) for index in positions]
    arrays, views = [array for array, _ in operands], [view for _, view in operands]
    outputs, output_tree = pytree.tree_flatten(_as_list(ctx.output))
    tensor_outputs = [spec for spec in outputs if isinstance(spec, TensorSpec)]
    if any(not isinstance(spec, TensorSpec) and spec is not None for spec in outputs):
        raise UnsupportedOp(f"{function} returns numbers, and a program can return only tensors", op=str(function))

    # XLA merges equal calls without a side effect, such as two draws of random numbers, and removes calls whose results are not used.
    draws = not isinstance(function, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded in function.tags

    variant = _out_variant(function) if use_out_variant and len(tensor_outputs) == len(outputs) else None
    has_checked_aliases = not may_retain_operands(function)

    def write(buffers: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
        values = list(leaves)
        for index, tensor in zip(positions, tensors, strict=True):
            values[index] = tensor
        real_args, real_kwargs = pytree.tree_unflatten(values, tree)
        if variant is not None and len(variant.names) == len(buffers):
            variant.op(*real_args, **real_kwargs, **dict(zip(variant.names, buffers, strict=True)))
            return
        nonlocal has_checked_aliases
        with contextlib.nullcontext() if has_checked_aliases else private.check_of_aliases():
            has_checked_aliases = True
            results = pytree.tree_leaves(function(*real_args, **real_kwargs))
        _copy_results(function, results, buffers, tensor_outputs)

    non_tensor_args = tuple(str(leaf) for index, leaf in enumerate(leaves) if index not in positions)
    has_effect = must_run or draws or not tensor_outputs
    copies = may_retain_operands(function)
    results = iter(
        call_back(ctx, write, arrays, tensor_outputs, views=views, non_tensor_args=non_tensor_args, has_effect=has_effect, copies=copies)
    )
    values = [next(results) if isinstance(spec, TensorSpec) else None for spec in outputs]
    return pytree.tree_unflatten(values, output_tree)


def _in_memory_order(array: jax.Array, spec: TensorSpec) -> tuple[jax.Array, Strided]:
    """Returns an operand as the array that the program passes to the kernel, and the shape and strides of the kernel's tensor."""
    layout = Layout.of(spec.shape, spec.stride)
    if layout.dense and not layout.is_row_major:
        return layout.pack(array), (spec.shape, spec.stride)
    return array, (spec.shape, torch.empty(spec.shape, device="meta").stride())


def _copy_results(op: Any, results: Sequence[Any], buffers: Sequence[torch.Tensor], specs: Sequence[TensorSpec]) -> None:
    """Copies the tensors among a kernel's results to the program's buffers.

    Raises:
        RuntimeError: The results differ from the fake tensors in number, shape or dtype.
    """
    tensors = [result for result in results if isinstance(result, torch.Tensor)]
    if len(tensors) != len(specs):
        raise RuntimeError(
            f"{op} returned {len(tensors)} tensors, but its fake (meta) implementation declared {len(specs)}: "
            "correct the function that was passed to register_fake"
        )
    for buffer, result, spec in zip(buffers, tensors, specs, strict=True):
        if result.shape != spec.shape or result.dtype != spec.dtype:
            raise RuntimeError(
                f"{op} returned {result.dtype} of shape {list(result.shape)}, "
                f"but its fake (meta) implementation declared {spec.dtype} of shape {list(spec.shape)}: correct the function that was "
                "passed to register_fake"
            )
        buffer.copy_(result)


@dataclass(frozen=True)
class _OutVariant:
    """An out overload, which writes its results to given tensors.

    Attributes:
        op: The overload.
        names: The names of the overload's out arguments, in order.
    """

    op: torch._ops.OpOverload
    names: tuple[str, ...]


@functools.cache
def _out_variant(op: Any) -> _OutVariant | None:
    """Returns the out overload of an ATen op that takes the same inputs and only single tensors as outputs; None if there is none."""
    if not isinstance(op, torch._ops.OpOverload) or op.namespace != "aten":
        return None
    packet = getattr(torch.ops.aten, op._schema.name.removeprefix("aten::"))
    inputs = [(argument.name, str(argument.type)) for argument in op._schema.arguments]
    for name in packet.overloads():
        overload = getattr(packet, name)
        out = [argument for argument in overload._schema.arguments if argument.is_out]
        overload_inputs = [(argument.name, str(argument.type)) for argument in overload._schema.arguments if not argument.is_out]
        if out and overload_inputs == inputs and all(str(argument.type) == "Tensor" for argument in out):
            return _OutVariant(overload, tuple(argument.name for argument in out))
    return None


def call_back(
    ctx: Context,
    write: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], object],
    arrays: Sequence[jax.Array],
    outputs: Sequence[TensorSpec],
    *,
    views: Sequence[Strided],
    non_tensor_args: tuple[str, ...] = (),
    has_effect: bool,
    copies: bool = False,
) -> list[jax.Array]:
    """Makes the program call back into torch for the current node, and returns the results.

    Args:
        write, copies: See `Kernel`.
        arrays: The operands.
        outputs: The specs of the results.
        views: The shape and strides with which `write` reads each operand.
        non_tensor_args: The node's arguments that are not tensors, as text. They distinguish programs that are otherwise the same.
        has_effect: True if the call has an effect besides computing its results. Such calls run in the order of the graph.

    Raises:
        UnsupportedOp: The call has an effect, and the program runs on a mesh of devices.
    """
    if ctx.replicated is not None and has_effect:
        raise UnsupportedOp(
            f"{ctx.node.target} draws random numbers or is called for its effect, and each device of a mesh would call torch's kernel",
            op=str(ctx.node.target),
            hint="keep its operands on one device, or write a lowering: docs/add-an-op.md",
        )
    shapes = [jax.ShapeDtypeStruct(spec.shape, spec.jax_dtype) for spec in outputs]
    ctx.kernels.append((ctx.node.name, non_tensor_args))
    if not has_effect:
        call = buffer_callback(Kernel(write, views, copies), shapes)
        if ctx.replicated is None:
            return list(call(*arrays))
        results = call(*(jax.lax.with_sharding_constraint(array, ctx.replicated) for array in arrays))
        return [jax.lax.with_sharding_constraint(result, ctx.replicated) for result in results]

    def write_in_order(buffers: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
        buffers[-1].zero_()
        write(buffers[:-1], tensors[:-1])

    # XLA defines no order among calls with side effects. So each call reads a token that the call before it has written. AOTAutograd's
    # tokens would express the same order, but they have no elements, and XLA treats an array without elements as a constant.
    token = jnp.zeros(1, jnp.uint8) if ctx.effect_token is None else ctx.effect_token
    kernel = Kernel(write_in_order, [*views, ((1,), (1,))], copies)
    shapes.append(jax.ShapeDtypeStruct((1,), jnp.uint8))
    *results, ctx.effect_token = buffer_callback(kernel, shapes, has_side_effect=True)(*arrays, token)
    return results


def _as_list(output: Any) -> Any:
    return list(output) if isinstance(output, tuple) else output
