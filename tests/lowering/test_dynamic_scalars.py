"""Python numbers that are inputs of a program: the operations that a lowering can apply, and the numbers for which a program is valid."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from dynaxla.lowering.dynamic_scalars import GuardedInputs, NumberInspected, ScalarTrace, is_dynamic
from dynaxla.lowering.promotion import number, result_type

F32 = np.dtype(np.float32)


def _guarded_inputs(trace: ScalarTrace) -> GuardedInputs:
    return GuardedInputs(dict(trace.conditions), tuple(trace.scalar_inputs))


def test_dynamic_scalar_is_a_float_or_an_int() -> None:
    trace = ScalarTrace([0.5, 3])
    fraction, whole = trace.number(0), trace.number(1)
    assert is_dynamic(fraction)
    assert not is_dynamic(0.5)
    assert isinstance(fraction, float)
    assert not isinstance(fraction, int)
    assert isinstance(whole, int)
    assert not isinstance(whole, bool)
    assert not isinstance(fraction, jax.Array)
    assert result_type((fraction,)) == np.float32
    assert result_type((whole,)) == np.int64


def test_comparisons_become_conditions() -> None:
    trace = ScalarTrace([0.25])
    weight = trace.number(0)
    assert abs(weight) < 0.5
    assert weight != 1
    assert bool(weight)
    guarded = _guarded_inputs(trace)
    assert guarded.inputs([-0.4]) == []
    for other in (0.5, math.nan, 0.0):
        assert guarded.inputs([other]) is None


def test_arithmetic_is_repeated_for_each_number() -> None:
    trace = ScalarTrace([0.25])
    rest = 1 - trace.number(0) * 2
    with jax.enable_x64(True):
        jax.eval_shape(lambda: number(rest, F32))
        jax.eval_shape(lambda: number(rest, F32))
    assert isinstance(rest, float)
    assert _guarded_inputs(trace).inputs([4.0]) == [(-7.0, F32)]


def test_each_number_is_a_separate_input() -> None:
    trace = ScalarTrace([0.25, 4])
    jax.eval_shape(lambda: (number(trace.number(0), F32), number(trace.number(1), F32)))
    assert _guarded_inputs(trace).inputs([0.5, 6]) == [(0.5, F32), (6, F32)]


def test_number_for_which_a_formula_raises_fails_the_condition() -> None:
    trace = ScalarTrace([2])
    assert 1 / trace.number(0) > 0
    assert _guarded_inputs(trace).inputs([5]) == []
    assert _guarded_inputs(trace).inputs([0]) is None


def test_arithmetic_with_numpy_scalars() -> None:
    trace = ScalarTrace([0.1])
    product = np.float32(3) * trace.number(0)
    with jax.enable_x64(True):
        jax.eval_shape(lambda: number(product, np.dtype(np.float64)))
    [(value, _)] = _guarded_inputs(trace).inputs([0.1]) or []
    assert value == np.float32(3) * 0.1
    assert type(value) is np.float32


INSPECTIONS: dict[str, Callable[[Any], Any]] = {
    "float": float,
    "int": int,
    "index": [1, 2].__getitem__,
    "hash": hash,
    "a dict": {1.0: 2}.get,
    "text": str,
    "a format": "{}".format,
    "repr": repr,
    "math": math.frexp,
    "an array": np.asarray,
    "numpy": lambda value: np.full(2, value, np.float32),
    "jax": jax.numpy.asarray,
    "a method": lambda value: value.is_integer(),
    "round": round,
}


@pytest.mark.parametrize("name", INSPECTIONS)
def test_any_other_access_is_an_inspection(name: str) -> None:
    trace = ScalarTrace([1.0])
    with pytest.raises(NumberInspected):
        INSPECTIONS[name](trace.number(0))
    assert trace.was_inspected


@pytest.mark.parametrize(
    "operation", [lambda value: divmod(value, 2), lambda value: np.ones(2) * value, lambda value: value << 2, lambda value: np.isnan(value)]
)
def test_unsupported_operations_raise(operation: Callable[[Any], Any]) -> None:
    with pytest.raises((TypeError, NumberInspected)):
        operation(ScalarTrace([1.0]).number(0))
