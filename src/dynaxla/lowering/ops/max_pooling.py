"""Lowerings of max pooling, plain and adaptive, forward and backward, and of max unpooling."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jax import Array, lax
from jax import numpy as jnp

from ...torch_ops import aten
from .. import dtypes
from ..context import Context
from ..cpu import torch_kernels, window_maxima
from ..cpu.channels_last import order_in_program
from ..dimensions import Sizes
from ..dtypes import DType
from ..graphs import is_result_used
from ..implementations import Implementations, Operand
from ..pool_windows import MAX_UNROLLED_WINDOW, PoolWindows, lowest, pad, reduce_window, windows_along
from ..promotion import broadcast_back, convert, to_accumulator
from ..registry import lowers
from .bounds import argument, require_index
from .comparison import is_nan
from .scattering import write_elements
from .windows import Windows


def _first_maximum(dims: Sequence[PoolWindows], x: Array) -> tuple[Array, Array]:
    """Returns each window's maximum and its flat index in the pooled dimensions, which are the last ones of x.

    Reduces one dimension after the other, tap by tap: a tap is one position in the window. As in ATen, the index is that of the first of
    equal maxima, or of the last NaN.

    Dtype:  that of x; int64.
    """
    shape = [1] * (x.ndim - len(dims)) + [windows.size for windows in dims]
    count = math.prod(shape)
    position = lax.reshape(lax.iota(np.int32 if count < 2**31 else np.int64, count), shape)
    position = lax.broadcast_in_dim(position, x.shape, range(x.ndim))
    for windows in reversed(dims):
        before, after = windows.edge_padding
        padded = before > 0 or after > 0
        if before or after:
            padding = {windows.dim: windows.edge_padding}
            x, position = pad(x, lowest(x.dtype), padding), pad(position, -1, padding)
        maximum, best_position = windows.tap(x, 0), windows.tap(position, 0)
        for tap in range(1, windows.kernel):
            value, tap_position = windows.tap(x, tap), windows.tap(position, tap)
            better = lax.gt(value, maximum)
            if dtypes.is_float(value.dtype):
                better = lax.bitwise_or(better, is_nan(value))
            if padded:
                # Padding has the lowest value, with position -1. A window of elements with this value must still give a position of x.
                better = lax.bitwise_or(better, lax.lt(best_position, lax.full_like(best_position, 0)))
            maximum, best_position = lax.select(better, value, maximum), lax.select(better, tap_position, best_position)
        x, position = maximum, best_position
    return x, convert(position, np.dtype(np.int64))


def _maximum(dims: Sequence[PoolWindows], x: Array, ctx: Context) -> Array:
    """Returns each window's maximum, NaN if the window has a NaN."""
    if window_maxima.is_preferred(dims, ctx.platform):
        return window_maxima.by_taps(dims, x, order_in_program(ctx))
    return reduce_window(x, lowest(x.dtype), "max", dims)


@dataclass(frozen=True)
class MaxPool:
    """The problem (see implementations.py) of max pooling with indices: all but the operand's values. The operand is the pooled array.

    Attributes:
        shape: The shape of the pooled array.
        dims: The windows along each pooled dimension. These are the last dimensions of the array.
        ceil_mode: The op's argument `ceil_mode`.
        order: The memory layout of all arrays: dimensions from the slowest to the fastest.
        dtype: The dtype of the pooled array.
        platform: JAX's name of the platform.
    """

    shape: tuple[int, ...]
    dims: tuple[PoolWindows, ...]
    ceil_mode: bool
    order: tuple[int, ...]
    dtype: DType
    platform: str

    @property
    def out(self) -> tuple[int, ...]:
        return (*self.shape[: -len(self.dims)], *(windows.out for windows in self.dims))

    @property
    def operands(self) -> tuple[Operand, ...]:
        return (Operand(self.shape, self.dtype, self.order),)

    @property
    def result_order(self) -> None:
        return None

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arguments of torch's op: kernel, stride, padding and dilation (a list each), and ceil_mode."""
        names = ("kernel", "stride", "padding", "dilation")
        return (*([getattr(windows, name) for windows in self.dims] for name in names), self.ceil_mode)

    def to_memory_order(self, x: Array) -> Array:
        return lax.transpose(x, self.order)

    def to_op_order(self, x: Array) -> Array:
        return lax.transpose(x, np.argsort(self.order))

    def __str__(self) -> str:
        kernel, stride, padding, dilation, _ = self.arguments
        return f"{self.dtype}{list(self.shape)}, kernel {kernel}, stride {stride}, padding {padding}, dilation {dilation}"


