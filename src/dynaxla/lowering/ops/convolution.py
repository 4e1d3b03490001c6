"""Convolutions and their gradients, of tensors in PyTorch's order of dimensions: (batch, channel, *space)."""

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
from ..dimensions import Sizes
from ..dtypes import DType
from ..implementations import Implementations, Operand
from ..promotion import convert, number, to_accumulator
from ..registry import lowers
from ..settings import precision_for
from .weight_gradients import weight_gradient


@dataclass(frozen=True)
class ConvolutionProblem:
    """The shapes, dtype and settings of a convolution, for which an implementation is chosen.

    Attributes:
        x: shape of the input, (batch, in, *space).
        weight: shape of the weight: (out, in / groups, *kernel), or (in, out, *kernel) if `is_swapped`.
        out: shape of the result, (batch, out, *windows).
        stride: distance between windows.
        padding: numbers of zeros added at both ends of each spatial dimension; negative values crop x.
        base_dilation: distance between x's elements, with zeros in between (JAX's lhs_dilation).
        dilation: distance between the weight's elements (JAX's rhs_dilation).
        groups: number of groups.
        transposed: True for a transposed convolution, which is the gradient of a convolution's input. The weight is already reversed along
            the spatial dimensions.
        dtype: dtype of x and weight. For half types, the result has this dtype or float32, depending on the implementation.
        precision: precision of the products, as for `lax.conv_general_dilated`.
        platform: `Context.platform`.
    """

    x: tuple[int, ...]
    weight: tuple[int, ...]
    out: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    base_dilation: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    transposed: bool
    dtype: DType
    precision: lax.Precision
    platform: str

    @property
    def is_swapped(self) -> bool:
        """True if the weight's first dimension is the input channels and its second dimension the output channels."""
        return self.transposed and self.groups == 1

    @property
    def products(self) -> int:
        """Number of multiplications."""
        inputs = self.weight[0 if self.is_swapped else 1]
        return math.prod(self.out) * inputs * math.prod(self.weight[2:])

    @property
    def result_order(self) -> tuple[int, ...] | None:
        """Memory order of x and of the result; None for row-major."""
        return order_between_convolutions(len(self.x), self.platform)

    @property
    def operands(self) -> tuple[Operand, ...]:
        """Metadata of x and of the weight."""
        return Operand(self.x, self.dtype, self.result_order), Operand(self.weight, self.dtype)

    def __str__(self) -> str:
        shapes = f"{self.dtype}{list(self.x)} by {list(self.weight)}{', transposed' if self.transposed else ''}"
        defaults = {"stride": 1, "padding": (0, 0), "base_dilation": 1, "dilation": 1}
        settings = [(name, getattr(self, name)) for name, value in defaults.items() if any(item != value for item in getattr(self, name))]
        settings += [("groups", self.groups)] if self.groups > 1 else []
        return ", ".join([shapes, *(f"{name} {value}" for name, value in settings)])


CONVOLUTION: Implementations[ConvolutionProblem] = Implementations("convolution")

# With fewer multiplications, the call of oneDNN takes longer (15 microseconds) than the time that it saves.
_MIN_PRODUCTS_FOR_ONEDNN = 250_000

# Depthwise convolutions with more elements in the kernel are computed by oneDNN, not by the implementation "taps".
_MAX_KERNEL_SIZE_FOR_TAPS = 32


def _supports_onednn(problem: ConvolutionProblem) -> bool:
    return 3 <= len(problem.x) <= 5 and onednn_support.supports(problem.dtype)


def _supports_patches(problem: ConvolutionProblem) -> bool:
    """True if the windows tile x without gaps or overlap, for example windows of one element with stride 1."""
    return (
        _supports_onednn(problem)
        and problem.groups == 1
        and problem.stride == problem.weight[2:]
        and all(size == step * count for size, step, count in zip(problem.x[2:], problem.stride, problem.out[2:], strict=True))
        and not any(size for pair in problem.padding for size in pair)
        and all(step == 1 for step in problem.base_dilation)
        and all(step == 1 or size == 1 for step, size in zip(problem.dilation, problem.weight[2:], strict=True))
    )


