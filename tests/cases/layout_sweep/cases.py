"""The cases of the sweep: a row of the table of ops, and a memory layout of its operands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from lowering.table import ROWS
from lowering.table.rows import Keywords, Op
from support.comparisons.gradients import differentiable

SIZE = 4
REFUSALS = (RuntimeError, IndexError, ValueError, AssertionError, NotImplementedError, TypeError)


def _permuted(x: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """Returns a copy of the tensor whose dimensions have this order in memory."""
    inverse = sorted(range(x.dim()), key=order.__getitem__)
    return x.permute(order).contiguous().permute(inverse)


def _transposed(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, -1).contiguous().transpose(0, -1) if x.dim() > 1 else x


def _rotated(x: torch.Tensor) -> torch.Tensor:
    return _permuted(x, (*range(1, x.dim()), 0)) if x.dim() > 2 else x


def _sliced(x: torch.Tensor) -> torch.Tensor:
    if not x.dim():
        return x
    wide = torch.stack([x, x], -1).flatten(-2)
    return wide[..., ::2]


def _expanded(x: torch.Tensor) -> torch.Tensor:
    return x[:1].expand(x.shape) if x.dim() else x


def _channels_last(dims: int) -> Callable[[torch.Tensor], torch.Tensor]:
    order = (0, *range(2, dims), 1)
    return lambda x: _permuted(x, order) if x.dim() == dims else x


@dataclass(frozen=True)
class MemoryOrder:
    """A memory layout of operands.

    Attributes:
        arrange: returns a tensor with an operand's values in this layout.
        front: sizes that are put in front of the sizes of an operand with two dimensions, so that it has enough dimensions for the layout.
    """

    arrange: Callable[[torch.Tensor], torch.Tensor]
    front: tuple[int, ...] = ()


LAYOUTS = {
    "contiguous": MemoryOrder(lambda x: x),
    "channels-last": MemoryOrder(_channels_last(4), (2, 3)),
    "channels-last-3d": MemoryOrder(_channels_last(5), (2, 3, 2)),
    "transposed": MemoryOrder(_transposed),
    "permuted": MemoryOrder(_rotated, (2,)),
    "sliced": MemoryOrder(_sliced),
    "expanded": MemoryOrder(_expanded),
}


@dataclass(frozen=True)
class LayoutCase:
    """One row of the table in one layout."""

    row: Op
    layout: str

    def __str__(self) -> str:
        return f"{self.row}, {self.layout}"

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if torch.float32 in self.row.dtypes else self.row.dtypes[0]

    @property
    def has_gradients(self) -> bool:
        return self.row.gradient and (self.dtype.is_floating_point or self.dtype.is_complex)

    @property
    def has_values(self) -> bool:
        """True if the op returns the same values in every call."""
        is_tie_random = self.layout == "expanded" and self.row.op in (torch.ops.aten.median.dim, torch.ops.aten.nanmedian.dim)
        # If equal elements share memory, torch's kernels select one of them arbitrarily.
        return torch.Tag.nondeterministic_seeded not in self.row.op.tags and not is_tie_random

    def samples(self) -> list[tuple[Any, ...]]:
        """Returns the row's samples that eager mode supports, with operands in this layout.

        If the layout needs more dimensions, all operands with two dimensions get them; if eager mode supports no such sample, none do.
        """
        layout = LAYOUTS[self.layout]
        fronts = [layout.front, ()] if layout.front else [()]
        for front in fronts:

            def make(*shape: int, front: tuple[int, ...] = front) -> torch.Tensor:
                return _operands(self.row, self.dtype, *(front if len(shape) == 2 else ()), *shape)

            try:
                samples = [pytree.tree_map_only(torch.Tensor, layout.arrange, sample) for sample in self.row.samples(make, SIZE)]
            except REFUSALS:
                continue
            if supported := [sample for sample in samples if self._is_supported(sample)]:
                return supported
        return []

    def _is_supported(self, sample: tuple[Any, ...]) -> bool:
        """True if eager mode computes the sample and its gradients."""
        try:
            operands = self.leaves(sample) if self.has_gradients else sample
            results = differentiable(apply(self.row, operands))
            if self.has_gradients and results:
                torch.autograd.backward(results, [torch.ones_like(result) for result in results])
        except REFUSALS:
            return False
        return True

    def leaves(self, sample: tuple[Any, ...]) -> tuple[Any, ...]:
        """Returns the operands as leaves of autograd, with the same strides."""
        is_constant = [not self.has_gradients or index in self.row.constants for index in range(len(sample))]
        return tuple(
            pytree.tree_map_only(torch.Tensor, _copy if constant else _leaf, item)
            for constant, item in zip(is_constant, sample, strict=True)
        )


def apply(row: Op, sample: tuple[Any, ...]) -> Any:
    if sample and isinstance(sample[-1], Keywords):
        return row.op(*sample[:-1], **sample[-1])
    return row.op(*sample)


# Eager mode's kernels read these operands as if they were contiguous, beyond the end of their memory, and crash.
_CRASH_IN_EAGER_MODE = {"aten.adaptive_max_pool3d_backward.default, expanded"}


def cases() -> Iterator[LayoutCase]:
    all_cases = (LayoutCase(row, layout) for layout in LAYOUTS for row in ROWS)
    return (case for case in all_cases if str(case) not in _CRASH_IN_EAGER_MODE)


def _copy(x: torch.Tensor) -> torch.Tensor:
    """Returns a copy with the same strides, even if these leave gaps or share elements."""
    extent = 1 + sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    copied = torch.empty(extent, dtype=x.dtype).as_strided(x.shape, x.stride())
    memory = torch.as_strided(x, (extent,), (1,)) if extent else x.reshape(-1)
    torch.as_strided(copied, (extent,), (1,)).copy_(memory) if extent else None
    return copied


def _leaf(x: torch.Tensor) -> torch.Tensor:
    return _copy(x).detach().requires_grad_(x.is_floating_point() or x.is_complex())


def _operands(row: Op, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    if dtype == torch.bool:
        return torch.rand(shape) < 0.5
    if dtype.is_complex:
        return torch.complex(torch.empty(shape).uniform_(row.low, row.high), torch.empty(shape).uniform_(row.low, row.high)).to(dtype)
    low, high = row.low, row.high
    if not dtype.is_floating_point:
        low, high = (low if dtype.is_signed else max(low, 0)), max(high, 1)
        return torch.empty(shape, dtype=torch.float64).uniform_(low, high).round().to(dtype)
    return torch.empty(shape, dtype=torch.float64).uniform_(low, high).to(dtype)
