"""Convolutions and their gradients, in PyTorch's own order of dimensions (batch, channel, space)."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jax import Array, lax

from ...errors import UnsupportedOp
from ...torch_ops import aten
from .. import dtypes
from ..context import Context
from ..cpu import onednn, onednn_support, torch_kernels
from ..cpu.channels_last import channels_first, channels_last, order_between_convolutions
from ..cpu.materialize import in_memory
from ..dtypes import DType
from ..implementations import Implementations, Operand
from ..promotion import convert, number
from ..registry import lowers
from ..settings import precision_for
from .weight_gradients import weight_gradient

Sizes = Sequence[int]


@dataclass(frozen=True)
class Convolution:
    """The shapes, dtype and settings of a convolution, by which an implementation is chosen.

    Attributes:
        x: shape of the input, (batch, in, *space).
        weight: shape of the weight, (out, in / groups, *kernel), or (in, out, *kernel) if `swapped`.
        out: shape of the result, (batch, out, *windows).
        stride: distance between windows.
        margins: padding with zeros at both ends of each spatial dimension; negative values crop x.
        spread: distance between x's elements, with zeros in between (XLA's lhs_dilation).
        dilation: distance between the weight's elements (XLA's rhs_dilation).
        groups: number of groups.
        mirrored: True if the weight is already reversed in space, as for the gradient of a convolution's input.
        dtype: of x and weight. The result has this dtype, or the accumulator's.
        precision: of the products, as for `lax.conv_general_dilated`.
        platform: JAX's name of the platform.
    """

    x: tuple[int, ...]
    weight: tuple[int, ...]
    out: tuple[int, ...]
    stride: tuple[int, ...]
    margins: tuple[tuple[int, int], ...]
    spread: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    mirrored: bool
    dtype: DType
    precision: lax.Precision
    platform: str

    @property
    def swapped(self) -> bool:
        return self.mirrored and self.groups == 1

    @property
    def products(self) -> int:
        """Number of multiplications."""
        inputs = self.weight[0 if self.swapped else 1]
        return math.prod(self.out) * inputs * math.prod(self.weight[2:])

    @property
    def result_order(self) -> tuple[int, ...] | None:
        return order_between_convolutions(len(self.x), self.platform)

    @property
    def operands(self) -> tuple[Operand, ...]:
        return Operand(self.x, self.dtype, self.result_order), Operand(self.weight, self.dtype)

    def __str__(self) -> str:
        shapes = f"{self.dtype}{list(self.x)} by {list(self.weight)}{', mirrored' if self.mirrored else ''}"
        plain = {"stride": 1, "margins": (0, 0), "spread": 1, "dilation": 1}
        given = [(name, getattr(self, name)) for name, value in plain.items() if any(item != value for item in getattr(self, name))]
        given += [("groups", self.groups)] if self.groups > 1 else []
        return ", ".join([shapes, *(f"{name} {value}" for name, value in given)])


CONVOLUTION: Implementations[Convolution] = Implementations("convolution")

# With fewer products, a call of oneDNN costs more (15 microseconds) than it saves.
_FEW_PRODUCTS = 250_000


# Depthwise convolutions with more kernel elements are left to oneDNN.
_MOST_TAPS = 32


def _supports_onednn(problem: Convolution) -> bool:
    return 3 <= len(problem.x) <= 5 and onednn_support.supports(problem.dtype)


def _supports_patches(problem: Convolution) -> bool:
    """True if the windows tile x without gaps or overlap, as windows of one element do."""
    return (
        _supports_onednn(problem)
        and problem.groups == 1
        and problem.stride == problem.weight[2:]
        and all(size == step * count for size, step, count in zip(problem.x[2:], problem.stride, problem.out[2:], strict=True))
        and not any(margin for ends in problem.margins for margin in ends)
        and all(step == 1 for step in problem.spread)
        and all(step == 1 or size == 1 for step, size in zip(problem.dilation, problem.weight[2:], strict=True))
    )


@CONVOLUTION.implementation(
    "patches", platforms=["cpu"], supports=_supports_patches, preferred=lambda problem: problem.products >= _FEW_PRODUCTS
)
def _by_patches(problem: Convolution, x: Array, weight: Array, bias: Array | None = None) -> Array:
    """One matrix product: a matrix with a row for each window, times the weight."""
    kernel = problem.weight[2:]
    if math.prod(kernel) == 1:
        rows, swapped = channels_last(x), problem.swapped
    else:
        # (batch, in, *(window, inside)) -> (batch, *windows, in, *inside): a row's elements are then in the weight's order.
        split = (size for pair in zip(problem.out[2:], kernel, strict=True) for size in pair)
        rows = lax.reshape(x, (*x.shape[:2], *split))
        rows = lax.transpose(rows, (0, *range(2, rows.ndim, 2), 1, *range(3, rows.ndim, 2)))
        weight, swapped = lax.transpose(weight, (1, 0, *range(2, weight.ndim))) if problem.swapped else weight, False
    inputs, outputs = problem.x[1] * math.prod(kernel), problem.out[1]
    # The rows keep their dimensions (batch, *windows): ops fused with the product then need no reshape, which would slow their loops.
    rows = lax.reshape(rows, (problem.out[0], *problem.out[2:], inputs))
    weight = lax.reshape(weight, (*(1 for _ in kernel), *((inputs, outputs) if swapped else (outputs, inputs))))
    return channels_first(onednn.matmul(rows, weight, False, not swapped, x.dtype, bias))


def _supports_taps(problem: Convolution) -> bool:
    """True for a one-dimensional depthwise convolution: each channel has its own kernel."""
    return len(problem.x) == 3 and problem.weight[:2] == (problem.groups, 1) and problem.x[1] == problem.groups


@CONVOLUTION.implementation("taps", platforms=["cpu"], supports=_supports_taps, preferred=lambda problem: problem.weight[2] <= _MOST_TAPS)
def _by_taps(problem: Convolution, x: Array, weight: Array, bias: Array | None = None) -> Array:
    """The sum, over the kernel's elements, of each element times a slice of x: elementwise work, which XLA fuses with neighbouring ops in
    any layout. oneDNN takes ten times as long, torch five times."""
    wide = dtypes.accumulator(problem.dtype)
    (margins,), (step,) = problem.margins, problem.spread
    x = lax.pad(convert(x, wide), number(0, wide), [(0, 0, 0), (0, 0, 0), (*margins, step - 1)])
    reach = (problem.out[2] - 1) * problem.stride[0] + 1
    # (kernel, channels): the factors of one kernel element are contiguous.
    factors = in_memory(lax.transpose(lax.reshape(convert(weight, wide), (problem.groups, problem.weight[2])), (1, 0)))

    def tap(place: int) -> Array:
        start = place * problem.dilation[0]
        factor = lax.reshape(lax.slice_in_dim(factors, place, place + 1, axis=0), (problem.groups,))
        factor = lax.broadcast_in_dim(factor, problem.out, (1,))
        return lax.mul(lax.slice_in_dim(x, start, start + reach, problem.stride[0], axis=2), factor)

    out = functools.reduce(lax.add, map(tap, range(problem.weight[2])))
    return out if bias is None else lax.add(out, lax.broadcast_in_dim(convert(bias, wide), out.shape, (1,)))


def _output_padding(problem: Convolution) -> list[int]:
    """The `output_padding` of torch's transposed convolution that computes this convolution of a dilated x (`spread`)."""
    sizes = zip(problem.x[2:], problem.out[2:], problem.spread, _padding(problem), _reach(problem), strict=True)
    return [out - ((size - 1) * step - 2 * pad + reach + 1) for size, out, step, pad, reach in sizes]


