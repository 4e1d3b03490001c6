"""Tests of guards/fingerprints.py: equal values have equal fingerprints, different values different ones, mutable objects none."""

from __future__ import annotations

import array
import datetime
import decimal
import functools
import itertools
import operator
import re
import threading
import types
import uuid
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, TypeVarTuple

import numpy as np
import pytest
import torch

from dynaxla.guards.fingerprints import (
    MAX_COMPARED_BYTES,
    NO_FINGERPRINT,
    buffer_contents,
    builtin_value,
    fingerprint,
    hides_state,
    identity_of,
    is_compared_by_identity,
    parts_of,
    restore_contents,
    size_of,
)

pytestmark = pytest.mark.quick

DIFFERENT: list[Any] = [
    *(1, 1.0, True, 0.0, -0.0, 0j, -0j, complex(0, -0.0), "1", b"1", None, ...),
    *(np.float32(1), np.float64(1), np.int64(1), np.float64(-0.0), np.bool_(True)),
    *(range(3), range(4), range(0, 3, 2), decimal.Decimal(1), decimal.Decimal("1.0"), datetime.date(2020, 1, 1), datetime.timedelta(1)),
    *(torch.float32, torch.device("cpu"), torch.finfo(torch.float16), np.finfo(np.float16).dtype, uuid.UUID(int=1), Path("a"), Path("b")),
    *(re.compile("a"), re.compile("a", re.IGNORECASE), re.compile(b"a"), operator.itemgetter(1), operator.itemgetter(2)),
    *(operator.attrgetter("a"), operator.methodcaller("a", 1), operator.methodcaller("a", 2)),
]


def test_different_values() -> None:
    fingerprints = [fingerprint(value) for value in DIFFERENT]
    assert NO_FINGERPRINT not in fingerprints
    for first, second in itertools.combinations(range(len(fingerprints)), 2):
        assert fingerprints[first] != fingerprints[second], (DIFFERENT[first], DIFFERENT[second])
    assert len(set(fingerprints)) == len(fingerprints)


def test_equal_values() -> None:
    """Includes nan, which is not equal to itself."""
    pairs = [
        *((float("nan"), float("nan")), (np.float64("nan"), np.float64("nan")), (decimal.Decimal("1.5"), decimal.Decimal("1.5"))),
        *((re.compile("a+"), re.compile("a+")), (operator.methodcaller("a", 1), operator.methodcaller("a", 1))),
    ]
    assert [fingerprint(one) == fingerprint(other) != NO_FINGERPRINT for one, other in pairs] == [True] * len(pairs)


class Odd(int):
    """A subclass of int, which may have other state."""


@pytest.mark.parametrize(
    "value",
    [[], {}, set(), np.ones(1), Odd(1), threading.Lock(), object(), operator.methodcaller("a", [])],
    ids=lambda value: type(value).__name__,
)
def test_objects_without_fingerprint(value: Any) -> None:
    assert fingerprint(value) is NO_FINGERPRINT


def test_identities() -> None:
    thing, other = [1], [1]
    assert identity_of(thing) is identity_of(thing)
    assert identity_of(thing) != identity_of(other)
    assert len({identity_of(thing), identity_of(thing), identity_of(other)}) == 2


def test_is_compared_by_identity() -> None:
    known = [len, np.add, torch.ops.aten.add.Tensor, torch.nn.functional.relu, str.upper, "a".__class__.__len__]
    assert all(map(is_compared_by_identity, known))
    unknown = [lambda: None, functools.partial(len), [].append, functools.lru_cache(lambda: None), torch.no_grad()(lambda: None), Odd]
    assert not any(map(is_compared_by_identity, unknown))


def test_hides_state() -> None:
    class Slots:
        __slots__ = ("a",)

    class Plain(Slots):
        pass

    visible = [Slots(), Plain(), Odd(), types.SimpleNamespace(), functools.partial(len), TypeVar("T"), ParamSpec("P"), TypeVarTuple("Ts")]
    assert [hides_state(value) for value in visible] == [False] * 8
    hidden = [iter([1]), itertools.count(), threading.Lock(), ValueError(), (i for i in ()), np.random.default_rng(0)]
    hidden.append(np.zeros(1, [("a", "f4")])[0])
    assert [hides_state(value) for value in hidden] == [True] * 7
    assert fingerprint(hidden[-1]) is NO_FINGERPRINT


ARRAYS: list[Any] = [
    np.arange(6.0).reshape(2, 3).T,
    array.array("i", [1, 2]),
    bytearray(b"abc"),
    memoryview(bytearray(b"abc")),
    np.ones(()),
]


@pytest.mark.parametrize("value", ARRAYS, ids=lambda value: type(value).__name__)
def test_changed_contents_are_restored(value: Any) -> None:
    before = buffer_contents(value)
    assert before is not None
    assert buffer_contents(value) == before
    assert not restore_contents(value, before)
    value[() if getattr(value, "shape", None) == () else 0] = 7
    assert buffer_contents(value) != before
    assert restore_contents(value, before)
    assert buffer_contents(value) == before


def test_contents_of_arrays() -> None:
    """Strides and dtypes are compared. The contents of large arrays are not."""
    x = np.arange(6.0).reshape(2, 3)
    arrays = [x, x.T, x.reshape(3, 2), x.astype(np.float32), x.view(np.int64), x[::-1]]
    assert len({(values.metadata, values.data) for values in map(buffer_contents, arrays) if values is not None}) == len(arrays)
    assert buffer_contents(np.array([object()])) is None
    closed = memoryview(b"abc")
    closed.release()
    assert buffer_contents(closed) is None
    large = np.broadcast_to(np.float64(1), (MAX_COMPARED_BYTES // 8 + 1,))
    found = buffer_contents(large)
    assert found is not None
    assert found.data is None
    assert size_of(large) > MAX_COMPARED_BYTES
    assert not restore_contents(large, found)


def test_restoring_makes_an_array_writeable() -> None:
    x = np.arange(6.0)
    before = buffer_contents(x)
    assert before is not None
    x[0] = 5
    x.flags.writeable = False
    assert restore_contents(x, before)
    assert (x[0], x.flags.writeable) == (0, True)


def test_parts_of_objects() -> None:
    partial = functools.partial(max, 1, key=len)
    assert parts_of(partial) == {"func": max, "args": (1,), "keywords": {"key": len}}
    assert parts_of(slice(1, None, 2)) == {"start": 1, "stop": None, "step": 2}
    items = [1]
    assert parts_of(items.append) == {"__self__": items, "__name__": "append"}
    mapping = {"a": 1}
    found = parts_of(mapping.items())
    assert found is not None
    assert found["mapping"] is mapping
    assert parts_of(items) is None
    assert builtin_value(Odd(7)) == {"int": 7}
