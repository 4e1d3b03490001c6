"""Ops that torch's kernels compute faster than XLA:CPU, with the time that each kernel saves.

XLA:CPU is slower for three reasons: some ops call a library function for each element; sorts call a compiled comparator for each
comparison; scans pass over all elements several times.

Savings are in nanoseconds per element of the op's largest tensor, measured for the op alone (`dynaxla bench-cpu ops`, one thread). The call
of a kernel takes about 20 microseconds, and prevents fusion: operands are written to memory, and results are read from memory. A kernel is
used only for a call in which it saves more than `_MIN_SAVED_NANOSECONDS` nanoseconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ...torch_ops import aten
from ..context import Context
from ..implementations import Implementations
from ..metadata import TensorSpec

# The nanoseconds that a kernel call must save.
_MIN_SAVED_NANOSECONDS = 50_000


@dataclass(frozen=True)
class KernelCall:
    """A call of an op, without the values of its tensors.

    Attributes:
        op: The overload.
        dtype, shape: The dtype and shape of the first tensor argument.
        elements: The number of elements of the largest argument or result.
        settings: The names and values of the given arguments that are not tensors.
        platform: JAX's name of the platform.
    """

    op: torch._ops.OpOverload
    dtype: torch.dtype
    shape: tuple[int, ...]
    elements: int
    settings: tuple[tuple[str, Any], ...]
    platform: str

    def __str__(self) -> str:
        return f"{self.op} of {self.elements} elements, {self.dtype}"


# Nanoseconds saved per element, by the dtypes for which torch's kernel is faster.
Saving = Mapping[torch.dtype, float]
_BFLOAT16 = (torch.bfloat16,)
_FLOATS = (torch.float32, torch.float64)
_INTEGERS = (torch.int32, torch.int64)
_BOOLS = (torch.bool,)
_COMPLEX = (torch.complex64, torch.complex128)


def _floats(nanoseconds: float) -> Saving:
    return dict.fromkeys(_FLOATS, nanoseconds)


def _floats_and_integers(nanoseconds: float) -> dict[torch.dtype, float]:
    return dict.fromkeys((*_FLOATS, *_INTEGERS), nanoseconds)


def _bfloat16(nanoseconds: float) -> Saving:
    return dict.fromkeys(_BFLOAT16, nanoseconds)


def _complex(nanoseconds: float) -> Saving:
    return dict.fromkeys(_COMPLEX, nanoseconds)


_SAVINGS: dict[torch._ops.OpOverload, Saving] = {
    # XLA calls a function for each element.
    aten.acos.default: _floats(16),
    aten.asin.default: _floats(11),
    aten.atan.default: _floats(15),
    aten.atan2.default: _floats(19),
    aten.cos.default: _floats(10),
    aten.digamma.default: _floats(5),
    aten.div.Tensor_mode: _floats(35),
    aten.exp2.default: _floats(2),
    aten.floor_divide.default: _floats(35),
    aten.fmod.Scalar: _floats(30),
    aten.fmod.Tensor: _floats(30),
    aten.gcd.default: dict.fromkeys(_INTEGERS, 60),
    aten.lcm.default: dict.fromkeys(_INTEGERS, 60),
    aten.lgamma.default: _floats(4),
    aten.log10.default: _floats(3),
    aten.pow.Scalar: _floats_and_integers(5),
    aten.pow.Tensor_Scalar: _floats(5),
    aten.pow.Tensor_Tensor: _floats(5),
    aten.remainder.Scalar: _floats(30),
    aten.remainder.Tensor: _floats(30),
    aten.rsqrt.default: _floats(2.3),  # no call per element: XLA computes 1 / sqrt(x), which is as slow
    aten.sin.default: _floats(10),
    aten.special_bessel_j0.default: _floats(5),
    aten.special_zeta.default: _floats(100),
    aten.tan.default: _floats(35),
    # Sorting and selection.
    aten.argsort.stable: _floats_and_integers(150),
    aten.kthvalue.default: _floats_and_integers(140),
    aten.median.default: _floats_and_integers(240),
    aten.median.dim: _floats_and_integers(200),
    aten.mode.default: _floats_and_integers(100),
    aten.nanmedian.default: _floats_and_integers(240),
    aten.nanmedian.dim: _floats_and_integers(200),
    aten.sort.default: _floats_and_integers(150),
    aten.sort.stable: _floats_and_integers(150),
    aten.topk.default: _floats_and_integers(150),
    # Scans.
    aten.cummax.default: _floats_and_integers(20),
    aten.cummin.default: _floats_and_integers(20),
    aten.cumprod.default: _floats_and_integers(9),
    aten.cumsum.default: _floats_and_integers(6) | dict.fromkeys(_BOOLS, 6.0),
    aten.logcumsumexp.default: _floats(300),
    # Torch finishes one row while the row is in the processor's cache. XLA reads all rows from memory three times.
    aten._log_softmax.default: _floats(0.6),
    aten._log_softmax_backward_data.default: _floats(0.7),
    # Copies and sums that XLA computes element by element.
    aten._adaptive_avg_pool3d.default: _floats(5),
    aten._adaptive_avg_pool3d_backward.default: _floats(5),
    aten._embedding_bag.default: _floats(0.5),
    aten._embedding_bag_forward_only.default: _floats(0.5),
    aten._pdist_backward.default: _floats(100),
    aten._pdist_forward.default: _floats(100),
    aten.adaptive_max_pool2d.default: _floats(30),
    aten.adaptive_max_pool2d_backward.default: _floats(20),
    aten.adaptive_max_pool3d.default: _floats(5),
    aten.adaptive_max_pool3d_backward.default: _floats(20),
    aten.cat.default: _bfloat16(7),
    aten.dot.default: _floats(0.6),
    aten.embedding_dense_backward.default: _bfloat16(2.5),
    aten.index_select.default: _floats(6),
    aten.native_layer_norm_backward.default: _floats(3),
    aten.scatter.src: _floats(10),
    aten.reflection_pad2d.default: _floats(0.6),
    aten.replication_pad2d.default: _floats(0.6),
    aten.roll.default: _floats(0.7),
    aten.scatter_add.default: _floats(4),
    aten.sum.default: _bfloat16(1),
    aten.sum.dim_IntList: _bfloat16(1),
    aten.trace.default: _floats(0.7),
    aten.vdot.default: _floats(0.6),
    # MKL's transforms and factorizations.
    aten._fft_c2c.default: _complex(0.6),
    aten._fft_c2r.default: _complex(1.2),
    aten._fft_r2c.default: _floats(0.4),
    aten.cholesky_inverse.default: _floats(5),
    aten.linalg_matrix_exp.default: _floats(15),
}


def _is_costly_power(problem: KernelCall) -> bool:
    """False for exponents up to 4 that XLA turns into multiplications (integers) or, except in float64, square roots (half-integers)."""
    exponent = dict(problem.settings).get("exponent")
    if problem.dtype == torch.float64 and isinstance(exponent, (int, float)) and exponent % 1:
        return True
    return not isinstance(exponent, (int, float)) or abs(exponent) > 4 or (2 * exponent) % 1 != 0


def _has_no_fast_topk(problem: KernelCall) -> bool:
    """True unless topk returns the largest floats, for which XLA has a fast implementation."""
    return dict(problem.settings).get("largest") is False or not problem.dtype.is_floating_point


def _is_floor(problem: KernelCall) -> bool:
    return dict(problem.settings).get("rounding_mode") == "floor"


def _selects_within_rows(problem: KernelCall) -> bool:
    """True unless the op selects along the first dimension. XLA copies whole rows as fast as torch."""
    return dict(problem.settings).get("dim") not in (0, None)


def _is_along_rows(problem: KernelCall) -> bool:
    """True if `dim` is the last dimension. For other dimensions, XLA vectorizes over the contiguous inner dimensions."""
    dim = dict(problem.settings).get("dim")
    return dim in (-1, len(problem.shape) - 1)


def _is_of_large_matrices(problem: KernelCall) -> bool:
    """True for matrices of 128 columns or more. For smaller ones, XLA evaluates the full Taylor polynomial in less
    time than torch needs to choose a degree."""
    return problem.shape[-1] >= 128


def _has_many_smooth_rows(problem: KernelCall) -> bool:
    """True for 16 or more transforms whose lengths have no prime factor above 7. MKL is slow for large prime factors, and no faster than
    XLA for one transform."""
    settings, elements = dict(problem.settings), math.prod(problem.shape)
    lengths = [problem.shape[dim] for dim in settings["dim"]]
    if "last_dim_size" in settings:
        lengths[-1:] = [settings["last_dim_size"]]
    return all(elements >= 16 * length and _is_smooth(length) for length in lengths)


def _is_smooth(length: int) -> bool:
    """True if `length` has no other prime factors than 2, 3, 5 and 7, so that it divides a power of 210."""
    return length > 0 and pow(210, length.bit_length(), length) == 0


# Ops whose lowerings write whole slices if the index is expanded (stride 0). Such calls are left to XLA.
_SCATTERS = (aten.scatter.src, aten.scatter_add.default)

# By op: a predicate for the calls to which the saving applies. Without an entry, the saving applies to all calls.
_CONDITIONS: dict[torch._ops.OpOverload, Callable[[KernelCall], bool]] = {
    aten._fft_c2c.default: _has_many_smooth_rows,
    aten._fft_c2r.default: _has_many_smooth_rows,
    aten._fft_r2c.default: _has_many_smooth_rows,
    aten._log_softmax.default: _is_along_rows,
    aten._log_softmax_backward_data.default: _is_along_rows,
    aten.div.Tensor_mode: _is_floor,
    aten.index_select.default: _selects_within_rows,
    aten.linalg_matrix_exp.default: _is_of_large_matrices,
    aten.pow.Tensor_Scalar: _is_costly_power,
    aten.topk.default: _has_no_fast_topk,
}


def _supports_torch(problem: KernelCall) -> bool:
    return problem.op in _SAVINGS


def _prefers_torch(problem: KernelCall) -> bool:
    saving = _SAVINGS[problem.op].get(problem.dtype, 0.0) * problem.elements
    return saving > _MIN_SAVED_NANOSECONDS and _CONDITIONS.get(problem.op, lambda _: True)(problem)


KERNEL: Implementations[KernelCall] = Implementations("kernel")
Compute = Callable[[], Any]


@KERNEL.implementation("torch", platforms=["cpu"], supports=_supports_torch, preferred=_prefers_torch)
def _by_torch(problem: KernelCall, kernel: Compute, lowering: Compute) -> Any:
    return kernel()


@KERNEL.implementation("xla")
def _by_xla(problem: KernelCall, kernel: Compute, lowering: Compute) -> Any:
    return lowering()


def problem_of(node: Node, ctx: Context) -> KernelCall | None:
    """Returns the current node as a `KernelCall`; None for an op without a faster kernel."""
    if node.target not in _SAVINGS or ctx.platform != "cpu":
        return None
    op: Any = node.target
    given = {argument.name: value for argument, value in zip(op._schema.arguments, node.args, strict=False)} | dict(node.kwargs)
    specs = {name: _tensors(value, ctx) for name, value in given.items()}
    tensors = [spec for found in specs.values() for spec in found]
    results = [spec for spec in (ctx.output if isinstance(ctx.output, tuple) else (ctx.output,)) if isinstance(spec, TensorSpec)]
    if not tensors or (op in _SCATTERS and 0 in specs["index"][0].stride):
        return None
    settings = tuple((name, ctx.spec_of(value)) for name, value in given.items() if not specs[name])
    elements = max(math.prod(spec.shape) for spec in (*tensors, *results))
    return KernelCall(op, tensors[0].dtype, tensors[0].shape, elements, settings, ctx.platform)


def _tensors(value: Any, ctx: Context) -> list[TensorSpec]:
    found = [ctx.spec_of(item) for item in (value if isinstance(value, (tuple, list)) else (value,))]
    return [item for item in found if isinstance(item, TensorSpec)]