def _padding(problem: Convolution) -> list[int]:
    return [reach - low for reach, (low, _) in zip(_reach(problem), problem.margins, strict=True)]


def _reach(problem: Convolution) -> list[int]:
    """The distance between a kernel's first and last element along each spatial dimension."""
    return [(size - 1) * step for size, step in zip(problem.weight[2:], problem.dilation, strict=True)]


def _supports_torch(problem: Convolution) -> bool:
    """True if this is the gradient of the input of a convolution that torch can compute."""
    if not 3 <= len(problem.x) <= 5 or not problem.mirrored:
        return False
    return (
        all(step == 1 for step in problem.stride)
        and all(pad >= 0 for pad in _padding(problem))
        and all(0 <= extra < step for extra, step in zip(_output_padding(problem), problem.spread, strict=True))
    )


def _prefers_torch(problem: Convolution) -> bool:
    turning = math.prod(problem.weight) > math.prod(problem.out) and math.prod(problem.weight[2:]) > 1
    return problem.products >= _FEW_PRODUCTS and (turning or any(step > 1 for step in problem.spread))


@CONVOLUTION.implementation("torch", platforms=["cpu"], supports=_supports_torch, preferred=_prefers_torch)
def _by_torch(problem: Convolution, x: Array, weight: Array, bias: Array | None = None) -> Array:
    """torch's own gradient of a convolution's input.

    Other implementations multiply the zeros between x's elements, and need a reversed weight.
    """
    space = tuple(range(2, x.ndim))
    if not problem.swapped:
        # (groups * out, in, *kernel) to (groups * in, out, *kernel)
        groups, inputs, kernel = problem.groups, problem.weight[1], problem.weight[2:]
        outputs = problem.weight[0] // groups
        weight = lax.transpose(lax.reshape(weight, (groups, outputs, inputs, *kernel)), (0, 2, 1, *range(3, x.ndim + 1)))
        weight = lax.reshape(weight, (groups * inputs, outputs, *kernel))
    settings = list(problem.spread), _padding(problem), list(problem.dilation), False, [0] * len(space), problem.groups

    def write(results: Sequence[torch.Tensor], operands: Sequence[torch.Tensor]) -> None:
        rows, kernel = operands
        into = results[0].movedim(-1, 1)  # passed as the input, of which torch reads only the shape and the strides
        into.copy_(aten.convolution_backward(rows.movedim(-1, 1), into, kernel, None, *settings, [True, False, False])[0])

    shape = (problem.out[0], *problem.out[2:], problem.out[1])
    # The weight was reversed for this problem; XLA removes both reversals.
    (out,) = torch_kernels.call(write, [channels_last(x), lax.rev(weight, space)], [(shape, problem.dtype)])
    out = channels_first(out)
    return out if bias is None else lax.add(out, lax.broadcast_in_dim(convert(bias, out.dtype), out.shape, (1,)))


