"""Ops that XLA's compiler for TPUs does not compile."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import torch

import dynaxla
from dynaxla.errors import UnsupportedOp
from dynaxla.lowering import Interpreter
from dynaxla.lowering.interpreter import needs_kernel
from dynaxla.lowering.tpu.refusals import marked
from support.comparisons.single_op import Call, graph_of

aten = torch.ops.aten

UNCOMPILABLE = {
    "complex128": Call(aten.mul.Tensor, (torch.ones(2, dtype=torch.complex128), torch.ones(2))),
    "to complex128": Call(aten.complex.default, (torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64))),
    "svd": Call(aten._linalg_svd.default, (torch.eye(3),)),
    "pinv": Call(aten.linalg_pinv.atol_rtol_tensor, (torch.eye(3),)),
    "det": Call(aten._linalg_det.default, (torch.eye(3, dtype=torch.float64),)),
}
COMPILABLE = {
    "float64": Call(aten.mul.Tensor, (torch.ones(2, dtype=torch.float64), torch.ones(2))),
    "complex64": Call(aten.mul.Tensor, (torch.ones(2, dtype=torch.complex64), torch.ones(2))),
    "hermitian pinv": Call(aten.linalg_pinv.atol_rtol_tensor, (torch.eye(3),), {"hermitian": True}),
    "det": Call(aten._linalg_det.default, (torch.eye(3),)),
}


@pytest.mark.parametrize("name", UNCOMPILABLE)
def test_refused_by_name(name: str) -> None:
    call = UNCOMPILABLE[name]
    module, _, _ = graph_of([call])
    (node,) = module.graph.find_nodes(op="call_function", target=call.op)
    assert needs_kernel(node, "tpu")
    with pytest.raises(UnsupportedOp, match=f"no lowering for {call.op}"):
        Interpreter(module, "tpu")
    Interpreter(module, "cpu")


@pytest.mark.parametrize("name", COMPILABLE)
def test_left_to_xla(name: str) -> None:
    module, _, _ = graph_of([COMPILABLE[name]])
    Interpreter(module, "tpu")


@pytest.mark.parametrize("is_64_bit", [False, True])
def test_a_function_for_all_platforms_is_refused_on_tpus(is_64_bit: bool) -> None:
    """Its platform is known when JAX lowers it. It is differentiated and batched before."""

    def pinv(x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.pinv(x) + x

    with jax.enable_x64(is_64_bit):
        function, x = dynaxla.to_jax(pinv), jax.numpy.eye(3, dtype="float32")[None] * 2
        derivative = jax.grad(lambda x: jax.vmap(function)(x).sum())
        assert jax.jit(function)(x[0]).tolist() == (np.eye(3) * 2.5).tolist()
        assert np.diagonal(jax.jit(derivative)(x)[0]).tolist() == [0.75] * 3
        for program in (function, jax.vmap(function), derivative):
            with pytest.raises(UnsupportedOp, match=r"cannot compile it for the platform 'tpu'(?s:.*)in pinv"):
                jax.jit(program).trace(x).lower(lowering_platforms=("tpu",))


def test_marks_are_linear() -> None:
    def square(x: jax.Array) -> jax.Array:
        return marked(x, UnsupportedOp("it is refused")) ** 2

    assert jax.grad(square)(3.0) == 6
    assert jax.jvp(square, (3.0,), (2.0,)) == (9, 12)
    assert jax.vmap(square)(jax.numpy.arange(3)).tolist() == [0, 1, 4]
    with pytest.raises(UnsupportedOp, match="it is refused"):
        jax.jit(jax.grad(square)).trace(3.0).lower(lowering_platforms=("tpu",))
