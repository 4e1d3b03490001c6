"""What a row of the table is: an op, and how its samples are made.

A row's samples are made with `make`, which gives operands of the property that is tested (dense or not, of rank 0), and with the size of
the first dimension, 0 among others. Where eager mode refuses a sample of rank 0 or without elements, so may we. A case that is none of an
op's samples, because it needs values of its own, is a test in the op's file.

The rows lie by kind of op. A module of rows also says where the ops without a row are tested (`ELSEWHERE`), and why.
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
    """The last item of a sample: arguments that the op takes by their names."""


Samples = Callable[[Make, int], Sequence[tuple[Any, ...]]]

HALVES = (torch.bfloat16, torch.float16)
FLOATS = (torch.float32, torch.float64, *HALVES)
INTEGERS = (torch.int64, torch.uint8)
REAL = (*FLOATS, *INTEGERS)
NUMERIC = (*REAL, torch.complex64)
EVERY = (*NUMERIC, torch.bool)
# For what is the same in every dtype, and for ops that do what another one does.
FEW = (torch.float32, torch.int64)
PAIR = (torch.float32, torch.float64)
# Where torch has kernels for no other half type, or they do the same.
SHORT = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Op:
    """Attributes: low, high: bounds of the operands' numbers; tolerance: by dtype, with a reason; gradient: whether there is one;
    constants: the places of those arguments by which torch does not differentiate; without: what there is a reason not to try: a form of
    the operands, or "changing sizes"."""

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
    """Rows of an op, in every dtype, and of others that do the same."""
    return [Op(op, samples, EVERY, **options), *(Op(other, samples, FEW, **options) for other in others)]


def of(*rest: Any) -> Samples:
    """One tensor, and further arguments."""
    return lambda make, n: [(make(n, 3), *rest)]


def either(*rests: tuple[Any, ...]) -> Samples:
    """One tensor, and one or other further arguments."""
    return lambda make, n: [(make(n, 3), *rest) for rest in rests]


def along_each_dim(make: Make, n: int) -> list[tuple[Any, ...]]:
    return [(make(n, 3), dim) for dim in (0, -1)]


def two(make: Make, n: int) -> list[tuple[Any, ...]]:
    """Two tensors of one shape, and two that are broadcast."""
    return [(make(n, 3), make(n, 3)), (make(n, 3), make(3)), (make(n, 1), make())]


def same(count: int, *rest: Any) -> Samples:
    """So many tensors of one shape, and further arguments."""
    return lambda make, n: [(*(make(n, 3) for _ in range(count)), *rest)]


def number_and(*numbers: Any) -> Samples:
    """One or other number, and a tensor."""
    return lambda make, n: [(number, make(n, 3)) for number in numbers]


def three(make: Make, n: int) -> list[tuple[Any, ...]]:
    return [(make(n, 3), make(n, 3), make(3))]


def with_numbers(make: Make, n: int) -> list[tuple[Any, ...]]:
    return [(make(n, 3), 2), (make(n, 3), True)]


def image(*rest: Any) -> Samples:
    return lambda make, n: [(make(n, 2, 6, 5), *rest)]


def products(*shapes: tuple[int, ...]) -> Samples:
    """Tensors of these shapes; -1 is the changing size."""
    return lambda make, n: [tuple(make(*(n if size == -1 else size for size in shape)) for shape in shapes)]


# A prim's gradient is that of the op from whose decomposition it comes; one that is a view stands in no graph that AOTAutograd takes. What
# prims refuse of rank 0 they refuse by assertions.
PRIM: dict[str, Any] = {"gradient": False, "without": ["rank 0"]}
PRIM_VIEW: dict[str, Any] = {"gradient": False, "without": ["rank 0", "changing sizes"]}

# torch's fake tensors run its kernel, which takes no symbolic sizes.
NO_SHAPES = ("changing sizes",)

# The arguments hold strides, which fit dense operands.
AS_STRIDED = ("transposed", "with gaps", "rank 0")

# torch's shape functions give other strides there than its kernels.
NO_ORDER = ("transposed",)
# Eager mode takes operands in row-major order alone.
IN_ORDER = ("transposed", "with gaps")

# torch's formula for the gradient is long (its symbols take seconds), and made of ops that have rows. The whole database tries it.
FORMULA: dict[str, Any] = {"gradient": False}

# torch has no shape function of it, which torch.compile asks for.
NO_FAKE = ("changing sizes",)
