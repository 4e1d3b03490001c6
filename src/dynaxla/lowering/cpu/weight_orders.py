"""Weights prepacked in the blocked memory order that oneDNN's kernels read.

Before oneDNN computes with a weight, it reorders the weight into blocks of some tens of output channels. The size of the blocks depends on
processor, shapes and dtype. XLA's calls accept a weight in this order, but there is no way to query the order. So the order is found by
trial: a random weight is packed in each order that occurs in practice. An order is right if the call gives the same result with the packed
weight as with the plain weight.

The order also depends on the number of processors on which the calling thread may run, which oneDNN queries when a thread first uses it. So
a packed weight must only be used while `are_orders_valid()` is true.

Source: oneDNN's developer guide, Memory Format Propagation; openxla/xla, xla/service/cpu/onednn_convolution.cc and onednn_matmul.cc
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import jax
import numpy as np
import torch
from jax import Array, lax

from ... import forks
from ...runtime import affinity, machine, private, programs
from ..dtypes import DType
from . import onednn, onednn_support

_library = torch.library.Library("dynaxla", "FRAGMENT")
_library.define("pack(Tensor weight, int[] dims, int[] blocked, int[] sizes) -> Tensor")
_library.define("packed_linear(Tensor x, Tensor packed, Tensor? bias, int columns) -> Tensor")
_library.define(
    "packed_convolution(Tensor x, Tensor packed, Tensor? bias, int[] weight, int[] stride, int[] padding, int[] dilation) -> Tensor"
)

pack = torch.ops.dynaxla.pack.default
packed_linear = torch.ops.dynaxla.packed_linear.default
packed_convolution = torch.ops.dynaxla.packed_convolution.default


@dataclass(frozen=True)
class Packing:
    """A blocked memory order of a weight: the outer dimensions, which count blocks, then the dimensions inside a block.

    Attributes:
        dims: The outer dimensions, from the slowest-varying to the fastest.
        blocked: The dimensions inside a block, from the slowest-varying to the fastest. A dimension may occur several times.
        sizes: The size of each entry of `blocked`.
    """

    dims: tuple[int, ...]
    blocked: tuple[int, ...]
    sizes: tuple[int, ...]

    def shape(self, weight: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the weight after padding to full blocks."""
        block = [1] * len(weight)
        for dim, size in zip(self.blocked, self.sizes, strict=True):
            block[dim] *= size
        return tuple(-(-size // full) * full for size, full in zip(weight, block, strict=True))

    def length(self, weight: tuple[int, ...]) -> int:
        """Returns the number of elements of the packed weight, including the SLACK elements after it, which a kernel may read."""
        return math.prod(self.shape(weight)) + SLACK

    def pack(self, weight: Array) -> Array:
        """Returns the weight in this order, flattened to one dimension, followed by SLACK zeros."""
        shape = self.shape(weight.shape)
        weight = lax.pad(weight, np.zeros((), weight.dtype), [(0, full - size, 0) for full, size in zip(shape, weight.shape, strict=True)])
        split: list[int] = []
        positions: dict[int, list[int]] = {}
        for dim, size in enumerate(shape):
            inside = [size_in_block for entry, size_in_block in zip(self.blocked, self.sizes, strict=True) if entry == dim]
            positions[dim] = list(range(len(split), len(split) + 1 + len(inside)))
            split += [size // math.prod(inside), *inside]
        order = [positions[dim].pop(0) for dim in self.dims] + [positions[dim].pop(0) for dim in self.blocked]
        flat = lax.reshape(lax.transpose(lax.reshape(weight, split), order), (weight.size,))
        return lax.pad(flat, np.zeros((), flat.dtype), [(0, SLACK, 0)])


# The number of zeros after a packed weight. If a weight has a single block of outputs or of inputs, the trial cannot determine the size of
# the block: several orders give the same results. A weight in oneDNN's order may be longer than in the order that was found, and oneDNN's
# kernel reads to the end of the longer one. No block has more than _LARGEST_BLOCK inputs or outputs, so the kernel reads at most SLACK
# elements more.
_LARGEST_BLOCK = 128
SLACK = _LARGEST_BLOCK**2

# The number of outputs in a block. If two orders differ only in trailing zeros, the longer order is tried first, as the kernel may read the
# zeros. For half types, _PAIRED inputs are adjacent, which one instruction multiplies.
_WIDTHS = (64, 48, 32, 24, 16, 8)
_PAIRED = 2


def _of_matrices(dtype: DType) -> Iterable[Packing]:
    """Returns the possible orders of weights (in, out)."""
    pair = 1 if dtype == np.float32 else _PAIRED
    for width in _WIDTHS:
        for inputs in (16, 1):
            yield Packing((1, 0), (0, 1, 0), (inputs, width, pair))
    yield Packing((1, 0), (), ())


def _of_kernels(dtype: DType) -> Iterable[Packing]:
    """Returns the possible orders of weights (out, in, *kernel) with two spatial dimensions."""
    pair = 1 if dtype == np.float32 else _PAIRED
    for width in _WIDTHS:
        for inputs in (16, 1):
            yield Packing((0, 2, 3, 1), (1, 0, 1), (inputs, width, pair))
    for width in (16, 8):
        yield Packing((0, 1, 2, 3), (1, 0, 1), (width // pair, width, pair))


def of_linear(rows: int, inputs: int, columns: int, dtype: DType, bias: bool, activation: str, device: jax.Device) -> Packing | None:
    """Returns the order of a weight (in, out) for `onednn.matmul` with `rows` rows; None if none was found."""

    def plain(x: Array, weight: Array, shift: Array) -> Array:
        return onednn.matmul(x, weight, False, False, dtype, shift if bias else None, activation)

    def packed(x: Array, weight: Array, shift: Array) -> Array:
        return onednn.matmul(x, weight, False, False, dtype, shift if bias else None, activation, packed_columns=columns)

    return _find("matmul", (rows, inputs), (inputs, columns), dtype, (bias, activation), device, plain, packed, columns, _of_matrices)


def of_convolution(
    x: tuple[int, ...],
    weight: tuple[int, ...],
    out: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[tuple[int, int], ...],
    dilation: tuple[int, ...],
    dtype: DType,
    bias: bool,
    device: jax.Device,
) -> Packing | None:
    """Returns the order of a weight (out, in, *kernel) for `onednn.convolution`; None if none was found.

    Args:
        x: The shape of the input, as for `onednn.convolution`.
        weight: The shape of the weight before packing.
        out: The shape of the result.
        stride: See `onednn.convolution`.
        padding: See `onednn.convolution`.
        dilation: See `onednn.convolution`.
        dtype: The dtype of the operands and the result.
        bias: True if there is a bias.
        device: The device of the program.
    """
    settings = out, stride, padding, dilation, 1, dtype

    def plain(x: Array, weight: Array, shift: Array) -> Array:
        return onednn.convolution(x, weight, *settings, shift if bias else None)

    def packed(x: Array, flat: Array, shift: Array) -> Array:
        return onednn.convolution(x, flat, *settings, shift if bias else None, packed_shape=weight)

    return _find("convolution", x, weight, dtype, (*settings[:-1], bias), device, plain, packed, weight[0], _of_kernels)


Compute = Callable[[Array, Array, Array], Array]

_packings: dict[object, Packing | None] = {}
_lock = forks.lock()


def _find(
    op: str,
    x_shape: tuple[int, ...],
    shape: tuple[int, ...],
    dtype: DType,
    settings: tuple[object, ...],
    device: jax.Device,
    plain: Compute,
    packed: Compute,
    columns: int,
    candidates: Callable[[DType], Iterable[Packing]],
) -> Packing | None:
    """Returns the order of a weight, from an earlier trial or a new one; None if no order is right, or if threads may use other orders.

    Args:
        op: The name of the op, as part of the key under which the order is remembered.
        x_shape: The shape of the other operand.
        shape: The shape of the weight.
        dtype: The dtype of both operands and the result.
        settings: Further values on which the order may depend.
        device: The device of the program.
        plain: Computes the op from x, the weight and a bias.
        packed: Computes the op from x, the packed weight and a bias.
        columns: The size of the bias.
        candidates: Returns the orders to try, for a dtype.
    """
    if not onednn_support.supports_packed():
        return None
    key = (op, x_shape, shape, np.dtype(dtype).name, settings, device.id, machine.machine_name(device))
    with _lock:
        if not _is_uniform():
            return None
        if key not in _packings:
            _packings[key] = _try(x_shape, shape, dtype, device, plain, packed, columns, list(candidates(dtype)))
        return _packings[key]


# The largest accepted error, relative to the largest result. With a wrong order, errors are about as large as the results.
_TOLERANCE = 0.02


def _try(
    x_shape: tuple[int, ...],
    shape: tuple[int, ...],
    dtype: DType,
    device: jax.Device,
    plain: Compute,
    packed: Compute,
    columns: int,
    candidates: list[Packing],
) -> Packing | None:
    """Returns the first candidate with which `packed` computes the result of `plain`, on random numbers; None if there is none."""
    generator = np.random.default_rng(0)
    x, weight, shift = (generator.standard_normal(size, np.float32).astype(dtype) for size in (x_shape, shape, (columns,)))
    # All candidates are padded to one length. The kernel reads the whole length of the right order, which may exceed that of the tried one.
    length = math.prod(size + _LARGEST_BLOCK for size in shape[:2]) * math.prod(shape[2:]) + SLACK

    def max_error_and_magnitude(x: Array, weight: Array, flat: Array, shift: Array) -> tuple[Array, Array]:
        expected, actual = (call(x, item, shift).astype(np.float32) for call, item in ((plain, weight), (packed, flat)))
        return abs(actual - expected).max(), abs(expected).max()

    with programs.without_outer_frames(), jax.enable_x64(True), jax.default_device(device), jax.ensure_compile_time_eval():
        arrays = [jax.device_put(array, device) for array in (x, weight, np.zeros(length, dtype), shift)]
        avals = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]
        program = programs.compile_lowered(private.lower(jax.jit(max_error_and_magnitude, keep_unused=True).trace(*avals)), device, {})
        for candidate in candidates:
            flat = np.zeros(length, dtype)
            packed_weight = np.asarray(candidate.pack(jax.device_put(weight, device)))
            flat[: packed_weight.size] = packed_weight
            arrays[2] = jax.device_put(flat, device)
            error, largest = (float(np.asarray(item)) for item in program.call(arrays))
            if error <= _TOLERANCE * largest:
                return candidate
    return None


# The number of processors on which the threads could run when the orders were found. All orders were found with the same number.
_processors: int | None = None


def are_orders_valid() -> bool:
    """True if oneDNN uses the orders that were found, in this thread."""
    return affinity.processors() == _processors and not forks.has_lost_xla()


def _is_uniform() -> bool:
    """True if oneDNN uses the same orders in all threads, including XLA's thread pool, as in each earlier trial."""
    global _processors
    if not affinity.all_threads_have(affinity.processors()):
        return False
    if _processors is None:
        _processors = affinity.processors()
    return are_orders_valid()
