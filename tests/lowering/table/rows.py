"""A row of the table: an op, and functions that make samples of its arguments.

A sample function gets `make`, which makes operands with the tested property (dense, transposed, of rank 0), and the size of the first
dimension, which may be 0. If eager mode refuses a sample of rank 0 or without elements, dynaxla may refuse it, too. A case that needs
special values is a test in the op's file.

There is a module of rows for each kind of op. It also lists the ops without a row, with the file that tests them (`ELSEWHERE`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._inductor import inductor_prims as inductor_prims  # defines prims.fma

aten, prims = torch.ops.aten, torch.ops.prims

Make = Callable[..., torch.Tensor]


class Keywords(dict[str, Any]):
    """The keyword arguments of an op, as the last item of a sample."""


Samples = Callable[[Make, int], Sequence[tuple[Any, ...]]]

HALVES = (torch.bfloat16, torch.float16)
FLOATS = (torch.float32, torch.float64, *HALVES)
INTEGERS = (torch.int64, torch.uint8)
REAL = (*FLOATS, *INTEGERS)
NUMERIC = (*REAL, torch.complex64)
EVERY = (*NUMERIC, torch.bool)
# For ops that do the same in every dtype, and for ops that are equivalent to another op.
FEW = (torch.float32, torch.int64)
PAIR = (torch.float32, torch.float64)
# For ops without kernels for float16, and for ops that do the same in both half types.
SHORT = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Op:
    """An op of the table.

    Attributes:
        op: The op.
        samples: Returns the samples of the op's arguments.
        dtypes: The dtypes to test.
        low: The lower bound of the operands' elements.
        high: The upper bound of the operands' elements.
        tolerance: (rtol, atol) for a dtype. Each needs a reason.
        gradient: True if the op has a gradient.
        constants: The indices of the arguments that have no gradient.
        without: The properties that are not tested, with a reason for each: forms of the operands, or "changing sizes".
    """

    op: torch._ops.OpOverload
    samples: Samples
    dtypes: Sequence[torch.dtype] = FLOATS
    low: float = -3.0
    high: float = 3.0
    tolerance: dict[torch.dtype, tuple[float, float]] = field(default_factory=dict)
    gradient: bool = True
    constants: Sequence[int] = ()
    without: Sequence[str] = ()

    def __str__(self) -> str:
        return str(self.op)


def alike(samples: Samples, op: torch._ops.OpOverload, *others: torch._ops.OpOverload, **options: Any) -> list[Op]:
    """Rows of an op, in every dtype, and of equivalent ops, in few dtypes."""
    return [Op(op, samples, EVERY, **options), *(Op(other, samples, FEW, **options) for other in others)]


def of(*rest: Any) -> Samples:
    """Samples: one tensor, and further arguments."""
    return lambda make, n: [(make(n, 3), *rest)]


def either(*rests: tuple[Any, ...]) -> Samples:
    """Samples: one tensor, and each of these lists of further arguments."""
    return lambda make, n: [(make(n, 3), *rest) for rest in rests]


def along_each_dim(make: Make, n: int) -> list[tuple[Any, ...]]:
    return [(make(n, 3), dim) for dim in (0, -1)]


def two(make: Make, n: int) -> list[tuple[Any, ...]]:
    """Samples: two tensors of equal shapes, and two that are broadcast."""
    return [(make(n, 3), make(n, 3)), (make(n, 3), make(3)), (make(n, 1), make())]


def same(count: int, *rest: Any) -> Samples:
    """Samples: `count` tensors of equal shapes, and further arguments."""
    return lambda make, n: [(*(make(n, 3) for _ in range(count)), *rest)]


def number_and(*numbers: Any) -> Samples:
    """Samples: each of the numbers, and a tensor."""
    return lambda make, n: [(number, make(n, 3)) for number in numbers]


def three(make: Make, n: int) -> list[tuple[Any, ...]]:
    return [(make(n, 3), make(n, 3), make(3))]


def with_numbers(make: Make, n: int) -> list[tuple[Any, ...]]:
    return [(make(n, 3), 2), (make(n, 3), True)]


def image(*rest: Any) -> Samples:
    return lambda make, n: [(make(n, 2, 6, 5), *rest)]


def products(*shapes: tuple[int, ...]) -> Samples:
    """Samples: tensors of these shapes. -1 is the changing size."""
    return lambda make, n: [tuple(make(*(n if size == -1 else size for size in shape)) for shape in shapes)]


# Prims have no gradients of their own: torch differentiates the op that decomposes into them. AOTAutograd takes no graphs with prims that
# are views. Prims refuse operands of rank 0 by assertions.
PRIM: dict[str, Any] = {"gradient": False, "without": ["rank 0"]}
PRIM_VIEW: dict[str, Any] = {"gradient": False, "without": ["rank 0", "changing sizes"]}

# torch's fake tensors run the kernel, which takes no symbolic sizes.
NO_SHAPES = ("changing sizes",)

# The arguments contain strides, which fit dense operands.
AS_STRIDED = ("transposed", "with gaps", "rank 0")

# torch's shape functions return other strides than its kernels.
NO_ORDER = ("transposed",)
# Eager mode takes operands only in row-major order.
IN_ORDER = ("transposed", "with gaps")

# torch's formula for the gradient is long, so tracing it takes seconds, and consists of ops with rows. `make conformance` tests it.
FORMULA: dict[str, Any] = {"gradient": False}

# torch has no shape function for the op, which torch.compile needs.
NO_FAKE = ("changing sizes",)
