"""The gradient of a convolution's weight, with several implementations. Used by convolution.py."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jax import Array, lax

from ...runtime import machine
from ...torch_ops import aten
from .. import dtypes
from ..context import Context
from ..cpu import onednn, onednn_support, torch_kernels
from ..cpu.channels_last import channels_last, order_between_convolutions
from ..dimensions import Sizes
from ..dtypes import DType
from ..implementations import Implementations, Operand
from ..promotion import convert
from ..settings import precision_for


@dataclass(frozen=True)
class WeightGradient:
    """The problem (see implementations.py) of a weight gradient: everything but the operands' values.

    Attributes:
        x: The shape of the convolution's input.
        grad: The shape of the gradient of the convolution's result.
        weight: The shape of the weight and its gradient, (out, in / groups, *kernel).
        stride: The stride of the convolution in each spatial dimension.
        padding: The padding of the convolution on both sides of each spatial dimension.
        dilation: The dilation of the convolution in each spatial dimension.
        groups: The number of groups of the convolution.
        dtype: The dtype of x and grad. The result has this dtype or that of its accumulator.
        precision: The precision of XLA's convolution.
        platform: JAX's name of the platform.
    """

    x: tuple[int, ...]
    grad: tuple[int, ...]
    weight: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    dtype: DType
    precision: lax.Precision
    platform: str

    @property
    def operands(self) -> tuple[Operand, ...]:
        order = order_between_convolutions(len(self.x), self.platform)
        return Operand(self.x, self.dtype, order), Operand(self.grad, self.dtype, order)

    @property
    def result_order(self) -> tuple[int, ...] | None:
        return None

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.x)} and {list(self.grad)} to {list(self.weight)}, stride {self.stride}, groups {self.groups}"


WEIGHT_GRADIENT: Implementations[WeightGradient] = Implementations("weight_gradient")

# With fewer multiplications, the overhead of a call of torch's kernel (about 70 microseconds) exceeds the time that the kernel saves. The
# limit is lower for several groups: there XLA's loops take 3 to 16 nanoseconds per multiplication.
_MIN_TORCH_PRODUCTS, _MIN_TORCH_PRODUCTS_WITH_GROUPS = 250_000, 10_000


def _supports_product(problem: WeightGradient) -> bool:
    is_plain_1x1 = problem.groups == 1 and math.prod(problem.weight[2:]) == 1 and not any(problem.padding)
    return is_plain_1x1 and onednn_support.supports(problem.dtype)


def _prefers_product(problem: WeightGradient) -> bool:
    out, channels = problem.weight[:2]
    return not _prefers_columns(problem) or not onednn_support.is_slow(out, channels, True, False, problem.dtype)


@WEIGHT_GRADIENT.implementation("product", platforms=["cpu"], supports=_supports_product, preferred=_prefers_product)
def _by_product(problem: WeightGradient, x: Array, grad: Array) -> Array:
    """Computes the gradient of a 1x1 kernel as the product of two matrices with one row for each window."""
    rows = channels_last(x)
    ends = [(out - 1) * step + 1 for out, step in zip(problem.grad[2:], problem.stride, strict=True)]
    read_rows = lax.slice(rows, (0,) * rows.ndim, (x.shape[0], *ends, x.shape[1]), (1, *problem.stride, 1))
    windows = math.prod(problem.grad) // problem.grad[1]
    read_rows, grad_rows = lax.reshape(read_rows, (windows, x.shape[1])), lax.reshape(channels_last(grad), (windows, problem.grad[1]))
    return lax.reshape(onednn.matmul(grad_rows, read_rows, True, False, dtypes.accumulator(x.dtype)), problem.weight)


def _has_result_shape(problem: WeightGradient) -> bool:
    """True if grad has the shape of the convolution's result, and there are one to three spatial dimensions.

    The shape differs for a transposed convolution with more output padding than stride.
    """
    if not 3 <= len(problem.x) <= 5:
        return False
    sizes = zip(problem.x[2:], problem.padding, problem.dilation, problem.weight[2:], problem.stride, strict=True)
    out = [(size + 2 * pad - dilation * (kernel - 1) - 1) // step + 1 for size, pad, dilation, kernel, step in sizes]
    return tuple(out) == problem.grad[2:]


def _is_large(problem: WeightGradient) -> bool:
    minimum = _MIN_TORCH_PRODUCTS if problem.groups == 1 else _MIN_TORCH_PRODUCTS_WITH_GROUPS
    return math.prod(problem.grad) * math.prod(problem.weight[1:]) >= minimum


def _is_depthwise(problem: WeightGradient) -> bool:
    """True for a depthwise convolution with one output channel per input channel."""
    return (problem.x[1], problem.weight[0]) == (problem.groups,) * 2


# The number of products in a block, which is written to memory before its products are added. A block fits into the processor's cache.
_PRODUCTS_PER_BLOCK = 1 << 18


@WEIGHT_GRADIENT.implementation(
    "sums",
    platforms=["cpu"],
    supports=lambda problem: _has_result_shape(problem) and len(problem.x) == 3 and _is_depthwise(problem),
    preferred=_is_large,
)
def _by_sums(problem: WeightGradient, x: Array, grad: Array) -> Array:
    """Multiplies grad by the rows of x that each kernel position reads, and adds the products. Only for 1d depthwise convolutions.

    oneDNN's kernel for such convolutions takes 2 to 8 times as long.
    """
    (step,), (dilation,), (padding,) = problem.stride, problem.dilation, problem.padding
    channels, _, kernel = problem.weight
    dtype = dtypes.accumulator(problem.dtype)
    count = max(1, _PRODUCTS_PER_BLOCK // (channels * kernel))

    def write(results: Sequence[torch.Tensor], operands: Sequence[torch.Tensor]) -> None:
        rows, grad_rows = operands
        if padding:
            rows = torch.constant_pad_nd(rows, [0, 0, padding, padding])
        total = rows.new_zeros((kernel, channels))
        for padded, grads in zip(rows, grad_rows, strict=True):
            for first in range(0, len(grads), count):
                grad_block = grads[first : first + count]
                shape, offset = (kernel, *grad_block.shape), padded.storage_offset() + first * step * channels
                windows = padded.as_strided(shape, (dilation * channels, step * channels, 1), offset)
                total += (windows * grad_block).sum(1)
        results[0].copy_(total.t().unsqueeze(1))

    operands = [channels_last(convert(operand, dtype)) for operand in (x, grad)]
    return torch_kernels.call(write, operands, [(problem.weight, dtype)])[0]


# The greatest width of a weight that oneDNN's depthwise kernel keeps in registers. For wider weights, oneDNN uses a general kernel that
# takes 3 to 10 times as long, in bfloat16 up to 50 times.
_STRIP_WIDTH = 3


def _strips(problem: WeightGradient) -> list[tuple[int, int, int, int]]:
    """Returns the vertical strips of the weight, each at most _STRIP_WIDTH wide: (first column, number of columns, padding left, right).

    The paddings are the columns of zeros that the strip needs on both sides of x. A negative padding is the number of columns of x that the
    strip does not read.
    """
    strips = []
    width, step, padding = problem.weight[3], problem.stride[1], problem.padding[1]
    for first in range(0, width, _STRIP_WIDTH):
        count = min(_STRIP_WIDTH, width - first)
        covered = (problem.grad[3] - 1) * step + count
        strips.append((first, count, padding - first, covered - (padding - first) - problem.x[3]))
    return strips


def _supports_strips(problem: WeightGradient) -> bool:
    """True for depthwise convolutions in two dimensions without dilation, if each strip reads a column of x."""
    return (
        _has_result_shape(problem)
        and len(problem.x) == 4
        and _is_depthwise(problem)
        and all(step == 1 for step in problem.dilation)
        and all(min(before, after) > -problem.x[-1] for *_, before, after in _strips(problem))
    )


def _prefers_strips(problem: WeightGradient) -> bool:
    return _is_large(problem) and problem.weight[-1] > _STRIP_WIDTH


@WEIGHT_GRADIENT.implementation("strips", platforms=["cpu"], supports=_supports_strips, preferred=_prefers_strips)
def _by_strips(problem: WeightGradient, x: Array, grad: Array) -> Array:
    """Calls torch's kernel for a few columns of the weight at a time."""
    channels, _, height = problem.weight[:3]
    # torch's kernel accepts no weight that is higher than its input, so the input is padded beforehand.
    row_padding = problem.padding[0] if height > problem.x[2] else 0
    settings = list(problem.stride), [problem.padding[0] - row_padding, 0], [1, 1], False, [0, 0], problem.groups, [False, True, False]
    strips = _strips(problem)

    def write(results: Sequence[torch.Tensor], operands: Sequence[torch.Tensor]) -> None:
        rows, grad_rows = operands
        for first, count, *pads in strips:
            padded_strip = torch.constant_pad_nd(rows, [0, 0, *pads, row_padding, row_padding]).movedim(-1, 1)
            layout = rows.new_empty((channels, height, count, 1)).movedim(-1, 1)  # only the shape and the memory order are read
            gradient = aten.convolution_backward(grad_rows.movedim(-1, 1), padded_strip, layout, None, *settings)[1]
            results[0][..., first : first + count].copy_(gradient)

    (result,) = torch_kernels.call(write, [channels_last(x), channels_last(grad)], [(problem.weight, problem.dtype)])
    return convert(result, dtypes.accumulator(problem.dtype))


