"""The cases that are known to fail. Each raises an error; none gives a wrong result. It is an error if one passes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .entries import Case


@dataclass(frozen=True)
class Expected:
    """An expected failure: in every case of these dtypes and kinds, at least one call raises `error`, and no call fails otherwise.

    Attributes:
        error: The name of an exception.
    """

    database: str
    name: str
    dtypes: tuple[str, ...]
    kinds: tuple[str, ...]
    error: str
    reason: str

    def cases(self) -> list[Case]:
        return [Case(self.database, self.name, dtype, kind) for dtype in self.dtypes for kind in self.kinds]


_ALL = ("float32", "float64", "bfloat16", "int64", "bool", "complex64")
_OUTSIDE_OPERAND = "it reads or writes memory around its operand, which is not an input of the program"
_HALF = "JAX has no complex numbers of two float16"

EXPECTED: tuple[Expected, ...] = (
    Expected("op_db", "as_strided_copy", _ALL, ("noncontiguous",), "UnsupportedOp", _OUTSIDE_OPERAND),
    Expected("op_db", "as_strided_scatter", _ALL, ("noncontiguous",), "UnsupportedOp", _OUTSIDE_OPERAND),
    Expected(
        "op_db",
        "chalf",
        _ALL,
        ("samples", "noncontiguous", "zero_size"),
        "UnsupportedTensor",
        _HALF,
    ),
    Expected("op_db", "chalf", ("float64",), ("gradients",), "UnsupportedTensor", _HALF),
    Expected("python_ref_db", "_refs._conversions.chalf", _ALL, ("samples", "noncontiguous", "zero_size"), "UnsupportedTensor", _HALF),
    Expected("python_ref_db", "_refs.as_strided_copy", _ALL, ("noncontiguous",), "UnsupportedOp", _OUTSIDE_OPERAND),
)

# In eager mode on the device. (tests/cases/device/refused.py shows the errors.)
_VALUE_KINDS = ("samples", "noncontiguous", "zero_size")
ON_THE_DEVICE: tuple[Expected, ...] = (
    *[
        Expected("op_db", "chalf", (dtype,), (*_VALUE_KINDS, *(("gradients",) if dtype == "float64" else ())), "RuntimeError", _HALF)
        for dtype in _ALL
    ],
    Expected("python_ref_db", "_refs._conversions.chalf", _ALL, _VALUE_KINDS, "RuntimeError", _HALF),
    Expected("op_db", "tensor_split", _ALL, _VALUE_KINDS, "RuntimeError", "torch requires a tensor of sections on the CPU"),
    Expected("op_db", "tensor_split", ("float64",), ("gradients",), "RuntimeError", "torch requires a tensor of sections on the CPU"),
    Expected("python_ref_db", "_refs.tensor_split", _ALL, ("samples", "noncontiguous"), "ValueError", "like tensor_split"),
    Expected("op_db", "to_sparse", _ALL, _VALUE_KINDS, "NotImplementedError", "the device has strided tensors only"),
)


def by_case(known: Iterable[Expected] = EXPECTED) -> dict[str, Expected]:
    """Returns the expected failure of each case. Raises ValueError if a case has two."""
    found: dict[str, Expected] = {}
    for item in known:
        for case in item.cases():
            if found.setdefault(str(case), item) is not item:
                raise ValueError(f"{case} is expected to fail twice")
    return found
