"""Factory functions (constants, ranges, windows), casts, and complex numbers and their parts."""

import torch
from torch.utils import _pytree as pytree

from lowering.table.rows import EVERY, FEW, PAIR, PRIM, PRIM_VIEW, REAL, Keywords, Make, Op, Samples, aten, of, prims

COMPLEX = (torch.complex64, torch.complex128)

# The arguments contain no tensor.
NO_OPERANDS = ("transposed", "with gaps", "rank 0")


def factory(*arguments: object) -> Samples:
    """Samples: the arguments, with the changing size in place of "n", for the tested dtype and for the default dtype."""

    def samples(make: Make, n: int) -> list[tuple[object, ...]]:
        args = pytree.tree_map(lambda argument: n if argument == "n" else argument, arguments)
        return [(*args, Keywords(dtype=make().dtype)), args]

    return samples


def factory_prim(*arguments: object, **keywords: object) -> Samples:
    """Samples for prims that make tensors: their arguments have no defaults."""

    def samples(make: Make, n: int) -> list[tuple[object, ...]]:
        options = Keywords(dtype=make().dtype, device=torch.device("cpu"), requires_grad=False, **keywords)
        return [(*args, options) for *args, _ in factory(*arguments)(make, n)[:1]]

    return samples


ROWS: list[Op] = [
    # Constants
    *(Op(op, factory([2, "n"], *rest), EVERY, gradient=False, without=NO_OPERANDS) for op, rest in (
        (aten.full.default, (1,)), (aten.zeros.default, ()), (aten.ones.default, ()), (aten._efficientzerotensor.default, ()),
    )),
    *(Op(op, of(*rest), EVERY, gradient=False) for op, rest in (
        (aten.full_like.default, (1,)), (aten.zeros_like.default, ()), (aten.ones_like.default, ()), (aten.zero.default, ()),
        (aten.fill.Scalar, (2,)), (aten.fill.Tensor, (torch.tensor(2.5),)),
        (aten.new_full.default, ([2, 3], 1)), (aten.new_zeros.default, ([2, 3],)), (aten.new_ones.default, ([2, 3],)),
    )),
    Op(aten.scalar_tensor.default, factory(2), EVERY, gradient=False, without=NO_OPERANDS),
    Op(aten.eye.default, factory("n"), EVERY, gradient=False, without=NO_OPERANDS),
    Op(aten.eye.m, factory(3, "n"), EVERY, gradient=False, without=NO_OPERANDS),
    Op(aten.tril_indices.default, lambda make, n: [(n, 3), (3, n, 1)], (torch.int64,), gradient=False, without=NO_OPERANDS),
    Op(aten.triu_indices.default, lambda make, n: [(n, 3), (3, n, 1)], (torch.int64,), gradient=False, without=NO_OPERANDS),
    # Ranges, windows and frequencies
    *(Op(op, factory(*args), REAL, gradient=False, without=NO_OPERANDS) for op, args in (
        (aten.arange.default, ("n",)), (aten.arange.start, (-2, "n")), (aten.arange.start_step, ("n", -3, -2)),
        (aten.range.default, (-2, "n")), (aten.range.step, ("n", -3, -2)), (aten.linspace.default, (1, 7, "n")),
    )),
    # Ends that are tensors
    Op(aten.linspace.Tensor_Tensor, lambda make, n: [(make(), make(), 5)], (torch.float32,), gradient=False),
    Op(aten.linspace.Tensor_Scalar, lambda make, n: [(make(), 2, 5)], (torch.float32,), gradient=False),
    Op(aten.linspace.Scalar_Tensor, lambda make, n: [(2, make(), 5)], (torch.float32,), gradient=False),
    # Eager mode computes windows of half types in the half type, which is too inexact for a comparison.
    *(Op(op, factory("n", *rest), PAIR, gradient=False, without=NO_OPERANDS) for op, rest in (
        (aten.bartlett_window.default, ()), (aten.bartlett_window.periodic, (False,)),
        (aten.blackman_window.default, ()), (aten.blackman_window.periodic, (False,)),
        (aten.hamming_window.default, ()), (aten.hamming_window.periodic, (False,)),
        (aten.hamming_window.periodic_alpha, (False, 0.4)), (aten.hamming_window.periodic_alpha_beta, (True, 0.4, 0.7)),
        (aten.kaiser_window.default, ()), (aten.kaiser_window.periodic, (False,)), (aten.kaiser_window.beta, (True, 5.0)),
        (aten.fft_fftfreq.default, (0.5,)), (aten.fft_rfftfreq.default, (0.5,)),
    )),
    # Casts
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
    # The real and imaginary part have to be adjacent in memory.
    Op(aten.view_as_complex.default, lambda make, n: [(make(n, 3, 2),)], PAIR, without=("transposed", "with gaps")),
    Op(aten.view_as_complex_copy.default, lambda make, n: [(make(n, 3, 2),)], PAIR, gradient=False, without=("transposed", "with gaps")),
    Op(prims.conj.default, of(), COMPLEX, **PRIM_VIEW),
    Op(prims.conj_physical.default, of(), COMPLEX, **PRIM),
    # Prims
    Op(prims.fill.default, of(2), FEW, **PRIM),
    Op(prims.full.default, factory_prim([2, "n"], 1), FEW, gradient=False, without=NO_OPERANDS),
    Op(prims.full_like.default, lambda make, n: [(x := make(n, 3), 1, Keywords(dtype=x.dtype, device=x.device, requires_grad=False))], FEW,
       **PRIM),
    Op(prims.iota.default, factory_prim("n", start=1, step=2), (torch.int64, torch.int32), gradient=False, without=NO_OPERANDS),
    Op(prims.scalar_tensor.default, lambda make, n: [(2, Keywords(dtype=make().dtype, device=torch.device("cpu")))], FEW, gradient=False,
       without=NO_OPERANDS),
]  # fmt: skip

# The ops without a row, by the file that tests them.
ELSEWHERE: dict[str, str] = {
    # The results are undefined.
    "lowering/ops/test_creation.py": """
        aten.empty.memory_format aten.empty_like.default aten.empty_permuted.default aten.empty_strided.default aten.new_empty.default
        aten.new_empty_strided.default""",
    # The fake results have other strides than the kernels'.
    "lowering/ops/test_prims.py": """prims.real.default prims.imag.default
        prims.empty.default prims.empty_permuted.default prims.empty_strided.default""",
}
