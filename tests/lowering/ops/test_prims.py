"""PyTorch's prims, as its reference implementations use them."""

from __future__ import annotations

import pytest
import torch

from support.comparisons.compare import assert_equal, check
from support.comparisons.gradients import check_gradients
from support.comparisons.single_op import check_op, run_op
from support.releases import fails_in_oldest

prims = torch.ops.prims


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.bool, torch.complex64], ids=str)
def test_references_leave_prims_in_graphs(dtype: torch.dtype) -> None:
    x = torch.randn(3, 4, 2, dtype=dtype) if dtype.is_complex else torch.randn(3, 4, 2).mul(3).to(dtype)
    x = x.transpose(0, 1)
    refs = torch._refs

    def function(x):
        return [
            refs.sum(x, (0, -1)),
            refs.sum(x[0, 0, 0]),
            refs.prod(x, 1),
            refs.prod(x),
            refs.flip(x, (0, 2)),
        ]

    check(function, x)


@pytest.mark.optimized
def test_extrema_with_nan() -> None:
    x = torch.randn(3, 4)
    x[0, 0] = float("nan")
    for dims in ([0, 1], [1]):
        check_op(prims.amax.default, x, dims)
        check_op(prims.amin.default, x, dims)
        check_op(prims.amax.default, x > 0, dims)


@pytest.mark.optimized
def test_cbrt_and_signbit() -> None:
    x = torch.randn(3, 4)
    check_op(prims.cbrt.default, torch.tensor([-8.0, 0.0, -0.0, 27.0, float("inf"), float("nan")]))
    assert_equal(run_op(prims.signbit.default, x), torch.signbit(x).to(x.dtype))


def test_singular_values() -> None:
    x = torch.randn(3, 4)
    u, s, v = run_op(prims.svd.default, x, full_matrices=False)
    torch.testing.assert_close(u @ s.diag() @ v, x)
    torch.testing.assert_close(s, torch.linalg.svdvals(x))


def test_sum_of_bits() -> None:
    """torch has no kernel for xor_sum."""
    x = torch.tensor([[1, 2, 12], [3, 3, 10]])
    assert run_op(prims.xor_sum.default, x, [0], expected=x[0].clone()).tolist() == [2, 1, 6]
    assert run_op(prims.xor_sum.default, x, [0, 1], expected=x[0, 0].clone()) == 5


def test_real_parts() -> None:
    z = torch.randn(3, 4, dtype=torch.complex64)
    torch.testing.assert_close(run_op(prims.real.default, z), z.real)
    torch.testing.assert_close(run_op(prims.imag.default, z), z.imag)


def test_metadata_of_empty_tensors() -> None:
    """Values that eager mode leaves undefined are zero, so that every call of a program returns the same."""
    kind = {"dtype": torch.int32, "device": torch.device("cpu"), "requires_grad": False}
    for prim, args in (
        (prims.empty, ([2, 3],)),
        (prims.empty_strided, ([2, 3], [1, 2])),
        (prims.empty_permuted, ([2, 3, 4], [0, 2, 1])),
    ):
        result = run_op(prim.default, *args, **kind)
        assert_equal(result, prim.default(*args, **kind), values=False)
        assert (result == 0).all()


@fails_in_oldest("its shape functions of transforms have other strides than its kernels")
def test_strides_of_transforms() -> None:
    """The results have the strides of torch's kernels, which differ from those of the prims' fake implementations."""
    x, z = torch.randn(3, 5, 4), torch.randn(3, 5, 4, dtype=torch.complex64)
    for dims in ([1], [0, 2]):
        check(lambda x, dims=dims: prims.fft_r2c(x, dim=dims, onesided=True), x)
        check(lambda x, dims=dims: prims.fft_c2c(x, dim=dims, forward=False), z)
        check(lambda x, dims=dims: prims.fft_c2r(x, dim=dims, last_dim_size=2 * z.shape[dims[-1]] - 2), z)
        check(lambda x, dims=dims: torch._refs.fft.hfftn(x, dim=dims), x)


@fails_in_oldest("prims.fma has no gradient, which nothing in it makes a graph of")
def test_gradients_of_fused_multiply_add() -> None:
    check_gradients(prims.fma.default, torch.randn(3, 4), torch.randn(3, 4), torch.randn(3, 4))
    check(lambda x: x.addcmul_(x, x, value=0.3), torch.randn(3, dtype=torch.float16))
