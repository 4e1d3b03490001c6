"""Tensors from nothing, and as another dtype: filled, ranges, windows; casts, complex numbers and their parts."""

import torch
from torch.utils import _pytree as pytree

from lowering.table.rows import EVERY, FEW, PAIR, PRIM, PRIM_VIEW, REAL, Keywords, Make, Op, Samples, aten, of, prims

COMPLEX = (torch.complex64, torch.complex128)

# Nothing that could lie otherwise, or be of rank 0, is among the arguments.
NO_OPERANDS = ("transposed", "with gaps", "rank 0")


def made(*arguments: object) -> Samples:
    """Arguments of which "n" is the changing size; in the tested dtype, and in the one that they lead to."""

    def samples(make: Make, n: int) -> list[tuple[object, ...]]:
        args = pytree.tree_map(lambda argument: n if argument == "n" else argument, arguments)
        return [(*args, Keywords(dtype=make().dtype)), args]

    return samples


def prim(*arguments: object, **keywords: object) -> Samples:
    """For prims that make tensors: no argument of theirs has a default."""

    def samples(make: Make, n: int) -> list[tuple[object, ...]]:
        where = Keywords(dtype=make().dtype, device=torch.device("cpu"), requires_grad=False, **keywords)
        return [(*args, where) for *args, _ in made(*arguments)(make, n)[:1]]

    return samples