def _supports_taps(problem: WeightGradient) -> bool:
    """True for one spatial dimension and one group, in a dtype of 32 bits or more: partial sums of half types would be rounded."""
    return _has_result_shape(problem) and len(problem.x) == 3 and problem.groups == 1 and problem.dtype.itemsize >= 4


def _prefers_taps(problem: WeightGradient) -> bool:
    return _is_large(problem) and problem.weight[1] >= 32 and problem.weight[2] <= 3


@WEIGHT_GRADIENT.implementation("taps", platforms=["cpu"], supports=_supports_taps, preferred=_prefers_taps)
def _by_taps(problem: WeightGradient, x: Array, grad: Array) -> Array:
    """Computes one matrix product for each kernel position, without a copy of the windows. For one spatial dimension.

    oneDNN's kernel takes up to twice as long with 32 channels or more and kernels of size 3 or less.
    """
    (step,), (dilation,), (padding,) = problem.stride, problem.dilation, problem.padding
    out, channels, kernel = problem.weight

    def write(results: Sequence[torch.Tensor], operands: Sequence[torch.Tensor]) -> None:
        rows, grad_rows = operands
        if padding:
            rows = torch.constant_pad_nd(rows, [0, 0, padding, padding])
        covered = (grad_rows.shape[1] - 1) * step + 1
        taps = rows.new_empty((kernel, out, channels))
        for index, product in enumerate(taps):
            tap_rows = rows[:, index * dilation : index * dilation + covered : step]
            torch.addbmm(product, grad_rows.transpose(1, 2), tap_rows, beta=0, out=product)
        results[0].copy_(taps.permute(1, 2, 0))

    (result,) = torch_kernels.call(write, [channels_last(x), channels_last(grad)], [(problem.weight, problem.dtype)])
    return convert(result, dtypes.accumulator(problem.dtype))


