"""The gradient of a convolution's weight, with several implementations to choose from. convolution.py calls it."""

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
from ..dtypes import DType
from ..implementations import Implementations, Operand
from ..promotion import convert
from ..settings import precision_for

Sizes = Sequence[int]


@dataclass(frozen=True)
class WeightGradient:
    """The problem of computing a weight gradient: shapes, dtype and settings, without the operands' values.

    Attributes:
        x, grad: shapes of the convolution's input and of the gradient of its result.
        weight: shape of the weight and its gradient, (out, in / groups, *kernel).
        stride, padding, dilation, groups: of the convolution.
        dtype: of x and grad. The result has this dtype or that of its accumulator.
        precision: of XLA's convolution.
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

# Numbers of multiplications below which the overhead of a call of torch's kernel (about 70 microseconds) exceeds the time it saves. With
# several groups XLA's loops take 3 to 16 nanoseconds per multiplication.
_FEW_PRODUCTS, _FEW_WITH_GROUPS = 250_000, 10_000


def _supports_product(problem: WeightGradient) -> bool:
    plain = problem.groups == 1 and math.prod(problem.weight[2:]) == 1 and not any(problem.padding)
    return plain and onednn_support.supports(problem.dtype)


def _prefers_product(problem: WeightGradient) -> bool:
    out, channels = problem.weight[:2]
    return not _prefers_columns(problem) or not onednn_support.is_slow(out, channels, True, False, problem.dtype)


@WEIGHT_GRADIENT.implementation("product", platforms=["cpu"], supports=_supports_product, preferred=_prefers_product)
def _by_product(problem: WeightGradient, x: Array, grad: Array) -> Array:
    """Computes 1x1 kernels as the product of two matrices with one row for each window."""
    rows = channels_last(x)
    stops = [(out - 1) * step + 1 for out, step in zip(problem.grad[2:], problem.stride, strict=True)]
    met = lax.slice(rows, (0,) * rows.ndim, (x.shape[0], *stops, x.shape[1]), (1, *problem.stride, 1))
    windows = math.prod(problem.grad) // problem.grad[1]
    met, upstream = lax.reshape(met, (windows, x.shape[1])), lax.reshape(channels_last(grad), (windows, problem.grad[1]))
    return lax.reshape(onednn.matmul(upstream, met, True, False, dtypes.accumulator(x.dtype)), problem.weight)


def _is_torchs(problem: WeightGradient) -> bool:
    """True if grad has the shape of the convolution's result, in one to three spatial dimensions.

    The shape differs for a transposed convolution with more output padding than stride.
    """
    if not 3 <= len(problem.x) <= 5:
        return False
    sizes = zip(problem.x[2:], problem.padding, problem.dilation, problem.weight[2:], problem.stride, strict=True)
    out = [(size + 2 * pad - spread * (width - 1) - 1) // step + 1 for size, pad, spread, width, step in sizes]
    return tuple(out) == problem.grad[2:]


def _is_large(problem: WeightGradient) -> bool:
    return math.prod(problem.grad) * math.prod(problem.weight[1:]) >= (_FEW_PRODUCTS if problem.groups == 1 else _FEW_WITH_GROUPS)


def _has_own_channels(problem: WeightGradient) -> bool:
    """True for a depthwise convolution with one output channel per input channel."""
    return (problem.x[1], problem.weight[0]) == (problem.groups,) * 2


# Products that are held in memory before they are added: they fit into the processor's cache.
_AT_ONCE = 1 << 18


@WEIGHT_GRADIENT.implementation(
    "sums",
    platforms=["cpu"],
    supports=lambda problem: _is_torchs(problem) and len(problem.x) == 3 and _has_own_channels(problem),
    preferred=_is_large,
)
def _by_sums(problem: WeightGradient, x: Array, grad: Array) -> Array:
    """Computes depthwise convolutions in one dimension: for each kernel position, grad times the rows of x that it reads, summed.

    oneDNN's kernel takes 2 to 8 times as long.
    """
    (step,), (spread,), (padding,) = problem.stride, problem.dilation, problem.padding
    channels, _, kernel = problem.weight
    wide = dtypes.accumulator(problem.dtype)
    count = max(1, _AT_ONCE // (channels * kernel))

    def write(results: Sequence[torch.Tensor], operands: Sequence[torch.Tensor]) -> None:
        rows, upstream = operands
        if padding:
            rows = torch.constant_pad_nd(rows, [0, 0, padding, padding])
        total = rows.new_zeros((kernel, channels))
        for padded, grads in zip(rows, upstream, strict=True):
            for first in range(0, len(grads), count):
                some = grads[first : first + count]
                shape, place = (kernel, *some.shape), padded.storage_offset() + first * step * channels
                met = padded.as_strided(shape, (spread * channels, step * channels, 1), place)
                total += (met * some).sum(1)
        results[0].copy_(total.t().unsqueeze(1))

    operands = [channels_last(convert(operand, wide)) for operand in (x, grad)]
    return torch_kernels.call(write, operands, [(problem.weight, wide)])[0]


# Columns of the weight that oneDNN's depthwise kernel holds in registers. For wider weights oneDNN uses a general kernel, which is 3 to 10
# times as slow, in bfloat16 up to 50 times.
_COLUMNS = 3


def _strips(problem: WeightGradient) -> list[tuple[int, int, int, int]]:
    """Returns the vertical strips of the weight, each at most _COLUMNS wide: (first column, number of columns, padding left, right).

    The paddings are columns of zeros that the strip needs on both sides of x; negative numbers are columns of x that it does not read.
    """
    found = []
    width, step, padding = problem.weight[3], problem.stride[1], problem.padding[1]
    for first in range(0, width, _COLUMNS):
        count = min(_COLUMNS, width - first)
        reach = (problem.grad[3] - 1) * step + count
        found.append((first, count, padding - first, reach - (padding - first) - problem.x[3]))
    return found


def _supports_strips(problem: WeightGradient) -> bool:
    """True for depthwise convolutions in two dimensions without dilation, if each strip reads a column of x."""
    return (
        _is_torchs(problem)
        and len(problem.x) == 4
        and _has_own_channels(problem)
        and all(step == 1 for step in problem.dilation)
        and all(min(before, after) > -problem.x[-1] for *_, before, after in _strips(problem))
    )


def _prefers_strips(problem: WeightGradient) -> bool:
    return _is_large(problem) and problem.weight[-1] > _COLUMNS


@WEIGHT_GRADIENT.implementation("strips", platforms=["cpu"], supports=_supports_strips, preferred=_prefers_strips)
def _by_strips(problem: WeightGradient, x: Array, grad: Array) -> Array:
    """Calls torch's kernel for a few columns of the weight at a time."""
    channels, _, height = problem.weight[:3]
    # torch's kernel accepts no weight that is higher than its input, so the input is padded beforehand.
    above = problem.padding[0] if height > problem.x[2] else 0
    settings = list(problem.stride), [problem.padding[0] - above, 0], [1, 1], False, [0, 0], problem.groups, [False, True, False]
    strips = _strips(problem)

    def write(results: Sequence[torch.Tensor], operands: Sequence[torch.Tensor]) -> None:
        rows, upstream = operands
        for first, count, *margins in strips:
            met = torch.constant_pad_nd(rows, [0, 0, *margins, above, above]).movedim(-1, 1)
            order = rows.new_empty((channels, height, count, 1)).movedim(-1, 1)  # gives the shape and memory order; values are not read
            found = aten.convolution_backward(upstream.movedim(-1, 1), met, order, None, *settings)[1]
            results[0][..., first : first + count].copy_(found)

    (result,) = torch_kernels.call(write, [channels_last(x), channels_last(grad)], [(problem.weight, problem.dtype)])
    return convert(result, dtypes.accumulator(problem.dtype))


