"""Tests of training/traced_numbers.py: arithmetic gives formulas, comparisons give conditions, and other reads end the recording."""

from __future__ import annotations

import copy
import decimal
import fractions
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from dynaxla.runtime.number_tracer import evaluate
from dynaxla.training.traced_numbers import TracedNumber, TracedNumberInspected, TracedNumbers, op_with_traced_numbers

aten = torch.ops.aten
LR, DECAY, COUNT = ("group", "lr"), ("group", "decay"), ("state", "count")

FORMULAS: dict[str, Callable[[Any, Any], Any]] = {
    "step": lambda lr, decay: 1 - lr * decay,
    "both sides": lambda lr, decay: (2 / lr - 3) ** decay,
    "signs": lambda lr, decay: -lr + abs(-decay) + +lr,
    "remainders": lambda lr, decay: lr % decay + 7 % lr + lr // decay + 2**lr,
    "sum": lambda lr, decay: sum([lr, decay, lr]),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_formulas(name: str) -> None:
    numbers = TracedNumbers(0)
    result = FORMULAS[name](numbers.at(LR, 0.1), numbers.at(DECAY, 0.1))
    assert type(result) is TracedNumber
    for values in ({LR: 0.25, DECAY: 0.5}, {LR: 3.0, DECAY: 2.0}):
        assert evaluate(result.dynaxla_formula, values.__getitem__) == FORMULAS[name](values[LR], values[DECAY])


def test_stand_in_floats() -> None:
    """C++ code gets a float with a random value. Equal formulas have equal floats."""
    numbers = TracedNumbers(0)
    lr = numbers.at(LR, 0.1)
    assert numbers.stand_in(numbers.at(LR, 0.2)) == numbers.stand_in(lr)
    plain = numbers.stand_in(lr * 2)
    assert type(plain) is float
    assert (plain == numbers.stand_in(lr * 2), plain == numbers.stand_in(lr * 3)) == (True, False)
    number = numbers.find(plain)
    assert number is not None
    assert number.dynaxla_formula == (lr * 2).dynaxla_formula
    assert numbers.find(0.5) is None
    assert numbers.find(1) is None
    others = TracedNumbers(1)
    assert others.stand_in(others.at(LR, 0.1)) != numbers.stand_in(lr), (
        "a float that C++ code uses unnoticed differs between two recordings"
    )


READERS: list[Callable[[Any], Any]] = [
    *(int, float, round, math.floor, math.ceil, math.sqrt, str, hash, repr, range),
    *(lambda x: [1, 2][:x], lambda x: "a" * x, lambda x: f"{x:.2f}", lambda x: f"{x:f}", lambda x: x & 1, lambda x: divmod(x, 2)),
    *(lambda x: x.real, lambda x: x in {1, 2}, lambda x: (-1) ** x, lambda x: x == np.int64(3), lambda x: np.float32(2) < x),
    *(lambda x: x == 3 + 0j, lambda x: x != decimal.Decimal(3), lambda x: fractions.Fraction(1, 2) < x),
]


@pytest.mark.parametrize("reader", range(len(READERS)))
def test_reads_of_the_value(reader: int) -> None:
    """Code that reads the value ends the recording."""
    numbers = TracedNumbers(0)
    read = READERS[reader]
    number = numbers.at(LR, 3)
    with pytest.raises(TracedNumberInspected) as caught:
        read(number)
    assert caught.value.places == numbers.inspected == {LR}


def test_comparisons_are_conditions() -> None:
    numbers = TracedNumbers(0)
    count, lr = numbers.at(COUNT, 7), numbers.at(LR, 0.5)
    assert [count % 4 == 3, count > 9, bool(count - 7), min(count, 8) is count, lr <= count, count in (1, 7)] == [
        *(True, False, False, True, True, True)
    ]
    assert len(numbers.conditions) == 7
    for values, expected in (
        ({COUNT: 7, LR: 0.5}, True),
        ({COUNT: 7, LR: 3.0}, True),
        ({COUNT: 7, LR: 8.0}, False),
        ({COUNT: 3, LR: 0.5}, False),
    ):
        assert all(evaluate(comparison, values.__getitem__) == outcome for comparison, outcome in numbers.conditions.items()) == expected
    assert not numbers.inspected


def test_constants_of_formulas() -> None:
    """Constants that are equal in Python, but not in arithmetic, make different formulas."""
    lr = TracedNumbers(0).at(LR, 0.5)
    assert len({(lr * factor).dynaxla_formula for factor in (0.0, -0.0, 0, False, 1, 1.0, True, 0.0)}) == 7


def test_other_operations() -> None:
    count = TracedNumbers(0).at(COUNT, 7)
    assert isinstance(count, int)
    assert not isinstance(count, (bool, float))
    assert (count == "a", count != None, hasattr(count, "value"), count is copy.deepcopy(count)) == (False, True, False, True)  # noqa: E711
    with pytest.raises(TypeError):
        assert count < "a"
    with pytest.raises(AttributeError, match="'int' object has no attribute 'value'"):
        assert count.value


def test_tuples() -> None:
    betas = TracedNumbers(0).at(("group", "betas"), (0.9, 0.99))
    assert isinstance(betas, tuple)
    assert [evaluate((1 - beta).dynaxla_formula, {("group", "betas"): (0.5, 0.75)}.__getitem__) for beta in betas] == [0.5, 0.25]


def number(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


X, Y = torch.tensor([1.5, -2.0]), torch.tensor([0.25, 3.0])
CALLS: dict[Any, list[tuple[Any, ...]]] = {
    aten.add.Tensor: [(X, 0.3), (X.bfloat16(), 0.3), (X.int(), 0.5)],
    aten.add.Scalar: [(X, 0.3, 2), (X.int(), 0.5, 2), (X[0], 0.3, 2)],
    aten.sub.Tensor: [(X, 0.3)],
    aten.rsub.Scalar: [(X, 0.3)],
    aten.mul.Tensor: [(X, 0.3), (X.half(), 0.3), (X.int(), 0.5), (X.to(torch.complex64), 0.3)],
    aten.div.Tensor: [(X, 0.3), (X.bfloat16(), 0.3)],
    aten.lerp.Scalar: [(X, Y, 0.3)],
    aten.mul_.Tensor: [(X, 0.3)],
    aten.fill_.Scalar: [(X, 0.3), (X.bfloat16(), 0.3)],
    aten.full_like.default: [(X, 0.3)],
    aten.pow.Tensor_Scalar: [(Y, 0.3), (Y.bfloat16(), 0.3), (Y[0], 0.3)],
    aten.pow.Scalar: [(0.3, X), (0.3, X.half()), (0.3, X[0])],
}


@pytest.mark.parametrize("op", CALLS, ids=str)
def test_rules_equal_ops(op: Any) -> None:
    """The number is a float64 tensor. Results have the op's dtype, and the op's values up to rounding."""
    for args in CALLS[op]:
        copies = [tuple(arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args) for _ in range(2)]
        expected = op(*copies[0])
        traced = op_with_traced_numbers(op)
        assert traced is not None
        found = traced(*(number(arg) if isinstance(arg, float) else arg for arg in copies[1]))
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(copies[1][0], copies[0][0])


def test_keywords_and_lists() -> None:
    add, addcdiv, foreach_mul = (
        op_with_traced_numbers(aten.add.Tensor),
        op_with_traced_numbers(aten.addcdiv.default),
        op_with_traced_numbers(aten._foreach_mul_.Scalar),
    )
    assert add is not None
    assert addcdiv is not None
    assert foreach_mul is not None
    torch.testing.assert_close(add(X, Y, alpha=number(0.3)), torch.add(X, Y, alpha=0.3))
    torch.testing.assert_close(addcdiv(X, Y, X, value=number(0.3)), torch.addcdiv(X, Y, X, value=0.3))
    tensors = [X.clone(), Y.clone()]
    foreach_mul(tensors, number(0.3))
    torch.testing.assert_close(tensors, [X * 0.3, Y * 0.3])
    foreach_mul_list = op_with_traced_numbers(aten._foreach_mul.ScalarList)
    assert foreach_mul_list is not None
    torch.testing.assert_close(foreach_mul_list([X, Y], [number(0.3), 2.0]), [X * 0.3, Y * 2])


@pytest.mark.parametrize("op", [aten.mul.out, aten.div.Tensor_mode, aten.hypot.default, torch.ops.prims.add.default], ids=str)
def test_ops_without_a_rule(op: Any) -> None:
    assert op_with_traced_numbers(op) is None
