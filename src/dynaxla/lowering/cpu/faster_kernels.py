"""Ops that torch's kernels compute faster than XLA:CPU, with the time that each kernel saves.

XLA:CPU is slower for three reasons: some ops call a library function for each element; sorts call a compiled comparator for each
comparison; scans pass over all elements several times.

The savings (`measurements.py`) are in nanoseconds per element of the op's largest tensor, measured for the op alone. The call of a kernel
takes about 20 microseconds, and prevents fusion: operands are written to memory, and results are read from memory. A kernel is used only
for a call in which it saves more than `MIN_SAVED_NANOSECONDS` nanoseconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ...torch_ops import aten, passed_arguments
from ..context import Context
from ..implementations import Implementations
from ..metadata import TensorSpec
from .measurements import MIN_SAVED_NANOSECONDS, SAVINGS


@dataclass(frozen=True)
class KernelCall:
    """A call of an op, without the values of its tensors.

    Attributes:
        op: The overload.
        dtype: The dtype of the first tensor argument.
        shape: The shape of the first tensor argument.
        elements: The number of elements of the largest argument or result.
        settings: The name and value of each argument in the call that is not a tensor.
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
    """True unless the op selects along the first dimension, where XLA copies whole rows as fast as torch."""
    return dict(problem.settings).get("dim") not in (0, None)


def _is_along_rows(problem: KernelCall) -> bool:
    """True if `dim` is the last dimension. For other dimensions, XLA vectorizes over the contiguous inner dimensions."""
    dim = dict(problem.settings).get("dim")
    return dim in (-1, len(problem.shape) - 1)


def _is_of_large_matrices(problem: KernelCall) -> bool:
    """True for matrices of 128 columns or more.

    For smaller matrices, XLA evaluates the full Taylor polynomial in less time than torch needs to choose a degree.
    """
    return problem.shape[-1] >= 128


def _has_many_smooth_rows(problem: KernelCall) -> bool:
    """True for 16 or more transforms whose lengths have no prime factor above 7.

    MKL is slow for large prime factors, and no faster than XLA for one transform.
    """
    settings, elements = dict(problem.settings), math.prod(problem.shape)
    lengths = [problem.shape[dim] for dim in settings["dim"]]
    if "last_dim_size" in settings:
        lengths[-1:] = [settings["last_dim_size"]]
    return all(elements >= 16 * length and _is_smooth(length) for length in lengths)


def _is_smooth(length: int) -> bool:
    """True if `length` has no other prime factors than 2, 3, 5 and 7: then it divides a power of 210, their product."""
    return length > 0 and pow(210, length.bit_length(), length) == 0


# Ops whose lowerings write whole slices if the index is expanded (stride 0). Such calls are left to XLA.
_SCATTERS = (aten.scatter.src, aten.scatter_add.default)

# By op: True for a call to which the op's saving applies. Without an entry, the saving applies to all calls.
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
    return problem.op in SAVINGS


def _prefers_torch(problem: KernelCall) -> bool:
    saving = SAVINGS[problem.op].get(problem.dtype, 0.0) * problem.elements
    return saving > MIN_SAVED_NANOSECONDS and _CONDITIONS.get(problem.op, lambda _: True)(problem)


KERNEL: Implementations[KernelCall] = Implementations("kernel")
Compute = Callable[[], Any]


@KERNEL.implementation("torch", platforms=["cpu"], supports=_supports_torch, preferred=_prefers_torch)
def _by_torch(problem: KernelCall, kernel: Compute, lowering: Compute) -> Any:
    return kernel()


@KERNEL.implementation("xla")
def _by_xla(problem: KernelCall, kernel: Compute, lowering: Compute) -> Any:
    return lowering()


def kernel_call(node: Node, ctx: Context) -> KernelCall | None:
    """Returns the current node as a `KernelCall`; None for an op without a faster kernel."""
    if node.target not in SAVINGS or ctx.platform != "cpu":
        return None
    op: Any = node.target
    arguments = passed_arguments(op, node.args, node.kwargs)
    specs = {name: _tensors(value, ctx) for name, value in arguments.items()}
    tensors = [spec for argument_specs in specs.values() for spec in argument_specs]
    results = [spec for spec in (ctx.output if isinstance(ctx.output, tuple) else (ctx.output,)) if isinstance(spec, TensorSpec)]
    if not tensors or (op in _SCATTERS and 0 in specs["index"][0].stride):
        return None
    settings = tuple((name, ctx.spec_of(value)) for name, value in arguments.items() if not specs[name])
    elements = max(math.prod(spec.shape) for spec in (*tensors, *results))
    return KernelCall(op, tensors[0].dtype, tensors[0].shape, elements, settings, ctx.platform)


def _tensors(value: Any, ctx: Context) -> list[TensorSpec]:
    """Returns the metadata of the tensors in an argument, which may be a list."""
    specs = [ctx.spec_of(item) for item in (value if isinstance(value, (tuple, list)) else (value,))]
    return [item for item in specs if isinstance(item, TensorSpec)]