def _prefers_onednn(problem: Convolution) -> bool:
    return problem.groups > 1 or problem.products >= _FEW_PRODUCTS


@CONVOLUTION.implementation("onednn", platforms=["cpu"], supports=_supports_onednn, preferred=_prefers_onednn)
def _by_onednn(problem: Convolution, x: Array, weight: Array, bias: Array | None = None) -> Array:
    margins = problem.margins
    if any(step > 1 for step in problem.spread) or any(margin < 0 for ends in margins for margin in ends):
        inside = [(*ends, step - 1) for ends, step in zip(margins, problem.spread, strict=True)]
        x = lax.pad(x, number(0, x.dtype), [(0, 0, 0), (0, 0, 0), *inside])
        margins = ((0, 0),) * len(margins)
    shape = (problem.out[0], *problem.out[2:], problem.out[1])
    settings = shape, problem.stride, margins, problem.dilation, problem.groups
    return channels_first(onednn.convolution(channels_last(x), weight, *settings, x.dtype, bias, swapped=problem.swapped))


def _is_half(problem: Convolution) -> bool:
    return dtypes.is_float(problem.dtype) and problem.dtype.itemsize == 2


@CONVOLUTION.implementation("cudnn", platforms=["cuda"], supports=_is_half)
def _by_cudnn(problem: Convolution, x: Array, weight: Array, bias: Array | None = None) -> Array:
    """The convolution with a result of the half type: cuDNN adds in float32, and rounds once. For a float32 result XLA would make cuDNN
    multiply float32 operands."""
    return _by_xla(problem, x, weight, bias, problem.dtype)