def _prefers_columns(problem: WeightGradient) -> bool:
    """True if the "columns" implementation is expected to be faster than oneDNN's kernel.

    oneDNN's kernel takes up to twice as long if there are no more windows than output channels. On processors with AVX2 but not AVX-512, it
    also takes 1.1 to 2.5 times as long in float32 for many channels in one or two dimensions, unless the contiguous pieces of a window are
    small. In three dimensions, oneDNN's kernel is as fast, and needs no memory for windows.
    """
    if not _is_large(problem):
        return False
    out, channels, *kernel = problem.weight
    if out >= math.prod(problem.grad) // out:
        return True
    has_many_channels = len(kernel) <= 2 and out >= 64 and channels * kernel[-1] >= 48
    return has_many_channels and problem.dtype.itemsize == 4 and machine.has_avx2_alone()


# The size in bytes of the windows in one matrix product, per thread. These windows fit into the processor's caches.
_BLOCK_BYTES_PER_THREAD = 1 << 20


@WEIGHT_GRADIENT.implementation(
    "columns", platforms=["cpu"], supports=lambda problem: _has_result_shape(problem) and problem.groups == 1, preferred=_prefers_columns
)
def _by_columns(problem: WeightGradient, x: Array, grad: Array) -> Array:
    """Multiplies two matrices with one row for each window (im2col), in blocks of rows."""
    out, channels, *kernel = problem.weight
    spatial_dims = range(len(kernel))

    def write(results: Sequence[torch.Tensor], operands: Sequence[torch.Tensor]) -> None:
        rows, grad_rows = operands
        if any(problem.padding):
            rows = torch.constant_pad_nd(rows, [0, 0, *(pad for dim in reversed(spatial_dims) for pad in (problem.padding[dim],) * 2)])
        batch_stride, *spatial_strides, channel_stride = rows.stride()
        window_strides = [step * stride for step, stride in zip(spatial_strides, problem.stride, strict=True)]
        kernel_strides = [step * dilation for step, dilation in zip(spatial_strides, problem.dilation, strict=True)]
        windows = rows.as_strided(
            (*grad_rows.shape[:-1], *kernel, channels), (batch_stride, *window_strides, *kernel_strides, channel_stride)
        )
        gradient = grad_rows.new_zeros((out, math.prod(problem.weight[1:])))
        for window_block, grad_block in _blocks(windows, grad_rows):
            gradient.addmm_(grad_block.reshape(-1, out).t(), window_block.reshape(-1, gradient.shape[1]))
        results[0].copy_(gradient.view(out, *kernel, channels).movedim(-1, 1))

    (result,) = torch_kernels.call(write, [channels_last(x), channels_last(grad)], [(problem.weight, problem.dtype)])
    return convert(result, dtypes.accumulator(problem.dtype))


