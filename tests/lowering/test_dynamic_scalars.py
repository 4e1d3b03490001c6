"""Numbers that a program takes as inputs: what lowerings may do with them, and for which numbers a program holds."""

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


def _variant(watch: ScalarTrace) -> GuardedInputs:
    return GuardedInputs(dict(watch.conditions), tuple(watch.scalar_inputs))


def test_it_is_a_number_of_its_kind() -> None:
    watch = ScalarTrace([0.5, 3])
    fraction, whole = watch.number(0), watch.number(1)
    assert is_dynamic(fraction)
    assert not is_dynamic(0.5)
    assert isinstance(fraction, float)
    assert not isinstance(fraction, int)
    assert isinstance(whole, int)
    assert not isinstance(whole, bool)
    assert not isinstance(fraction, jax.Array)
    assert result_type((fraction,)) == np.float32
    assert result_type((whole,)) == np.int64


def test_comparisons_say_for_which_numbers_a_program_holds() -> None:
    watch = ScalarTrace([0.25])
    weight = watch.number(0)
    assert abs(weight) < 0.5
    assert weight != 1
    assert bool(weight)
    held = _variant(watch)
    assert held.inputs([-0.4]) == []
    for other in (0.5, math.nan, 0.0):
        assert held.inputs([other]) is None


def test_calculations_are_done_with_each_number() -> None:
    watch = ScalarTrace([0.25])
    rest = 1 - watch.number(0) * 2
    with jax.enable_x64(True):
        jax.eval_shape(lambda: number(rest, F32))
        jax.eval_shape(lambda: number(rest, F32))
    assert isinstance(rest, float)
    assert _variant(watch).inputs([4.0]) == [(-7.0, F32)]


def test_each_number_is_an_input_of_its_own() -> None:
    watch = ScalarTrace([0.25, 4])
    jax.eval_shape(lambda: (number(watch.number(0), F32), number(watch.number(1), F32)))
    assert _variant(watch).inputs([0.5, 6]) == [(0.5, F32), (6, F32)]


def test_a_calculation_that_python_refuses() -> None:
    watch = ScalarTrace([2])
    assert 1 / watch.number(0) > 0
    assert _variant(watch).inputs([5]) == []
    assert _variant(watch).inputs([0]) is None


def test_numbers_of_numpy_calculate_as_with_numbers() -> None:
    watch = ScalarTrace([0.1])
    product = np.float32(3) * watch.number(0)
    with jax.enable_x64(True):
        jax.eval_shape(lambda: number(product, np.dtype(np.float64)))
    [(value, _)] = _variant(watch).inputs([0.1]) or []
    assert value == np.float32(3) * 0.1
    assert type(value) is np.float32


LOOKS: dict[str, Callable[[Any], Any]] = {
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


@pytest.mark.parametrize("look", LOOKS)
def test_any_other_look_is_noticed(look: str) -> None:
    watch = ScalarTrace([1.0])
    with pytest.raises(NumberInspected):
        LOOKS[look](watch.number(0))
    assert watch.was_inspected


@pytest.mark.parametrize(
    "use", [lambda value: divmod(value, 2), lambda value: np.ones(2) * value, lambda value: value << 2, lambda value: np.isnan(value)]
)
def test_what_it_cannot_do_is_an_error(use: Callable[[Any], Any]) -> None:
    with pytest.raises((TypeError, NumberInspected)):
        use(ScalarTrace([1.0]).number(0))
