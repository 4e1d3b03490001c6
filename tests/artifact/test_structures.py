"""Tests of descriptions of nested values."""

from __future__ import annotations

import math
from typing import Any

import pytest

from dynaxla.artifact.structures import ARRAY, StructureMismatch, constant, count_arrays, flatten, mapping, sequence, unflatten

DESCRIBED = sequence("tuple", [ARRAY, mapping({"a": sequence("list", [ARRAY, constant(3)]), 1: constant(None)})])


def test_unflatten_inverts_flatten() -> None:
    value = (10, {1: None, "a": [20, 3]})
    arrays = list(flatten(DESCRIBED, value, "args"))
    assert arrays == [("args[0]", 10), ("args[1]['a'][0]", 20)]
    assert unflatten(DESCRIBED, iter([10, 20])) == value
    assert count_arrays(DESCRIBED) == 2


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ((10,), "args has 1 items, and had 2"),
        ((10, [1]), r"args\[1\] is a list, and was a dict"),
        ((10, {"a": [20, 3]}), r"args\[1\] has no 1, which it had at export"),
        ((10, {"a": [20, 3], 1: None, "b": 4}), r"args\[1\] has 'b', which it did not have at export"),
        ((10, {"a": [20, 3.0], 1: None}), r"args\[1\]\['a'\]\[1\] is 3.0, and was 3"),
        ((10, {"a": 5, 1: None}), "is a int, and was a list"),
    ],
)
def test_mismatch_names_the_path(value: Any, message: str) -> None:
    with pytest.raises(StructureMismatch, match=message):
        list(flatten(DESCRIBED, value, "args"))


def test_constants_are_equal_if_their_texts_are() -> None:
    """NaN is not equal to itself, and 0.0 is equal to -0.0."""
    assert list(flatten(constant(math.nan), math.nan, "args")) == []
    with pytest.raises(StructureMismatch, match=r"args is -0.0, and was 0.0"):
        list(flatten(constant(0.0), -0.0, "args"))


@pytest.mark.parametrize(
    "wrong", [{"kind": "set", "items": []}, {"kind": "constant", "value": []}, {}, {"kind": "dict", "keys": [1], "items": []}]
)
def test_invalid_description_is_refused(wrong: Any) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        count_arrays(wrong)
