"""Writes by index and by mask."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import dynaxla
from dynaxla.errors import UnsupportedOp
from support.comparisons.compare import check
from support.comparisons.gradients import check_gradients

aten = torch.ops.aten

ROW, ROWS = torch.tensor([2, 0, -1]), torch.tensor([[0, 1, 2], [-2, 0, 1]], dtype=torch.int32)


def writes(x: torch.Tensor, y: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> Any:
    rows = i % 3
    a, b, c, d, e = (x.clone() for _ in range(5))
    a[i[:2]] = y[:2]
    b[:, i] += 1
    c[i[:2], :, i[:2]] = y[0, 0]
    d[..., j[0]] = 7
    e[1, i[:, None], i] = y[0, :3, :3]
    return (
        *[a, b, c, d, e],
        x.index_put((rows, rows), y[:3, 0], accumulate=True),
        aten.index_put(x, [None, j], y[:, :2, :3].unsqueeze(-1), True),
        x.index_add(1, rows, y[:, :3], alpha=2),
        x.index_copy(0, rows[:2], y[:2]),
        x.index_fill(2, i, 3),
        x.put(i, y[0, 0, :3], accumulate=True),
    )


def test_writes() -> None:
    check_gradients(writes, torch.randn(4, 4, 4), torch.randn(4, 4, 4), constants=[ROW, ROWS])


@pytest.mark.parametrize("dtype", [torch.int32, torch.bfloat16, torch.complex64])
def test_writes_of_other_dtypes(dtype: torch.dtype) -> None:
    check(writes, torch.randn(4, 4, 4).to(dtype), torch.randn(4, 4, 4).to(dtype), ROW, ROWS, calls=1)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_index_expanded_from_one_row(dim: int) -> None:
    """Whole slices are written, as by `index_add`. Some of the indices cover fewer slices than x, or are contiguous."""
    shape = [1, 1, 1]
    shape[dim] = 6
    row = torch.tensor([3, 1, 3, 0, 1, 3]).view(shape)
    sizes = [5, 5, 5]
    sizes[dim] = 6

    def function(x: torch.Tensor, y: torch.Tensor, row: torch.Tensor) -> Any:
        index = row.expand(sizes)
        reductions = ("sum", "prod", "mean", "amax", "amin")
        return (
            *[
                x.scatter_reduce(dim, index, y, reduction, include_self=include_self)
                for reduction in reductions
                for include_self in (True, False)
            ],
            x.scatter_add(dim, index, y),
            x.scatter_add(dim, index, y.repeat(2, 2, 2)),
            x.scatter_add(dim, index.narrow(dim - 1, 0, 3), y),
            x.scatter_add(dim, index.contiguous(), y),
            x.scatter(dim, index[tuple(slice(0, 2) if d == dim % 3 else slice(None) for d in range(3))].contiguous(), y),
            x.scatter(dim, index, 2.0),
        )

    check(function, torch.randn(5, 5, 5), torch.randn(sizes), row)
    compiled = torch.compile(lambda x, y, row: x.scatter_add(dim, row.expand(sizes), y * 2), backend="dynaxla")
    with pytest.raises(RuntimeError, match=r"index .*out of bounds for dimension"):
        compiled(torch.randn(5, 5, 5), torch.randn(sizes), row + 2)


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")  # from torch.export
def test_index_of_an_exported_function_need_not_be_expanded() -> None:
    """A function of JAX arrays is captured with an expanded index, and called with another."""
    index = torch.tensor([3, 1, 0]).unsqueeze(1).expand(3, 4)
    x, y, other = torch.zeros(5, 4), torch.randn(3, 4), torch.randint(0, 5, (3, 4))
    exported = dynaxla.export(lambda x, index, y: x.scatter_add(0, index, y), (x, index, y), platforms=["cpu"])
    torch.testing.assert_close(torch.from_numpy(np.array(exported.call(*map(np.asarray, (x, other, y))))), x.scatter_add(0, other, y))


def test_gradients_of_expanded_indices() -> None:
    index = torch.tensor([3, 1, 3, 0, 1]).unsqueeze(1).expand(5, 4)

    def function(x: torch.Tensor, y: torch.Tensor, index: torch.Tensor) -> Any:
        return x.scatter_add(0, index, y), x.scatter_reduce(0, index, y.sin(), "mean"), x.scatter_reduce(0, index, y, "amax")

    check_gradients(function, torch.randn(6, 4), torch.randn(5, 4), constants=[index])


@pytest.mark.sample(usual=1)
@pytest.mark.parametrize("shape", [(4, 3, 1), (1, 3, 5), (4, 3, 5), (2, 3, 1)], ids=str)
def test_index_expanded_along_some_dimensions(shape: tuple[int, int, int]) -> None:
    """An index of tokens for each sequence, for instance, expanded over features. With (2, 3, 1), some rows have no index."""
    index = torch.randint(0, 6, shape)
    sizes = [shape[0] if shape[0] > 1 else 4, 3, 5]

    def function(x: torch.Tensor, y: torch.Tensor, index: torch.Tensor) -> Any:
        index = index.expand(sizes)
        return (
            *[
                x.scatter_reduce(1, index, y, reduction, include_self=include_self)
                for reduction in ("mean", "amax")
                for include_self in (True, False)
            ],
            x.scatter_add(1, index, y),
            x.scatter_add(1, index[:, :, :4], y),
            x.half().scatter_add(1, index, y.half()),
            x.permute(2, 1, 0).scatter_add(1, index.transpose(0, 2), y.permute(2, 1, 0)),
            x.permute(1, 2, 0).scatter_add(0, index.permute(1, 2, 0), y.permute(1, 2, 0)),
            x.gather(1, index),
            x.gather(-2, index[:, :1]),
            x.permute(2, 1, 0).gather(1, index.transpose(0, 2)),
        )

    def gather(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return x.mT.gather(2, index.expand(sizes).mT)

    x = torch.randn(4, 6, 5)
    check(function, x, torch.randn(sizes), index)
    check_gradients(gather, x, constants=[index])
    with pytest.raises(RuntimeError, match=r"index .*out of bounds for dimension 2"):
        torch.compile(gather, backend="dynaxla")(x, index + 6)


def test_scatter() -> None:
    index = torch.tensor([[[0], [3]], [[1], [0]]]).expand(2, 2, 3)
    repeated = torch.randint(0, 2, (4, 3, 2))

    def function(x: torch.Tensor, y: torch.Tensor, index: torch.Tensor, repeated: torch.Tensor) -> Any:
        return (
            x.scatter(1, index, y),
            x.scatter(1, index, 2.0),
            x.scatter(0, repeated[:1, :, :1], y),
            x.scatter_add(1, repeated, y),
            x.scatter_add(-1, repeated[:, :, :1], y),
            x[0, 0].scatter(0, index[0, :, 0], y[0, 0]),
            x[0, 0, 0].scatter(0, index[0, 0, 0], y[0, 0, 0]),
        )

    check(function, torch.randn(4, 4, 4), torch.randn(4, 4, 4), index, repeated)
    check(function, torch.randn(4, 4, 4).bfloat16(), torch.randn(4, 4, 4).bfloat16(), index, repeated, calls=1)
    check_gradients(
        lambda x, y, index: (x.scatter(1, index, y), x.scatter_add(1, index, y), x.scatter(1, index[:, :1], y[:, :1])),
        torch.randn(4, 4, 4),
        torch.randn(2, 2, 3),
        constants=[index],
    )


@pytest.mark.filterwarnings("ignore:The reduce argument of torch.scatter")
def test_deprecated_reductions() -> None:
    index = torch.randint(0, 3, (3, 4))
    check(
        lambda x, index: (
            x.scatter(0, index, x.flip(0), reduce="add"),
            x.scatter(1, index, 2.0, reduce="multiply"),
            aten.scatter.value_reduce(x, 1, index[:, :1], 2.0, reduce="add"),
        ),
        torch.randn(4, 4),
        index,
    )


def masked_writes(x: torch.Tensor, y: torch.Tensor, row: torch.Tensor, square: torch.Tensor) -> Any:
    """`row` has three true elements, so the values are one slice or three."""
    return (
        x.index_put((row,), y[0]),
        x.index_put((row,), y[:1]),
        x.index_put((row,), y[:3]),
        x.index_put((row,), y[:3, :1]),
        aten.index_put(x, [None, row], y[:, :1]),
        aten.index_put(x, [None, row], y[:1, :3], True),
        aten.index_put(x, [None, None, row], y[0, :, :3]),
        x.index_put((square,), y[0, 0]),
        x.index_put((square,), y[0, 0, 0], accumulate=True),
        x.index_put((square,), y[0, :1]),
        x.masked_fill(square, 2),
        x.masked_fill(row[:, None], y[0, 0, 0]),
        x.masked_scatter(square, y),
        x.masked_scatter(row, y),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bfloat16])
def test_masked_writes(dtype: torch.dtype) -> None:
    row = torch.tensor([True, False, True, True])
    square = torch.rand(4, 4) > 0.5
    # The values are constants: their gradient is a read with a mask, whose size depends on data.
    x, y = torch.randn(4, 4, 4).to(dtype), torch.randn(4, 4, 4).to(dtype)
    if dtype.is_floating_point:
        check_gradients(masked_writes, x, constants=[y, row, square])
    else:
        check(masked_writes, x, y, row, square)


def in_place(x: torch.Tensor) -> Any:
    a, b = x.clone(), x.clone()
    a[x > 0] = 0.5
    b[x[:, :, 0] > 0] = x[0, 0]
    return a, b


def test_masked_writes_in_place() -> None:
    check(in_place, torch.randn(4, 4, 3))


def test_masks_make_sizes_depend_on_data() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return aten.index_put(x, [x[:, :, 0] > 0, torch.tensor([1])], x.sum())

    x = torch.randn(4, 3, 2)
    with pytest.raises(UnsupportedOp, match="mask"):
        torch.compile(function, backend="dynaxla", fullgraph=True, options={"fallback": "error"})(x)
    check(function, x, fallback="kernel")
    # Without fullgraph, TorchDynamo runs such code in eager mode.
    assert torch.equal(torch.compile(lambda x: x[x > 0] * 2, backend="dynaxla")(x), x[x > 0] * 2)


def test_nonzero_static() -> None:
    x = torch.tensor([[0, 3, 0], [1, 0, 2]])
    check(
        lambda x: (
            torch.nonzero_static(x, size=2),
            torch.nonzero_static(x > 0, size=5, fill_value=-7),
            torch.nonzero_static(x[0, 1], size=2),
            torch.nonzero_static(x[:0], size=1),
        ),
        x,
    )


def test_index_fill_keeps_the_memory_order() -> None:
    """Also for operands with gaps."""
    index = torch.tensor([2, 0])
    for x in (
        torch.randn(60).as_strided((4, 3), (3, 12)),
        torch.randn(4, 6)[:, ::2].t(),
        torch.randn(3, 4).t(),
        torch.randn(4, 1).expand(4, 3),
    ):
        check(lambda x, index: (x.index_fill(0, index, 2.0), x.index_fill(1, index, torch.tensor(3.0))), x, index)


def test_sums_of_bools_are_any() -> None:
    index = torch.tensor([[0, 0, 1, 2]])
    true = torch.tensor([[True, True, True, False]])

    def function(x: torch.Tensor, source: torch.Tensor) -> Any:
        return x.scatter_add(1, index, source), x.scatter_reduce(1, index, source, "sum"), x.scatter_reduce(1, index, source, "prod")

    check(function, torch.tensor([[False, False, True]]), true, calls=1)


def test_mean_of_complex_values_keeps_other_elements() -> None:
    x, source = torch.tensor([1 + 1j, 2, 3, 4]), torch.tensor([2j, 4.0])
    check(lambda x, y: x.scatter_reduce(0, torch.tensor([0, 0]), y, "mean", include_self=False), x, source, calls=1)