@CONVOLUTION.implementation(
    "patches",
    platforms=["cpu"],
    supports=_supports_patches,
    preferred=lambda problem: problem.products >= _MIN_PRODUCTS_FOR_ONEDNN,
)
def _by_patches(problem: ConvolutionProblem, x: Array, weight: Array, bias: Array | None = None) -> Array:
    """The convolution as one matrix product: a matrix with a row for each window, times the weight."""
    kernel = problem.weight[2:]
    if math.prod(kernel) == 1:
        rows, is_swapped = channels_last(x), problem.is_swapped
    else:
        # (batch, in, *(window, element)) -> (batch, *windows, in, *elements): a row's elements are then in the weight's order.
        split = (size for pair in zip(problem.out[2:], kernel, strict=True) for size in pair)
        rows = lax.reshape(x, (*x.shape[:2], *split))
        rows = lax.transpose(rows, (0, *range(2, rows.ndim, 2), 1, *range(3, rows.ndim, 2)))
        weight, is_swapped = lax.transpose(weight, (1, 0, *range(2, weight.ndim))) if problem.is_swapped else weight, False
    inputs, outputs = problem.x[1] * math.prod(kernel), problem.out[1]
    # The rows keep their dimensions (batch, *windows): ops fused with the product then need no reshape, which would slow their loops.
    rows = lax.reshape(rows, (problem.out[0], *problem.out[2:], inputs))
    weight = lax.reshape(weight, (*(1 for _ in kernel), *((inputs, outputs) if is_swapped else (outputs, inputs))))
    return channels_first(onednn.matmul(rows, weight, False, not is_swapped, x.dtype, bias))


def _supports_taps(problem: ConvolutionProblem) -> bool:
    """True for a one-dimensional depthwise convolution: each channel has its own kernel."""
    return len(problem.x) == 3 and problem.weight[:2] == (problem.groups, 1) and problem.x[1] == problem.groups


@CONVOLUTION.implementation(
    "taps", platforms=["cpu"], supports=_supports_taps, preferred=lambda problem: problem.weight[2] <= _MAX_KERNEL_SIZE_FOR_TAPS
)
def _by_taps(problem: ConvolutionProblem, x: Array, weight: Array, bias: Array | None = None) -> Array:
    """The sum, over the kernel's elements (the taps), of the element times a slice of x.

    XLA fuses these elementwise ops with neighbouring ops in any layout. oneDNN takes ten times as long, torch five times.
    """
    accumulator = dtypes.accumulator(problem.dtype)
    (padding,), (step,) = problem.padding, problem.base_dilation
    x = lax.pad(convert(x, accumulator), number(0, accumulator), [(0, 0, 0), (0, 0, 0), (*padding, step - 1)])
    span = (problem.out[2] - 1) * problem.stride[0] + 1
    # (kernel, channels): the factors of one kernel element are contiguous.
    factors = in_memory(lax.transpose(lax.reshape(convert(weight, accumulator), (problem.groups, problem.weight[2])), (1, 0)))

    def tap(index: int) -> Array:
        start = index * problem.dilation[0]
        factor = lax.reshape(lax.slice_in_dim(factors, index, index + 1, axis=0), (problem.groups,))
        factor = lax.broadcast_in_dim(factor, problem.out, (1,))
        return lax.mul(lax.slice_in_dim(x, start, start + span, problem.stride[0], axis=2), factor)

    out = functools.reduce(lax.add, map(tap, range(problem.weight[2])))
    return out if bias is None else lax.add(out, lax.broadcast_in_dim(convert(bias, accumulator), out.shape, (1,)))


def _output_padding(problem: ConvolutionProblem) -> list[int]:
    """Returns the `output_padding` with which torch's transposed convolution computes this problem."""
    sizes = zip(problem.x[2:], problem.out[2:], problem.base_dilation, _torch_padding(problem), _kernel_spans(problem), strict=True)
    return [out - ((size - 1) * step - 2 * pad + span + 1) for size, out, step, pad, span in sizes]