class MaxPoolGradient(MaxPool):
    """The problem of the gradient of max pooling with indices.

    The operands are the result's gradient, the pooled array, and the flat indices of the maxima.
    """

    @property
    def operands(self) -> tuple[Operand, ...]:
        return (
            Operand(self.out, self.dtype, self.order),
            Operand(self.shape, self.dtype, self.order),
            Operand(self.out, np.dtype(np.int64), self.order),
        )


MAX_POOL: Implementations[MaxPool] = Implementations("max_pool")
MAX_POOL_GRADIENT: Implementations[MaxPoolGradient] = Implementations("max_pool_gradient")

# For inputs with fewer elements, calling torch's kernel costs more than it saves.
_MIN_TORCH_ELEMENTS = 30_000


def _supports_torch(problem: MaxPool) -> bool:
    return dtypes.is_float(problem.dtype)


def _prefers_torch(problem: MaxPool) -> bool:
    return math.prod(problem.shape) >= _MIN_TORCH_ELEMENTS


def _in_op_order(problem: MaxPool, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns views of the program's buffers in the op's order of dimensions. The buffers' dimensions are in memory order."""
    return [tensor.permute(*np.argsort(problem.order)) for tensor in tensors]


@MAX_POOL.implementation("torch", platforms=["cpu"], supports=_supports_torch, preferred=_prefers_torch)
def _max_pool_by_torch(problem: MaxPool, x: Array) -> tuple[Array, Array]:
    """Calls torch's kernel, which computes maxima and positions in one pass. XLA needs further passes for the positions."""

    def write(results: Sequence[torch.Tensor], operands: Sequence[torch.Tensor]) -> None:
        (x,), (maxima, positions) = (_in_op_order(problem, tensors) for tensors in (operands, results))
        if len(problem.dims) == 2:  # the 2d op writes to outputs of any strides
            aten.max_pool2d_with_indices.out(x, *problem.arguments, out=maxima, indices=positions)
            return
        for result, tensor in zip((maxima, positions), aten.max_pool3d_with_indices(x, *problem.arguments), strict=True):
            result.copy_(tensor)

    shape = tuple(problem.out[dim] for dim in problem.order)
    maxima, positions = torch_kernels.call(write, [problem.to_memory_order(x)], [(shape, problem.dtype), (shape, np.dtype(np.int64))])
    return problem.to_op_order(maxima), problem.to_op_order(positions)


@MAX_POOL.implementation("taps")
def _max_pool_by_taps(problem: MaxPool, x: Array) -> tuple[Array, Array]:
    return _first_maximum(problem.dims, x)


@MAX_POOL_GRADIENT.implementation("torch", platforms=["cpu"], supports=_supports_torch, preferred=_prefers_torch)
def _max_pool_gradient_by_torch(problem: MaxPoolGradient, grad: Array, x: Array, positions: Array) -> Array:
    """Calls torch's kernel, which adds each gradient once, at its position."""

    def write(results: Sequence[torch.Tensor], operands: Sequence[torch.Tensor]) -> None:
        (grad, x, positions), (result,) = (_in_op_order(problem, tensors) for tensors in (operands, results))
        if len(problem.dims) == 2:
            aten.max_pool2d_with_indices_backward.grad_input(grad, x, *problem.arguments, positions, grad_input=result)
        else:
            result.copy_(aten.max_pool3d_with_indices_backward(grad, x, *problem.arguments, positions))

    operands = [problem.to_memory_order(item) for item in (grad, x, positions)]
    shape = tuple(problem.shape[dim] for dim in problem.order)
    return problem.to_op_order(torch_kernels.call(write, operands, [(shape, problem.dtype)])[0])


def _has_few_taps(problem: MaxPoolGradient) -> bool:
    return math.prod(windows.kernel for windows in problem.dims) <= MAX_UNROLLED_WINDOW


@MAX_POOL_GRADIENT.implementation("taps", supports=_has_few_taps, is_partitionable=True)
def _max_pool_gradient_by_taps(problem: MaxPoolGradient, grad: Array, x: Array, positions: Array) -> Array:
    """Sums, for each element of the input, the gradients of the windows that have their maximum there.

    Each tap (position in the window) is an elementwise computation for all windows. For few taps this is faster than XLA's scatter, which
    applies one update at a time.
    """
    wide = to_accumulator(grad)
    zero = lax.full_like(wide, 0)
    maximum_positions = convert(positions, np.dtype(np.int32 if math.prod(windows.size for windows in problem.dims) < 2**31 else np.int64))
    total: Array | None = None
    for taps in itertools.product(*[range(windows.kernel) for windows in problem.dims]):
        position = lax.full(grad.shape, 0, maximum_positions.dtype)
        for windows, tap in zip(problem.dims, taps, strict=True):
            tap_positions = (windows.starts + tap * windows.dilation).astype(maximum_positions.dtype)
            tap_positions = lax.broadcast_in_dim(tap_positions, grad.shape, (windows.dim,))
            position = lax.add(lax.mul(position, lax.full_like(position, windows.size)), tap_positions)
        contribution = lax.select(lax.eq(maximum_positions, position), wide, zero)
        for windows, tap in zip(problem.dims, taps, strict=True):
            before = tap * windows.dilation - windows.padding
            after = windows.size - before - (windows.out - 1) * windows.stride - 1
            contribution = pad(contribution, 0, {windows.dim: (before, after)}, windows.stride - 1)
        total = contribution if total is None else lax.add(total, contribution)
    assert total is not None
    return convert(total, x.dtype)


@MAX_POOL_GRADIENT.implementation("scatter")
def _max_pool_gradient_by_scatter(problem: MaxPoolGradient, grad: Array, x: Array, positions: Array) -> Array:
    return scatter_maxima(grad, x, positions, len(problem.dims))


@lowers(aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default)
def max_pool_with_indices(
    x: Array, kernel: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes, ceil_mode: bool, *, ctx: Context
) -> tuple[Array, Array | None]:
    """The maximum of each window, NaN if the window has a NaN, and its flat index in the last two or three dimensions.

    The indices are None if the graph does not use them. Of equal maxima, the first one's index is returned; of NaNs, the last one's.

    Shape:  both: x (..., *space) gives (..., *windows).
    Dtype:  that of x, and int64.
    Source: ATen native/cpu/MaxPoolKernel.cpp
    """
    count = 2 if ctx.node.target is aten.max_pool2d_with_indices.default else 3
    shape = ctx.output[0].shape
    dims = windows_along(x.shape[-count:], shape[-count:], x.ndim, kernel, stride, padding, dilation)
    if 0 in shape:
        return lax.full(shape, 0, x.dtype), lax.full(shape, 0, np.dtype(np.int64))
    if not is_result_used(ctx.node, 1):
        return _maximum(dims, x, ctx), None
    problem = MaxPool(x.shape, tuple(dims), ceil_mode, order_in_program(ctx), x.dtype, ctx.platform)
    maxima, positions = ctx.choose(MAX_POOL, problem).run(problem, x)
    return maxima, positions


@lowers(aten.max_pool2d_with_indices_backward.default, aten.max_pool3d_with_indices_backward.default)
def max_pool_with_indices_backward(
    grad: Array,
    x: Array,
    kernel: Sizes,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    ceil_mode: bool,
    indices: Array,
    *,
    ctx: Context,
) -> Array:
    """The gradient of max pooling: each output's gradient is added at the position of its maximum.

    Shape:  that of x.
    Dtype:  that of x.
    """
    count = 2 if ctx.node.target is aten.max_pool2d_with_indices_backward.default else 3
    dims = windows_along(x.shape[-count:], grad.shape[-count:], x.ndim, kernel, stride, padding, dilation)
    if 0 in grad.shape:
        return lax.full_like(x, 0)
    problem = MaxPoolGradient(x.shape, tuple(dims), ceil_mode, order_in_program(ctx), x.dtype, ctx.platform)
    out: Array = ctx.choose(MAX_POOL_GRADIENT, problem).run(problem, grad, x, indices)
    return out


def scatter_maxima(grad: Array, x: Array, indices: Array, count: int) -> Array:
    """Returns zeros like x, with gradients added at flat indices into the last `count` dimensions. Half types are added in float32."""
    planes = math.prod(x.shape[:-count])
    if 0 in grad.shape or 0 in x.shape:
        return lax.full_like(x, 0)
    flat_grad = lax.reshape(to_accumulator(grad), (planes, math.prod(grad.shape[-count:])))
    flat_indices = lax.reshape(indices, flat_grad.shape)
    out = jnp.zeros((planes, math.prod(x.shape[-count:])), flat_grad.dtype)
    out = out.at[lax.broadcasted_iota(np.int64, flat_grad.shape, 0), flat_indices].add(flat_grad, mode="drop")
    return convert(lax.reshape(out, x.shape), x.dtype)


@lowers(aten.adaptive_max_pool2d.default, aten.adaptive_max_pool3d.default)
def adaptive_max_pool(x: Array, output_size: Sizes, *, ctx: Context) -> tuple[Array, Array]:
    """The maximum of each window and its flat index in the last two or three dimensions.

    As in ATen, the index is that of the first of equal maxima, or of the last NaN.

    Shape:  both: x (..., *space) gives (..., *output_size).
    Dtype:  that of x, and int64.
    """
    count = len(output_size)
    if 0 in ctx.output[0].shape:
        return tuple(lax.full(spec.shape, 0, spec.jax_dtype) for spec in ctx.output)
    space = x.shape[-count:]
    flat_index = np.arange(math.prod(space), dtype=np.int64).reshape(space)
    window_values, window_dims = x, []
    for index, (size, out) in enumerate(zip(space, output_size, strict=True)):
        windows = Windows.adaptive(size, out)
        dim = x.ndim - count + 2 * index
        window_values = windows.gather(window_values, dim)
        flat_index = np.take(flat_index, windows.index, axis=2 * index)
        window_dims.append(dim + 1)
    positions = lax.broadcast_in_dim(flat_index, window_values.shape, range(x.ndim - count, window_values.ndim))
    return maxima(window_values, positions, window_dims)


def maxima(values: Array, positions: Array, window_dims: Sequence[int]) -> tuple[Array, Array]:
    """Returns the maximum over some dimensions, and the lowest position of equal maxima, or the highest position of a NaN.

    Args:
        values: The elements of the windows.
        positions: The position of each element, in the shape of `values`.
        window_dims: The dimensions of the windows.
    """
    maximum = lax.reduce_max(values, window_dims)
    is_maximum = lax.eq(values, broadcast_back(maximum, values.shape, window_dims))
    index = lax.reduce_min(lax.select(is_maximum, positions, lax.full_like(positions, np.iinfo(np.int64).max)), window_dims)
    if dtypes.is_float(values.dtype):
        last_nan = lax.reduce_max(lax.select(is_nan(values), positions, lax.full_like(positions, -1)), window_dims)
        has_nan = lax.ge(last_nan, lax.full_like(last_nan, 0))
        index = lax.select(has_nan, last_nan, index)
        # XLA:CPU's maximum of more than a few thousand elements drops NaNs (jax 0.10.2).
        maximum = lax.select(has_nan, lax.full_like(maximum, math.nan), maximum)
    return maximum, index


@lowers(aten.adaptive_max_pool2d_backward.default)
def adaptive_max_pool2d_backward(grad: Array, x: Array, indices: Array) -> Array:
    """The gradient of adaptive max pooling: each output's gradient is added at the position of its maximum.

    Shape:  that of x.
    Dtype:  that of x.
    """
    return scatter_maxima(grad, x, indices, 2)


@lowers(aten.adaptive_max_pool3d_backward.default)
def adaptive_max_pool3d_backward(grad: Array, x: Array, indices: Array) -> Array:
    """As `adaptive_max_pool2d_backward`, in three dimensions."""
    return scatter_maxima(grad, x, indices, 3)


@lowers(aten.max_unpool3d.default)
def max_unpool3d(x: Array, indices: Array, output_size: Sizes, stride: Sizes, padding: Sizes, *, ctx: Context) -> Array:
    """Like `max_unpool2d`. Stride and padding are not used: `output_size` already includes them."""
    return max_unpool2d(x, indices, output_size, ctx=ctx)


@lowers(aten.max_unpool2d.default)
def max_unpool2d(x: Array, indices: Array, output_size: Sizes, *, ctx: Context) -> Array:
    """Zeros, with each element of x written at its flat index into the last dimensions.

    Shape:  x (..., *windows) gives (..., *output_size).
    Dtype:  that of x.
    Raises: RuntimeError when the program runs, for an index out of range.
    """
    count, shape = len(output_size), ctx.output.shape
    if 0 in shape:
        return lax.full(shape, 0, x.dtype)
    size = math.prod(output_size)
    message = f"Found an invalid max index (output volumes are of size {'x'.join(map(str, output_size))})"
    require_index(ctx, indices, size, RuntimeError, message, argument(ctx, 1))
    planes, columns = math.prod(x.shape[:-count]), math.prod(x.shape[-count:])
    values, flat_indices = (lax.reshape(array, (planes, columns)) for array in (x, indices))
    return lax.reshape(write_elements(lax.full((planes, size), 0, x.dtype), 1, flat_indices, values, "set"), shape)