def _blocks(windows: torch.Tensor, grad_rows: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields blocks of both tensors: some samples, or some rows of one sample. Half types give one block, to round each sum only once."""
    samples, rows = grad_rows.shape[:2]
    count = max(1, _BLOCK_BYTES_PER_THREAD * torch.get_num_threads() * samples * rows // (windows.numel() * windows.element_size()))
    if grad_rows.element_size() < 4:
        yield windows, grad_rows
    elif count >= rows:
        yield from zip(windows.split(count // rows), grad_rows.split(count // rows), strict=True)
    else:
        for sample, grads in zip(windows, grad_rows, strict=True):
            yield from zip(sample.split(count), grads.split(count), strict=True)


# From this number of channels on, oneDNN is faster with the channels-first layout.
_MIN_CHANNELS_FOR_CHANNELS_FIRST = 512


@WEIGHT_GRADIENT.implementation("torch", platforms=["cpu"], supports=_has_result_shape, preferred=_is_large)
def _weight_gradient_by_torch(problem: WeightGradient, x: Array, grad: Array) -> Array:
    """Calls torch's kernel, which mostly calls oneDNN. XLA's convolution takes up to 20 times as long, with groups even longer."""
    settings = list(problem.stride), list(problem.padding), list(problem.dilation), False, [0] * len(problem.stride), problem.groups

    def write(results: Sequence[torch.Tensor], operands: Sequence[torch.Tensor]) -> None:
        x_tensor, grad_tensor = (tensor.movedim(-1, 1) for tensor in operands)
        out, channels, *kernel = problem.weight
        weight = x_tensor.new_empty((out, *kernel, channels)).movedim(-1, 1)  # only the shape and the memory order are read
        if problem.groups == 1 and min(problem.weight[:2]) >= _MIN_CHANNELS_FOR_CHANNELS_FIRST:
            x_tensor, grad_tensor, weight = x_tensor.contiguous(), grad_tensor.contiguous(), results[0]
        results[0].copy_(aten.convolution_backward(grad_tensor, x_tensor, weight, None, *settings, [False, True, False])[1])

    (result,) = torch_kernels.call(write, [channels_last(x), channels_last(grad)], [(problem.weight, problem.dtype)])
    return convert(result, dtypes.accumulator(problem.dtype))


@WEIGHT_GRADIENT.implementation(
    "cudnn", platforms=["cuda"], supports=lambda problem: dtypes.is_float(problem.dtype) and problem.dtype.itemsize == 2
)
def _weight_gradient_by_cudnn(problem: WeightGradient, x: Array, grad: Array) -> Array:
    """Accumulates in float32 and rounds the result to the half dtype, as the implementation "cudnn" of a convolution does."""
    return _weight_gradient_by_xla(problem, x, grad, problem.dtype)


@WEIGHT_GRADIENT.implementation("xla")
def _weight_gradient_by_xla(problem: WeightGradient, x: Array, grad: Array, dtype: DType | None = None) -> Array:
    """Convolves x with grad, with batch and channels exchanged. `dtype` is that of the result, by default the accumulator's."""
    pads = []
    sizes = zip(range(2, x.ndim), problem.stride, problem.padding, problem.dilation, strict=True)
    for dim, step, pad, dilation in sizes:
        covered = (grad.shape[dim] - 1) * step + 1
        needed = (problem.weight[dim] - 1) * dilation + covered
        pads.append((pad, needed - x.shape[dim] - pad))
    return lax.conv_general_dilated(
        x,
        grad,
        window_strides=problem.dilation,
        padding=pads,
        rhs_dilation=problem.stride,
        dimension_numbers=lax.ConvDimensionNumbers(*[(1, 0, *range(2, x.ndim))] * 3),
        batch_group_count=problem.groups,
        precision=problem.precision,
        preferred_element_type=dtype or dtypes.accumulator(x.dtype),
    )


def weight_gradient(
    x: Array, grad: Array, shape: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes, groups: int, ctx: Context
) -> Array:
    """Returns the gradient of a convolution's weight of `shape` (out, in / groups, *kernel), by the chosen implementation."""
    if 0 in x.shape or 0 in grad.shape or math.prod(shape) == 0:
        return lax.full(shape, 0, dtypes.accumulator(x.dtype))
    settings = tuple(shape), tuple(stride), tuple(padding), tuple(dilation), groups
    precision = precision_for(ctx.settings.convolution_precision, x.dtype)
    problem = WeightGradient(x.shape, grad.shape, *settings, x.dtype, precision, ctx.platform)
    return ctx.choose(WEIGHT_GRADIENT, problem).run(problem, x, grad)