ROWS: list[Op] = [
    # Filled
    *(Op(op, made([2, "n"], *rest), EVERY, gradient=False, without=NO_OPERANDS) for op, rest in (
        (aten.full.default, (1,)), (aten.zeros.default, ()), (aten.ones.default, ()), (aten._efficientzerotensor.default, ()),
    )),
    *(Op(op, of(*rest), EVERY, gradient=False) for op, rest in (
        (aten.full_like.default, (1,)), (aten.zeros_like.default, ()), (aten.ones_like.default, ()), (aten.zero.default, ()),
        (aten.fill.Scalar, (2,)), (aten.fill.Tensor, (torch.tensor(2.5),)),
        (aten.new_full.default, ([2, 3], 1)), (aten.new_zeros.default, ([2, 3],)), (aten.new_ones.default, ([2, 3],)),
    )),
    Op(aten.scalar_tensor.default, made(2), EVERY, gradient=False, without=NO_OPERANDS),
    Op(aten.eye.default, made("n"), EVERY, gradient=False, without=NO_OPERANDS),
    Op(aten.eye.m, made(3, "n"), EVERY, gradient=False, without=NO_OPERANDS),
    Op(aten.tril_indices.default, lambda make, n: [(n, 3), (3, n, 1)], (torch.int64,), gradient=False, without=NO_OPERANDS),
    Op(aten.triu_indices.default, lambda make, n: [(n, 3), (3, n, 1)], (torch.int64,), gradient=False, without=NO_OPERANDS),
    # Ranges, windows and frequencies
    *(Op(op, made(*args), REAL, gradient=False, without=NO_OPERANDS) for op, args in (
        (aten.arange.default, ("n",)), (aten.arange.start, (-2, "n")), (aten.arange.start_step, ("n", -3, -2)),
        (aten.range.default, (-2, "n")), (aten.range.step, ("n", -3, -2)), (aten.linspace.default, (1, 7, "n")),
    )),
    # An end that is a tensor
    Op(aten.linspace.Tensor_Tensor, lambda make, n: [(make(), make(), 5)], (torch.float32,), gradient=False),
    Op(aten.linspace.Tensor_Scalar, lambda make, n: [(make(), 2, 5)], (torch.float32,), gradient=False),
    Op(aten.linspace.Scalar_Tensor, lambda make, n: [(2, make(), 5)], (torch.float32,), gradient=False),
    # Eager computes windows of half types in them, too inexactly to compare.
    *(Op(op, made("n", *rest), PAIR, gradient=False, without=NO_OPERANDS) for op, rest in (
        (aten.bartlett_window.default, ()), (aten.bartlett_window.periodic, (False,)),
        (aten.blackman_window.default, ()), (aten.blackman_window.periodic, (False,)),
        (aten.hamming_window.default, ()), (aten.hamming_window.periodic, (False,)),
        (aten.hamming_window.periodic_alpha, (False, 0.4)), (aten.hamming_window.periodic_alpha_beta, (True, 0.4, 0.7)),
        (aten.kaiser_window.default, ()), (aten.kaiser_window.periodic, (False,)), (aten.kaiser_window.beta, (True, 5.0)),
        (aten.fft_fftfreq.default, (0.5,)), (aten.fft_rfftfreq.default, (0.5,)),
    )),
    # As another dtype
    Op(aten.copy.default, lambda make, n: [(make(n, 3), make(3)), (torch.zeros(n, 3), make(n, 3))], (*REAL, torch.bool), gradient=False),
    Op(prims.convert_element_type.default, of(torch.float16), (*REAL, torch.bool), **PRIM),
    Op(aten.view.dtype, of(torch.int32), (torch.float32, torch.int32), gradient=False),
    Op(aten.view_copy.dtype, of(torch.int32), (torch.float32, torch.int32), gradient=False),
    Op(prims.view_of_dtype.default, of(torch.int32), (torch.float32,), **PRIM_VIEW),
    *(Op(op, of(), FEW, gradient=False) for op in (aten._neg_view.default, aten._neg_view_copy.default)),
    # Complex numbers
    Op(aten.complex.default, lambda make, n: [(make(n, 3), make(3))], PAIR),
    Op(aten.polar.default, lambda make, n: [(make(n, 3), make(3))], PAIR),
    *(Op(op, of(), COMPLEX) for op in (aten._conj.default, aten._conj_physical.default)),
    Op(aten.imag.default, of(), COMPLEX),
    Op(aten._conj_copy.default, of(), COMPLEX, gradient=False),
    *(Op(op, of(), (*COMPLEX, *FEW)) for op in (
        aten.conj_physical.default, aten.real.default, aten.resolve_conj.default, aten.resolve_neg.default,
    )),
    Op(aten.view_as_real.default, of(), COMPLEX),
    Op(aten.view_as_real_copy.default, of(), COMPLEX),
    # Both parts lie side by side.
    Op(aten.view_as_complex.default, lambda make, n: [(make(n, 3, 2),)], PAIR, without=("transposed", "with gaps")),
    Op(aten.view_as_complex_copy.default, lambda make, n: [(make(n, 3, 2),)], PAIR, gradient=False, without=("transposed", "with gaps")),
    Op(prims.conj.default, of(), COMPLEX, **PRIM_VIEW),
    Op(prims.conj_physical.default, of(), COMPLEX, **PRIM),
    # Prims
    Op(prims.fill.default, of(2), FEW, **PRIM),
    Op(prims.full.default, prim([2, "n"], 1), FEW, gradient=False, without=NO_OPERANDS),
    Op(prims.full_like.default, lambda make, n: [(x := make(n, 3), 1, Keywords(dtype=x.dtype, device=x.device, requires_grad=False))], FEW,
       **PRIM),
    Op(prims.iota.default, prim("n", start=1, step=2), (torch.int64, torch.int32), gradient=False, without=NO_OPERANDS),
    Op(prims.scalar_tensor.default, lambda make, n: [(2, Keywords(dtype=make().dtype, device=torch.device("cpu")))], FEW, gradient=False,
       without=NO_OPERANDS),
]  # fmt: skip

# By test file: the ops without a row, and why.
ELSEWHERE: dict[str, str] = {
    # Their memory is undefined.
    "lowering/ops/test_creation.py": """
        aten.empty.memory_format aten.empty_like.default aten.empty_permuted.default aten.empty_strided.default aten.new_empty.default
        aten.new_empty_strided.default""",
    # Its fake results have other strides than its own.
    "lowering/ops/test_prims.py": """prims.real.default prims.imag.default
        prims.empty.default prims.empty_permuted.default prims.empty_strided.default""",
}