@CONVOLUTION.implementation("xla")
def _by_xla(problem: Convolution, x: Array, weight: Array, bias: Array | None = None, dtype: DType | None = None) -> Array:
    """XLA's own convolution. dtype: of the result; by default that of x's accumulator."""
    out = lax.conv_general_dilated(
        x,
        weight,
        window_strides=problem.stride,
        padding=problem.margins,
        lhs_dilation=problem.spread,
        rhs_dilation=problem.dilation,
        dimension_numbers=_dimension_numbers(_PLAIN, _SWAPPED if problem.swapped else _PLAIN, _PLAIN, x.ndim),
        feature_group_count=problem.groups,
        precision=problem.precision,
        preferred_element_type=dtype or dtypes.accumulator(x.dtype),
    )
    return out if bias is None else lax.add(out, lax.broadcast_in_dim(convert(bias, out.dtype), out.shape, (1,)))


@lowers(aten.convolution.default)
def convolution(
    x: Array,
    weight: Array,
    bias: Array | None,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    transposed: bool,
    output_padding: Sizes,
    groups: int,
    *,
    ctx: Context,
) -> Array:
    """The convolution, or transposed convolution, of x with the weight, plus the bias. Half types are added in float32.

    Shape:  x (batch, in, *space), weight (out, in / groups, *kernel), or (in, out / groups, *kernel) if transposed, and bias (out) give
            (batch, out, *windows).
    Dtype:  that of x.
    """
    stride, padding, dilation, output_padding = _per_dim(x, stride, padding, dilation, output_padding)
    # Source: ATen native/Convolution.cpp, check_shape_forward and check_output_padding. For small tensors, kernel_refusals.py asks torch.
    if min(*stride, *dilation) <= 0 or min(*padding, *output_padding) < 0:
        raise UnsupportedOp(f"torch's kernel refuses a convolution with stride {stride}, dilation {dilation}, padding {padding}")
    if transposed and any(more >= max(steps) for more, *steps in zip(output_padding, stride, dilation, strict=True)):
        raise UnsupportedOp(f"torch's kernel refuses output padding {output_padding} with stride {stride}, dilation {dilation}")
    shape = ctx.output.shape
    if transposed:
        # A transposed convolution is the gradient of a plain convolution with respect to its input.
        out = _input_gradient(x, weight, bias, shape, stride, padding, dilation, groups, ctx)
    else:
        out = convolve(x, weight, bias, shape, stride, padding, dilation, groups, ctx)
    return convert(out, x.dtype)


@lowers(aten.convolution_backward.default)
def convolution_backward(
    grad: Array,
    x: Array,
    weight: Array,
    bias_sizes: Sizes | None,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    transposed: bool,
    output_padding: Sizes,
    groups: int,
    output_mask: Sequence[bool],
    *,
    ctx: Context,
) -> tuple[Array | None, Array | None, Array | None]:
    """Gradients of input, weight and bias; None for each that output_mask leaves out.

    Shape:  those of x and the weight; (out) for the bias.
    Dtype:  those of x and the weight; of grad for the bias.
    """
    stride, padding, dilation = _per_dim(x, stride, padding, dilation)
    grad_input = grad_weight = grad_bias = None
    if output_mask[0]:
        if transposed:
            grad_input = convolve(grad, weight, None, x.shape, stride, padding, dilation, groups, ctx)
        else:
            grad_input = _input_gradient(grad, weight, None, x.shape, stride, padding, dilation, groups, ctx)
        grad_input = convert(grad_input, x.dtype)
    if output_mask[1]:
        wide, narrow = (grad, x) if transposed else (x, grad)
        grad_weight = convert(weight_gradient(wide, narrow, weight.shape, stride, padding, dilation, groups, ctx), weight.dtype)
    if output_mask[2]:
        total = lax.reduce_sum(convert(grad, dtypes.accumulator(grad.dtype)), [0, *range(2, grad.ndim)])
        grad_bias = convert(total, grad.dtype)
    return grad_input, grad_weight, grad_bias