def _torch_padding(problem: ConvolutionProblem) -> list[int]:
    """Returns the `padding` with which torch's transposed convolution computes this problem."""
    return [span - low for span, (low, _) in zip(_kernel_spans(problem), problem.padding, strict=True)]


def _kernel_spans(problem: ConvolutionProblem) -> list[int]:
    """Returns the distance between a kernel's first and last element along each spatial dimension."""
    return [(size - 1) * step for size, step in zip(problem.weight[2:], problem.dilation, strict=True)]


def _supports_torch(problem: ConvolutionProblem) -> bool:
    """True for a transposed convolution that torch supports: its padding and output padding are in torch's ranges, and `stride` is 1."""
    if not 3 <= len(problem.x) <= 5 or not problem.transposed:
        return False
    return (
        all(step == 1 for step in problem.stride)
        and all(pad >= 0 for pad in _torch_padding(problem))
        and all(0 <= extra < step for extra, step in zip(_output_padding(problem), problem.base_dilation, strict=True))
    )


def _prefers_torch(problem: ConvolutionProblem) -> bool:
    """True if other implementations would multiply the zeros of `base_dilation`, or reverse a weight that is larger than the result."""
    reversal_is_large = math.prod(problem.weight) > math.prod(problem.out) and math.prod(problem.weight[2:]) > 1
    return problem.products >= _MIN_PRODUCTS_FOR_ONEDNN and (reversal_is_large or any(step > 1 for step in problem.base_dilation))


@CONVOLUTION.implementation("torch", platforms=["cpu"], supports=_supports_torch, preferred=_prefers_torch)
def _by_torch(problem: ConvolutionProblem, x: Array, weight: Array, bias: Array | None = None) -> Array:
    """The transposed convolution as the gradient of a convolution's input, computed by torch.

    Other implementations also multiply the zeros between x's elements, and need a reversed weight.
    """
    space = tuple(range(2, x.ndim))
    if not problem.is_swapped:
        # (groups * out, in, *kernel) to (groups * in, out, *kernel)
        groups, inputs, kernel = problem.groups, problem.weight[1], problem.weight[2:]
        outputs = problem.weight[0] // groups
        weight = lax.transpose(lax.reshape(weight, (groups, outputs, inputs, *kernel)), (0, 2, 1, *range(3, x.ndim + 1)))
        weight = lax.reshape(weight, (groups * inputs, outputs, *kernel))
    settings = list(problem.base_dilation), _torch_padding(problem), list(problem.dilation), False, [0] * len(space), problem.groups

    def write(results: Sequence[torch.Tensor], operands: Sequence[torch.Tensor]) -> None:
        rows, kernel = operands
        grad_input = results[0].movedim(-1, 1)  # also the op's input, of which torch reads only shape and strides
        grad_input.copy_(aten.convolution_backward(rows.movedim(-1, 1), grad_input, kernel, None, *settings, [True, False, False])[0])

    shape = (problem.out[0], *problem.out[2:], problem.out[1])
    # torch needs the original weight, and `weight` is reversed. XLA removes this reversal together with the one in `_input_gradient`.
    (out,) = torch_kernels.call(write, [channels_last(x), lax.rev(weight, space)], [(shape, problem.dtype)])
    out = channels_first(out)
    return out if bias is None else lax.add(out, lax.broadcast_in_dim(convert(bias, out.dtype), out.shape, (1,)))


def _prefers_onednn(problem: ConvolutionProblem) -> bool:
    return problem.groups > 1 or problem.products >= _MIN_PRODUCTS_FOR_ONEDNN


@CONVOLUTION.implementation("onednn", platforms=["cpu"], supports=_supports_onednn, preferred=_prefers_onednn)
def _by_onednn(problem: ConvolutionProblem, x: Array, weight: Array, bias: Array | None = None) -> Array:
    padding = problem.padding
    if any(step > 1 for step in problem.base_dilation) or any(size < 0 for pair in padding for size in pair):
        spatial_padding = [(*pair, step - 1) for pair, step in zip(padding, problem.base_dilation, strict=True)]
        x = lax.pad(x, number(0, x.dtype), [(0, 0, 0), (0, 0, 0), *spatial_padding])
        padding = ((0, 0),) * len(padding)
    shape = (problem.out[0], *problem.out[2:], problem.out[1])
    settings = shape, problem.stride, padding, problem.dilation, problem.groups
    return channels_first(onednn.convolution(channels_last(x), weight, *settings, x.dtype, bias, transposed_weight=problem.is_swapped))


