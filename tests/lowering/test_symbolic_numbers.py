"""Numbers computed from symbolic sizes."""

from __future__ import annotations

import operator

import jax
import numpy as np
import pytest
import torch
from jax import export

from dynaxla.lowering.dimensions import definitely
from dynaxla.lowering.promotion import number, result_type
from dynaxla.lowering.symbolic_numbers import FUNCTIONS, SymbolicFloat, is_symbolic


def test_numbers_are_computed_when_the_program_runs() -> None:
    def numbers(x: jax.Array) -> list[jax.Array]:
        batch, length = x.shape
        half = 1 - FUNCTIONS[operator.truediv](length, 2)
        root = FUNCTIONS[torch._sym_sqrt](batch) * 2
        power = 2 ** FUNCTIONS[torch.sym_float](batch)
        sizes = [FUNCTIONS[torch.sym_max](batch, length), FUNCTIONS[torch.sym_min](batch, 3)]
        return [number(value, np.dtype(np.float64)) for value in (half, root, power, *sizes)]

    with jax.enable_x64(True):
        shape = export.symbolic_shape("batch, length")
        exported = export.export(jax.jit(numbers))(jax.ShapeDtypeStruct(shape, np.float32))
        assert [float(item) for item in exported.call(np.zeros((4, 7), np.float32))] == [-2.5, 4, 16, 7, 3]


def test_known_numbers_stay_python_numbers() -> None:
    found = [
        FUNCTIONS[torch.sym_float](3),
        FUNCTIONS[torch.sym_max](3, 4),
        FUNCTIONS[torch.sym_min](3, 4),
        FUNCTIONS[operator.truediv](3, 2),
    ]
    assert found == [3.0, 4, 3, 1.5]
    assert not any(map(is_symbolic, found))


def test_numbers_promote_like_python_numbers() -> None:
    (size,) = export.symbolic_shape("size")
    fraction = SymbolicFloat(np.float64(0.5))
    assert isinstance(fraction, float)
    assert result_type([np.zeros(2, np.int32), size]) == np.int32
    assert result_type([np.zeros(2, np.int32), fraction]) == np.float32
    assert result_type([np.zeros(2, np.float64), fraction]) == np.float64


def test_reading_the_value_raises() -> None:
    fraction = SymbolicFloat(np.float64(0.5))
    for read in (bool, float, int, lambda value: value == 0.5, lambda value: value < 1):
        with pytest.raises(jax.errors.InconclusiveDimensionOperation):
            read(fraction)
    assert not definitely(lambda: fraction == 0.5)