def _per_dim(x: Array, *settings: Sizes) -> list[list[int]]:
    """Each setting as a list with one value per spatial dimension; a single value is repeated."""
    count = x.ndim - 2
    return [list(values) * count if len(values) == 1 else list(values) for values in settings]


def _dimension_numbers(lhs: tuple[int, int], rhs: tuple[int, int], out: tuple[int, int], rank: int) -> lax.ConvDimensionNumbers:
    """XLA's dimension numbers; spatial dimensions come last in all three arrays.

    lhs, out: positions of (batch, feature). rhs: positions of the (output, input) features.
    """
    space = tuple(range(2, rank))
    return lax.ConvDimensionNumbers(lhs + space, rhs + space, out + space)


_PLAIN = (0, 1)
_SWAPPED = (1, 0)


def convolve(
    x: Array, weight: Array, bias: Array | None, shape: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes, groups: int, ctx: Context
) -> Array:
    """The plain (not transposed) convolution, in x's dtype or the accumulator's. shape: of the result."""
    space = range(2, x.ndim)
    margins, reached = [], []
    for dim, step, pad, spread in zip(space, stride, padding, dilation, strict=True):
        margins.append((pad, pad))
        reached.append((x.shape[dim] + 2 * pad - spread * (weight.shape[dim] - 1) - 1) // step + 1)
    natural = (*shape[:2], *reached)
    out = _correlate(x, weight, bias, natural, ctx, groups, stride=stride, margins=margins, dilation=dilation)
    # In the gradient of a transposed convolution, an output padding beyond the stride gives more elements than its input has.
    return out if out.shape == tuple(shape) else lax.slice(out, [0] * out.ndim, shape)


def _input_gradient(
    grad: Array, weight: Array, bias: Array | None, shape: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes, groups: int, ctx: Context
) -> Array:
    """The gradient of a convolution's input of `shape`: grad, dilated by the stride, convolved with the reversed weight."""
    space = range(2, grad.ndim)
    mirrored = lax.rev(weight, tuple(dim for dim in space if weight.shape[dim] > 1))
    if groups > 1:
        # (groups * out, in, ...) -> (groups * in, out, ...): XLA splits the output features, the first dimension, into groups.
        out, into = weight.shape[0] // groups, weight.shape[1]
        mirrored = lax.reshape(mirrored, (groups, out, *weight.shape[1:]))
        mirrored = lax.transpose(mirrored, (0, 2, 1, *range(3, grad.ndim + 1)))
        mirrored = lax.reshape(mirrored, (groups * into, out, *weight.shape[2:]))
    margins = []
    for dim, step, pad, spread in zip(space, stride, padding, dilation, strict=True):
        reach = spread * (weight.shape[dim] - 1)
        covered = (grad.shape[dim] - 1) * step + 1
        margins.append((reach - pad, shape[dim] + pad - covered))
    return _correlate(grad, mirrored, bias, shape, ctx, groups, margins=margins, spread=stride, dilation=dilation, mirrored=True)


def _correlate(
    x: Array,
    weight: Array,
    bias: Array | None,
    shape: Sizes,
    ctx: Context,
    groups: int,
    *,
    stride: Sizes = (),
    margins: Sequence[tuple[int, int]],
    spread: Sizes = (),
    dilation: Sizes,
    mirrored: bool = False,
) -> Array:
    """The sum of products over windows, by the chosen implementation. The arguments are those of `Convolution`; shape is its `out`."""
    if 0 in x.shape or 0 in weight.shape or 0 in shape:
        out = lax.full(shape, 0, dtypes.accumulator(x.dtype))
        return out if bias is None else lax.add(out, lax.broadcast_in_dim(convert(bias, out.dtype), out.shape, (1,)))
    ones = (1,) * (x.ndim - 2)
    problem = Convolution(
        x.shape,
        weight.shape,
        tuple(shape),
        tuple(stride) or ones,
        tuple(margins),
        tuple(spread) or ones,
        tuple(dilation),
        groups,
        mirrored,
        x.dtype,
        precision_for(ctx.settings.convolution_precision, x.dtype),
        ctx.platform,
    )
    return ctx.choose(CONVOLUTION, problem).run(problem, x, weight, bias)
