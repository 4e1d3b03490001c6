"""Measured times of single ops on CPUs, by which torch's kernels or XLA's loops are chosen.

Measured with `python -m benchmarks cpu ops`: ops of PyTorch's database at common sizes, one thread, torch 2.13, jaxlib 0.10.2, on an AMD
EPYC with AVX2; last on 2026-11-26 (docs/benchmarks/ops.md has the times). A change here needs a new measurement.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...torch_ops import aten

# The nanoseconds that a kernel call must save.
MIN_SAVED_NANOSECONDS = 50_000

# The number of elements of an op's largest tensor from which on the op counts as large. The time of a smaller op is mostly the cost of the
# call, which is about the same for torch and XLA.
LARGE = 1 << 16

# For a tensor of contiguous runs with gaps between them: the number of elements of a run from which on torch's elementwise loops and sums
# are as fast as for dense tensors. XLA's loops take up to twice the time. Other torch kernels copy such a tensor first, or read it element
# by element.
MIN_RUN_ELEMENTS = 64

# The nanoseconds that torch's kernel saves per element, by dtype. For other dtypes torch's kernel is not faster.
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


SAVINGS: dict[torch._ops.OpOverload, Saving] = {
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

# Resampling. The source indices are constants of XLA's program, in which gradients take half of torch's time.
_RESAMPLING = (
    *(f"{exact}{count}d" for exact in ("upsample_nearest", "_upsample_nearest_exact") for count in (1, 2, 3)),
    *("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d"),
)

# Ops for which XLA's loops take at most nine tenths of the time of torch's kernels. The benchmark does not contain the combinations of
# several ops (attention, encoder layers).
FASTER_BY_XLA = frozenset(
    {
        # Torch calls a function for each element, or reads and writes more memory than XLA.
        aten.acosh.default,
        aten.asinh.default,
        aten.binary_cross_entropy.default,
        aten.cosh.default,
        aten.elu.default,
        aten.elu_backward.default,
        aten.eq.Tensor,
        aten.erf.default,
        aten.erfc.default,
        aten.exp.default,
        aten.fmax.default,
        aten.fmin.default,
        aten.frexp.Tensor,
        aten.ge.Tensor,
        aten.gelu.default,
        aten.gelu_backward.default,
        aten.gt.Tensor,
        aten.heaviside.default,
        aten.hypot.default,
        aten.i0.default,
        aten.igamma.default,
        aten.isinf.default,
        aten.isnan.default,
        aten.isneginf.default,
        aten.isposinf.default,
        aten.ldexp.Tensor,
        aten.le.Tensor,
        aten.log.default,
        aten.logical_and.default,
        aten.logical_not.default,
        aten.logical_or.default,
        aten.logical_xor.default,
        aten.lt.Tensor,
        aten.masked_fill.Scalar,
        aten.masked_fill.Tensor,
        aten.mish.default,
        aten.mish_backward.default,
        aten.ne.Tensor,
        aten.nextafter.default,
        aten.polygamma.default,
        aten.sigmoid.default,
        aten.signbit.default,
        aten.special_erfcx.default,
        aten.special_i0e.default,
        aten.special_i1.default,
        aten.special_i1e.default,
        aten.special_log_ndtr.default,
        aten.special_ndtri.default,
        aten.sqrt.default,
        aten.tanh.default,
        aten.tanh_backward.default,
        aten.trunc.default,
        aten.where.self,
        aten.xlogy.Tensor,
        # Reductions that torch does element by element, or in several passes.
        aten.all.default,
        aten.all.dim,
        aten.any.default,
        aten.any.dim,
        aten.argmax.default,
        aten.argmin.default,
        aten.histc.default,
        aten.logsumexp.default,
        aten.max.dim,
        aten.min.dim,
        aten.std.correction,
        aten.std_mean.correction,
        aten.var.correction,
        aten.var_mean.correction,
        # Copies and windows.
        aten.avg_pool2d.default,
        aten.avg_pool2d_backward.default,
        aten.avg_pool3d.default,
        aten.avg_pool3d_backward.default,
        aten.index.Tensor,
        aten.index_copy.default,
        aten.index_fill.int_Scalar,
        aten.index_put.default,
        aten.max_pool2d_with_indices.default,
        aten.max_pool3d_with_indices.default,
        aten.pixel_shuffle.default,
        aten.pixel_unshuffle.default,
        aten.put.default,
        aten.scatter_reduce.two,
        aten.searchsorted.Tensor,
        aten.take.default,
        aten.tril.default,
        aten.triu.default,
        aten.unfold_backward.default,
        *(getattr(aten, name).default for name in _RESAMPLING),
        *(getattr(aten, f"{name}_backward").default for name in _RESAMPLING),
        # Combinations of several ops, which XLA fuses.
        aten._native_multi_head_attention.default,
        aten._transformer_encoder_layer_fwd.default,
        # Transforms of few rows, or of lengths with large prime factors. For other transforms, faster_kernels.py chooses torch's kernel.
        aten._fft_c2c.default,
        aten._fft_c2r.default,
        aten._fft_r2c.default,
        # Factorizations of matrices that are not small, and singular values if the graph does not use the singular vectors.
        aten._linalg_det.default,
        aten._linalg_slogdet.default,
        aten._linalg_solve_ex.default,
        aten.linalg_cholesky_ex.default,
        aten.linalg_inv_ex.default,
        aten.linalg_solve_triangular.default,
        aten._linalg_svd.default,
        # Products.
        aten._trilinear.default,
        aten.baddbmm.default,
        aten.bmm.default,
    }
)


# Ops for which torch is at least as fast as XLA in half types, and twice as fast on processors without 512-bit vectors.
FASTER_BY_TORCH_IN_HALVES = frozenset(
    {aten.exp.default, aten.gelu.default, aten.gelu_backward.default, aten.sigmoid.default, aten.sqrt.default}
)
