"""Ops that XLA cannot compile for TPUs."""

from __future__ import annotations

import pytest
import torch

from dynaxla.errors import UnsupportedOp
from dynaxla.lowering import Interpreter
from dynaxla.lowering.interpreter import needs_kernel
from support.comparisons.single_op import Call, graph_of

aten = torch.ops.aten

UNCOMPILABLE = {
    "complex128": Call(aten.mul.Tensor, (torch.ones(2, dtype=torch.complex128), torch.ones(2))),
    "to complex128": Call(aten.complex.default, (torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64))),
    "matrix_exp": Call(aten.linalg_matrix_exp.default, (torch.eye(3, dtype=torch.complex64),)),
    "svd": Call(aten._linalg_svd.default, (torch.eye(3),)),
    "pinv": Call(aten.linalg_pinv.atol_rtol_tensor, (torch.eye(3),)),
    "det": Call(aten._linalg_det.default, (torch.eye(3, dtype=torch.float64),)),
}
COMPILABLE = {
    "float64": Call(aten.mul.Tensor, (torch.ones(2, dtype=torch.float64), torch.ones(2))),
    "complex64": Call(aten.mul.Tensor, (torch.ones(2, dtype=torch.complex64), torch.ones(2))),
    "hermitian pinv": Call(aten.linalg_pinv.atol_rtol_tensor, (torch.eye(3),), {"hermitian": True}),
    "det": Call(aten._linalg_det.default, (torch.eye(3),)),
    "matrix_exp": Call(aten.linalg_matrix_exp.default, (torch.eye(3),)),
}


@pytest.mark.parametrize("name", UNCOMPILABLE)
def test_uncompilable_op_raises(name: str) -> None:
    call = UNCOMPILABLE[name]
    module, _, _ = graph_of([call])
    (node,) = module.graph.find_nodes(op="call_function", target=call.op)
    assert needs_kernel(node, "tpu")
    with pytest.raises(UnsupportedOp, match=f"no lowering for {call.op}"):
        Interpreter(module, "tpu")
    Interpreter(module, "cpu")


@pytest.mark.parametrize("name", COMPILABLE)
def test_compilable_op_is_lowered(name: str) -> None:
    module, _, _ = graph_of([COMPILABLE[name]])
    Interpreter(module, "tpu")