def _supports_taps(problem: WeightGradient) -> bool:
    """True for one spatial dimension and one group, in a dtype of 32 bits or more: partial sums of half types would be rounded."""
    return _is_torchs(problem) and len(problem.x) == 3 and problem.groups == 1 and problem.dtype.itemsize >= 4


def _prefers_taps(problem: WeightGradient) -> bool:
    return _is_large(problem) and problem.weight[1] >= 32 and problem.weight[2] <= 3


@WEIGHT_GRADIENT.implementation("taps", platforms=["cpu"], supports=_supports_taps, preferred=_prefers_taps)
def _by_taps(problem: WeightGradient, x: Array, grad: Array) -> Array:
    """Computes one matrix product for each kernel position, without copying x; for one spatial dimension.

    oneDNN's kernel takes up to twice as long with 32 channels or more and kernels of size 3 or less.
    """
    (step,), (spread,), (padding,) = problem.stride, problem.dilation, problem.padding
    out, channels, kernel = problem.weight

    def write(results: Sequence[torch.Tensor], operands: Sequence[torch.Tensor]) -> None:
        rows, upstream = operands
        if padding:
            rows = torch.constant_pad_nd(rows, [0, 0, padding, padding])
        covered = (upstream.shape[1] - 1) * step + 1
        found = rows.new_empty((kernel, out, channels))
        for place, product in enumerate(found):
            met = rows[:, place * spread : place * spread + covered : step]
            torch.addbmm(product, upstream.transpose(1, 2), met, beta=0, out=product)
        results[0].copy_(found.permute(1, 2, 0))

    (result,) = torch_kernels.call(write, [channels_last(x), channels_last(grad)], [(problem.weight, problem.dtype)])
    return convert(result, dtypes.accumulator(problem.dtype))