def _is_half(problem: ConvolutionProblem) -> bool:
    return dtypes.is_float(problem.dtype) and problem.dtype.itemsize == 2


@CONVOLUTION.implementation("cudnn", platforms=["cuda"], supports=_is_half)
def _by_cudnn(problem: ConvolutionProblem, x: Array, weight: Array, bias: Array | None = None) -> Array:
    """XLA's convolution with a result in x's half type. cuDNN adds in float32, and rounds once.

    For a result in float32, XLA would make cuDNN multiply float32 operands.
    """
    return _by_xla(problem, x, weight, bias, problem.dtype)


@CONVOLUTION.implementation("xla")
def _by_xla(problem: ConvolutionProblem, x: Array, weight: Array, bias: Array | None = None, dtype: DType | None = None) -> Array:
    """XLA's own convolution, with a result of dtype `dtype`. The default is float32 for half types, else x's dtype."""
    out = lax.conv_general_dilated(
        x,
        weight,
        window_strides=problem.stride,
        padding=problem.padding,
        lhs_dilation=problem.base_dilation,
        rhs_dilation=problem.dilation,
        dimension_numbers=_dimension_numbers(_NC_OR_OI, _IO if problem.is_swapped else _NC_OR_OI, _NC_OR_OI, x.ndim),
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
    # Source: ATen native/Convolution.cpp, check_shape_forward and check_output_padding. If x and weight are small, kernel_refusals.py has
    # already tried torch's kernel.
    if min(*stride, *dilation) <= 0 or min(*padding, *output_padding) < 0:
        raise UnsupportedOp(
            "torch's kernel refuses a convolution unless stride and dilation are positive, and padding and output_padding not negative: "
            f"stride {stride}, dilation {dilation}, padding {padding}"
        )
    if transposed and any(extra >= max(limits) for extra, *limits in zip(output_padding, stride, dilation, strict=True)):
        raise UnsupportedOp(
            "torch's kernel refuses an output_padding that is smaller than neither stride nor dilation: "
            f"{output_padding}, stride {stride}, dilation {dilation}"
        )
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
    """Gradients of input, weight and bias; None for each gradient that output_mask leaves out.

    Shape:  those of x and the weight; (out) for the bias.
    Dtype:  those of x and the weight; that of grad for the bias.
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
        # A transposed convolution is the input gradient of a plain one, in which grad is the input, and x the gradient of the result.
        plain_input, plain_grad = (grad, x) if transposed else (x, grad)
        grad_weight = convert(weight_gradient(plain_input, plain_grad, weight.shape, stride, padding, dilation, groups, ctx), weight.dtype)
    if output_mask[2]:
        total = lax.reduce_sum(to_accumulator(grad), [0, *range(2, grad.ndim)])
        grad_bias = convert(total, grad.dtype)
    return grad_input, grad_weight, grad_bias


def _per_dim(x: Array, *settings: Sizes) -> list[list[int]]:
    """Returns each setting as a list with one value per spatial dimension; a single value is repeated."""
    count = x.ndim - 2
    return [list(values) * count if len(values) == 1 else list(values) for values in settings]


def _dimension_numbers(lhs: tuple[int, int], rhs: tuple[int, int], out: tuple[int, int], rank: int) -> lax.ConvDimensionNumbers:
    """Returns XLA's dimension numbers. Spatial dimensions come last in all three arrays.

    Args:
        lhs: positions of (batch, feature) in x.
        rhs: positions of (output feature, input feature) in the weight.
        out: positions of (batch, feature) in the result.
        rank: rank of each array.
    """
    space = tuple(range(2, rank))
    return lax.ConvDimensionNumbers(lhs + space, rhs + space, out + space)


# Arguments of `_dimension_numbers`: for arrays in the order (batch, feature) or (output feature, input feature), and for weights in the
# order (input feature, output feature).
_NC_OR_OI = (0, 1)
_IO = (1, 0)


def convolve(
    x: Array, weight: Array, bias: Array | None, shape: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes, groups: int, ctx: Context
) -> Array:
    """Returns the plain (not transposed) convolution with a result of `shape`. See `ConvolutionProblem.dtype` for its dtype."""
    space = range(2, x.ndim)
    padding_pairs, window_counts = [], []
    for dim, step, pad, spacing in zip(space, stride, padding, dilation, strict=True):
        padding_pairs.append((pad, pad))
        window_counts.append((x.shape[dim] + 2 * pad - spacing * (weight.shape[dim] - 1) - 1) // step + 1)
    full_shape = (*shape[:2], *window_counts)
    out = _correlate(x, weight, bias, full_shape, ctx, groups, stride=stride, padding=padding_pairs, dilation=dilation)
    # In the input gradient of a transposed convolution, an output padding of the stride or more gives surplus windows at the end.
    return out if out.shape == tuple(shape) else lax.slice(out, [0] * out.ndim, shape)


def _input_gradient(
    grad: Array, weight: Array, bias: Array | None, shape: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes, groups: int, ctx: Context
) -> Array:
    """Returns a plain convolution's input gradient, of shape `shape`: grad, dilated by the stride, convolved with the reversed weight."""
    space = range(2, grad.ndim)
    reversed_weight = lax.rev(weight, tuple(dim for dim in space if weight.shape[dim] > 1))
    if groups > 1:
        # (groups * out, in, ...) -> (groups * in, out, ...): XLA splits the output features, the first dimension, into groups.
        out_channels, in_channels = weight.shape[0] // groups, weight.shape[1]
        reversed_weight = lax.reshape(reversed_weight, (groups, out_channels, *weight.shape[1:]))
        reversed_weight = lax.transpose(reversed_weight, (0, 2, 1, *range(3, grad.ndim + 1)))
        reversed_weight = lax.reshape(reversed_weight, (groups * in_channels, out_channels, *weight.shape[2:]))
    padding_pairs = []
    for dim, step, pad, spacing in zip(space, stride, padding, dilation, strict=True):
        span = spacing * (weight.shape[dim] - 1)
        dilated = (grad.shape[dim] - 1) * step + 1
        padding_pairs.append((span - pad, shape[dim] + pad - dilated))
    return _correlate(
        grad, reversed_weight, bias, shape, ctx, groups, padding=padding_pairs, base_dilation=stride, dilation=dilation, transposed=True
    )


def _correlate(
    x: Array,
    weight: Array,
    bias: Array | None,
    shape: Sizes,
    ctx: Context,
    groups: int,
    *,
    stride: Sizes = (),
    padding: Sequence[tuple[int, int]],
    base_dilation: Sizes = (),
    dilation: Sizes,
    transposed: bool = False,
) -> Array:
    """Returns the sum of products over windows, by the chosen implementation.

    Args:
        x: the input.
        weight: the weight, reversed along the spatial dimensions if `transposed`.
        bias: added to each output channel; None for no bias.
        shape: shape of the result.
        ctx: context of the current node.
        groups, stride, padding, base_dilation, dilation, transposed: attributes of `ConvolutionProblem`. An empty stride or base_dilation
            means 1.
    """
    if 0 in x.shape or 0 in weight.shape or 0 in shape:
        out = lax.full(shape, 0, dtypes.accumulator(x.dtype))
        return out if bias is None else lax.add(out, lax.broadcast_in_dim(convert(bias, out.dtype), out.shape, (1,)))
    ones = (1,) * (x.ndim - 2)
    problem = ConvolutionProblem(
        x.shape,
        weight.shape,
        tuple(shape),
        tuple(stride) or ones,
        tuple(padding),
        tuple(base_dilation) or ones,
        tuple(dilation),
        groups,
        transposed,
        x.dtype,
        precision_for(ctx.settings.convolution_precision, x.dtype),
        ctx.platform,
    )
    return ctx.choose(CONVOLUTION, problem).run(problem, x, weight, bias)
