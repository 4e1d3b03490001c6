"""Values that a function may read, each with an expression that converts it to a number."""

from __future__ import annotations

import array
import collections
import datetime
import decimal
import enum
import fractions
import pathlib
import re
import types
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch


class Shade(enum.Enum):
    ONE = 1
    TWO = 2
    THREE = 3


class Count(enum.IntEnum):
    ONE = 1
    TWO = 2
    THREE = 3


class Point(NamedTuple):
    x: float
    y: float


@dataclass(frozen=True)
class Frozen:
    value: float


class OwnFloat(float):
    pass


@dataclass(frozen=True)
class Leaf:
    """A kind of value.

    Attributes:
        make: makes a value from a small integer. Different integers give different values, except for kinds with few values.
        read: an expression of `VALUE` whose value is a number.
    """

    make: Callable[[int], Any]
    read: str


LEAVES: dict[str, Leaf] = {
    "int": Leaf(lambda n: n, "VALUE"),
    "large int": Leaf(lambda n: 10**12 + n, "VALUE % 1000"),
    "float": Leaf(lambda n: n + 0.5, "VALUE"),
    "signed zero": Leaf(lambda n: -0.0 if n % 2 else 0.0, "str(VALUE).count('-')"),
    "bool": Leaf(lambda n: bool(n % 2), "VALUE + 0"),
    "type of number": Leaf(lambda n: (1, True, 1.0)[n % 3], "len(str(type(VALUE)))"),
    "complex": Leaf(lambda n: complex(0, n), "VALUE.imag"),
    "str": Leaf(lambda n: "a" * n, "len(VALUE)"),
    "bytes": Leaf(lambda n: b"a" * n, "len(VALUE)"),
    "bytearray": Leaf(lambda n: bytearray([n]), "VALUE[0]"),
    "memoryview": Leaf(lambda n: memoryview(bytes([n])), "VALUE[0]"),
    "array.array": Leaf(lambda n: array.array("d", [n]), "VALUE[0]"),
    "None": Leaf(lambda n: None if n % 2 else n, "0 if VALUE is None else VALUE + 1"),
    "ellipsis": Leaf(lambda n: ... if n % 2 else NotImplemented, "len(str(VALUE))"),
    "slice": Leaf(lambda n: slice(0, n), "len(range(100)[VALUE])"),
    "slice step": Leaf(lambda n: slice(0, 50, n + 1), "len(range(100)[VALUE])"),
    "range": Leaf(lambda n: range(n), "sum(VALUE) + len(VALUE)"),
    "np.float32": Leaf(lambda n: np.float32(n), "float(VALUE)"),
    "np.float64": Leaf(lambda n: np.float64(n), "float(VALUE)"),
    "np.int64": Leaf(lambda n: np.int64(n), "int(VALUE)"),
    "np.bool": Leaf(lambda n: np.bool(n % 2), "int(VALUE)"),
    "np.datetime64": Leaf(lambda n: np.datetime64(n, "s"), "int(VALUE.astype(int))"),
    "np.dtype": Leaf(lambda n: np.dtype(("i1", "i2", "i4", "i8")[n % 4]), "VALUE.itemsize"),
    "np.ndarray": Leaf(lambda n: np.full(3, float(n)), "float(VALUE.sum())"),
    "Decimal": Leaf(lambda n: decimal.Decimal(n) / 4, "float(VALUE)"),
    "Fraction": Leaf(lambda n: fractions.Fraction(n, 7), "float(VALUE)"),
    "datetime": Leaf(lambda n: datetime.datetime(2000 + n, 1, 1, tzinfo=datetime.UTC), "VALUE.year"),
    "timedelta": Leaf(lambda n: datetime.timedelta(seconds=n), "VALUE.total_seconds()"),
    "uuid": Leaf(lambda n: uuid.UUID(int=n), "VALUE.int"),
    "path": Leaf(lambda n: pathlib.PurePosixPath("a" * (n + 1)), "len(str(VALUE))"),
    "pattern": Leaf(lambda n: re.compile("a" * n), "len(VALUE.pattern)"),
    "enum": Leaf(lambda n: list(Shade)[n % 3], "VALUE.value"),
    "int enum": Leaf(lambda n: list(Count)[n % 3], "VALUE + 0"),
    "namedtuple": Leaf(lambda n: Point(n, 1.0), "VALUE.x"),
    "frozen dataclass": Leaf(lambda n: Frozen(float(n)), "VALUE.value"),
    "own float": Leaf(lambda n: OwnFloat(n), "VALUE + 0.0"),
    "dtype": Leaf(lambda n: (torch.int8, torch.int16, torch.int32, torch.int64)[n % 4], "VALUE.itemsize"),
    "torch.Size": Leaf(lambda n: torch.Size([n, 2]), "VALUE[0]"),
    "tensor's shape": Leaf(lambda n: torch.zeros(n, 2), "VALUE.shape[0]"),
    "tensor's flag": Leaf(lambda n: torch.zeros(2, requires_grad=bool(n % 2)), "int(VALUE.requires_grad)"),
    "mapping proxy": Leaf(lambda n: types.MappingProxyType({"a": n}), "VALUE['a']"),
    "ChainMap": Leaf(lambda n: collections.ChainMap({}, {"a": n}), "VALUE['a']"),
    "Counter": Leaf(lambda n: collections.Counter("a" * n), "VALUE['a']"),
    "defaultdict": Leaf(lambda n: collections.defaultdict(lambda: n), "VALUE.default_factory()"),
    "frozenset": Leaf(lambda n: frozenset([n]), "sum(VALUE)"),
    "set": Leaf(lambda n: {n}, "sum(VALUE)"),
    "deque": Leaf(lambda n: collections.deque([n]), "VALUE[0]"),
    "namespace": Leaf(lambda n: types.SimpleNamespace(a=n), "VALUE.a"),
}