def _prefers_columns(problem: WeightGradient) -> bool:
    """True if the "columns" implementation is expected to be faster than oneDNN's kernel.

    oneDNN's kernel takes up to twice as long if there are no more windows than output channels. On processors with AVX2 but not AVX-512 it
    also takes 1.1 to 2.5 times as long for many channels in one or two dimensions, unless the contiguous pieces of a window are small. In
    three dimensions it is as fast, and needs no memory for windows.
    """
    if not _is_large(problem):
        return False
    out, channels, *kernel = problem.weight
    if out >= math.prod(problem.grad) // out:
        return True
    are_many = len(kernel) <= 2 and out >= 64 and channels * kernel[-1] >= 48
    return are_many and problem.dtype.itemsize == 4 and machine.has_avx2_alone()


# Bytes of windows per thread in one matrix product: they fit into the processor's caches.
_BYTES_AT_ONCE = 1 << 20


@WEIGHT_GRADIENT.implementation(
    "columns", platforms=["cpu"], supports=lambda problem: _is_torchs(problem) and problem.groups == 1, preferred=_prefers_columns
)
def _by_columns(problem: WeightGradient, x: Array, grad: Array) -> Array:
    """Multiplies two matrices with one row for each window (im2col), in blocks of rows."""
    out, channels, *kernel = problem.weight
    space = range(len(kernel))

    def write(results: Sequence[torch.Tensor], operands: Sequence[torch.Tensor]) -> None:
        rows, upstream = operands
        if any(problem.padding):
            rows = torch.constant_pad_nd(rows, [0, 0, *(pad for dim in reversed(space) for pad in (problem.padding[dim],) * 2)])
        batch, *steps, place = rows.stride()
        moves = [step * stride for step, stride in zip(steps, problem.stride, strict=True)]
        inside = [step * dilation for step, dilation in zip(steps, problem.dilation, strict=True)]
        windows = rows.as_strided((*upstream.shape[:-1], *kernel, channels), (batch, *moves, *inside, place))
        found = upstream.new_zeros((out, math.prod(problem.weight[1:])))
        for some, grads in _blocks(windows, upstream):
            found.addmm_(grads.reshape(-1, out).t(), some.reshape(-1, found.shape[1]))
        results[0].copy_(found.view(out, *kernel, channels).movedim(-1, 1))

    (result,) = torch_kernels.call(write, [channels_last(x), channels_last(grad)], [(problem.weight, problem.dtype)])
    return convert(result, dtypes.accumulator(problem.dtype))


def _blocks(windows: torch.Tensor, upstream: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields blocks of both tensors: several samples, or several rows of one sample. Half types give one block, so that sums round once."""
    samples, rows = upstream.shape[:2]
    count = max(1, _BYTES_AT_ONCE * torch.get_num_threads() * samples * rows // (windows.numel() * windows.element_size()))
    if upstream.element_size() < 4:
        yield windows, upstream
    elif count >= rows:
        yield from zip(windows.split(count // rows), upstream.split(count // rows), strict=True)
    else:
        for sample, grads in zip(windows, upstream, strict=True):
            yield from zip(sample.split(count), grads.split(count), strict=True)


# From this number of channels on, oneDNN is faster with the channels-first layout.
_MANY_CHANNELS = 512


@WEIGHT_GRADIENT.implementation("torch", platforms=["cpu"], supports=_is_torchs, preferred=_is_large)
def _weight_gradient_by_torch(problem: WeightGradient, x: Array, grad: Array) -> Array:
    """Calls torch's kernel, which mostly calls oneDNN. XLA's convolution takes up to 20 times as long, with groups even longer."""
    settings = list(problem.stride), list(problem.padding), list(problem.dilation), False, [0] * len(problem.stride), problem.groups

    def write(results: Sequence[torch.Tensor], operands: Sequence[torch.Tensor]) -> None:
        rows, upstream = (tensor.movedim(-1, 1) for tensor in operands)
        out, channels, *kernel = problem.weight
        weight = rows.new_empty((out, *kernel, channels)).movedim(-1, 1)  # gives the shape and memory order; values are not read
        if problem.groups == 1 and min(problem.weight[:2]) >= _MANY_CHANNELS:
            rows, upstream, weight = rows.contiguous(), upstream.contiguous(), results[0]
        results[0].copy_(aten.convolution_backward(upstream, rows, weight, None, *settings, [False, True, False])[1])

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
    """Convolves x with grad, with batch and channels exchanged. `dtype` is the result's; by default that of the accumulator."""
    margins = []
    sizes = zip(range(2, x.ndim), problem.stride, problem.padding, problem.dilation, strict=True)
    for dim, step, pad, spread in sizes:
        covered = (grad.shape[dim] - 1) * step + 1
        wanted = (problem.weight[dim] - 1) * spread + covered
        margins.append((pad, wanted - x.shape[dim] - pad))
    return lax.conv_general_dilated(
        x,
        grad,
        window_strides=problem.dilation,
        padding=margins,
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
