"""Casts of floats to integers: what x86 makes of nan and of numbers out of range, which C++ leaves open."""

from __future__ import annotations

import platform

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from compare import assert_equal, check
from jax import export

from dynaxla.lowering.promotion import broadcast_shapes, convert, number

X86 = platform.machine().lower() in ("x86_64", "amd64")
pytestmark = pytest.mark.skipif(not X86, reason="other processors give other integers, in eager mode too")

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64]
INTEGERS = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64]
EDGES = [2.0**power for power in (7, 8, 15, 16, 31, 32, 33, 62, 63, 64)]
NUMBERS = [float("nan"), float("inf"), 0.0, 0.7, 300.7, 70_000.0, 3e9 + 77, 1e10 + 77, 1e20, 448.0, 57_344.0]
NUMBERS += EDGES + [edge * (1 + 2.0**-7) for edge in EDGES] + [edge - 0.5 for edge in EDGES] + [edge * (1 - 2.0**-8) for edge in EDGES]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.filterwarnings("ignore:Casting complex values")
def test_casts_to_integers(dtype: torch.dtype) -> None:
    """One by one in eager mode: of several numbers, its vectorized loops make other uint32 than its loops over the rest."""
    x = torch.tensor([sign * value for value in NUMBERS for sign in (1, -1)], dtype=torch.float64).to(dtype)
    expected = [torch.tensor([value.to(integer).item() for value in x], dtype=integer) for integer in INTEGERS]
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: [x.to(integer) for integer in INTEGERS], backend="dynaxla", fullgraph=True)
    assert_equal(compiled(x), expected)


@pytest.mark.parametrize("size", [1, 3, 8, 33, 1000])
def test_casts_agree_with_vectorized_ones(size: int) -> None:
    def function(x: torch.Tensor) -> list[torch.Tensor]:
        results = []
        for integer in INTEGERS:
            if integer != torch.uint32:
                copied = torch.zeros(x.shape, dtype=integer).copy_(x)
                results += [x.to(integer), (x * 2).to(integer), x.bfloat16().to(integer), copied, x[::2].double().to(integer)]
        return results

    check(function, torch.tensor(NUMBERS * 25)[torch.randperm(len(NUMBERS) * 25)][:size] * 0.5)


def test_casts_inside_control_flow_and_behind_it() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = torch.cond(x.sum() > 0, lambda x: x.int(), lambda x: -x.int(), (x,))
        return chosen, (x + chosen).int()

    check(function, torch.tensor([1e20, float("inf"), 3.5]))


def test_a_complex_number_is_true_by_either_part() -> None:
    assert convert(jnp.array([0, 1, 1j]), np.dtype(np.bool_)).tolist() == [False, True, True]


def test_symbolic_sizes_broadcast_as_others() -> None:
    batch, length = export.symbolic_shape("batch, length")
    assert broadcast_shapes([(batch, 1, 3), (length, 1)]) == (batch, length, 3)
    assert broadcast_shapes([(1,), (batch,)]) == (batch,)
    assert broadcast_shapes([(2, 1), (3,)]) == (2, 3)


def test_a_symbolic_size_is_a_number_of_the_program() -> None:
    made = export.export(jax.jit(lambda x: x * number(x.shape[0], x.dtype)))(
        jax.ShapeDtypeStruct(export.symbolic_shape("batch"), np.float32)
    )
    assert made.call(np.ones(3, np.float32)).tolist() == [3, 3, 3]
