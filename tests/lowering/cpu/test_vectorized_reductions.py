"""Vectorized reductions return the same as plain reductions, also with NaNs and infinities."""

from __future__ import annotations

import copy
import math
import re
from pathlib import Path

import jax
import numpy as np
import pytest
import torch

from dynaxla.lowering.cpu import vectorized_reductions

REDUCTIONS = {
    "max": (vectorized_reductions.reduce_max, torch.amax),
    "largest": (vectorized_reductions.fast_reduce_max, torch.amax),
    "min": (vectorized_reductions.reduce_min, torch.amin),
    "sum": (vectorized_reductions.reduce_sum, torch.sum),
}


# Lowerings sum half types in float32, so there is no sum of bfloat16.
NAMES_AND_DTYPES = [(name, dtype) for name in REDUCTIONS for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int32)]
NAMES_AND_DTYPES.remove(("sum", torch.bfloat16))


@pytest.mark.sample(usual=8)
@pytest.mark.parametrize(("name", "dtype"), NAMES_AND_DTYPES)
@pytest.mark.parametrize(
    ("shape", "dims"),
    [((3, size), (1,)) for size in (1, 31, 32, 33, 36, 47, 48, 49, 56, 64, 127, 128, 129, 197, 768, 1000, 1001, 4099, 32000, 50257)]
    + [((5, 7, 11), (1, 2)), ((2, 40, 3), (1,)), ((300,), (0,)), ((40007,), (0,)), ((0, 50), (1,)), ((4, 5, 6, 7), (0, 1, 2, 3))],
)
def test_equals_plain_reduction(name: str, dtype: torch.dtype, shape: tuple[int, ...], dims: tuple[int, ...]) -> None:
    function, reference = REDUCTIONS[name]
    x = (torch.randn(shape, dtype=torch.float64) * 10).to(dtype)
    with jax.enable_x64(True):
        values = x.double().numpy().astype(jax.numpy.bfloat16) if dtype == torch.bfloat16 else x.numpy()
        result = np.asarray(jax.jit(lambda x: function(x, dims))(values)).astype(np.float64)
    expected = reference(x.double(), dims).numpy()
    tolerance = {torch.float32: 1e-3, torch.float64: 1e-9, torch.int32: 0}[dtype] if name == "sum" else 0
    np.testing.assert_allclose(result, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("shape", "dims"),
    [((size, 5), (0,)) for size in (33, 64, 97, 128, 784, 4099)]
    + [((4, 28, 28, 8), (0, 1, 2)), ((3, 7, 7, 16), (1, 2)), ((2, 3, 50, 4, 5), (2,))],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_sums_over_rows(dtype: torch.dtype, shape: tuple[int, ...], dims: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=dtype)
    x.view(-1)[3] = math.inf
    x.view(-1)[7] = math.nan
    with jax.enable_x64(True):
        assert vectorized_reductions.is_foldable(jax.numpy.asarray(x.numpy()), dims)
        result = jax.jit(lambda x: vectorized_reductions.sum_rows(x, dims))(x.numpy())
    tolerance = {"rtol": 1e-5, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(torch.from_numpy(np.array(result)), x.sum(dims), equal_nan=True, **tolerance)


@pytest.mark.parametrize(
    ("shape", "dims", "dtype"),
    [
        ((64, 64), (1,), np.float32),
        ((64, 4, 64), (0, 2), np.float32),
        ((32, 64), (0,), np.float32),
        ((64, 0), (0,), np.float32),
        ((64, 64), (0,), np.int32),
        ((64, 64), (0,), np.float16),
        ((64, 64), (), np.float32),
    ],
)
def test_sums_that_are_not_foldable(shape: tuple[int, ...], dims: tuple[int, ...], dtype: type) -> None:
    assert not vectorized_reductions.is_foldable(jax.numpy.zeros(shape, dtype), dims)


@pytest.mark.sample(usual=2)
@pytest.mark.parametrize("size", [40, 128, 197, 2000])
@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
def test_special_values(size: int, special: float) -> None:
    for position in sorted({0, 1, 15, 16, 31, 32, size // 2, size - 2, size - 1}):
        x = torch.randn(2, size)
        x[0, position] = special
        compiled = torch.compile(lambda x: (x.amax(1), x.amin(1), x.max(1), x.argmin(1), x.softmax(1), x.sum(1)), backend="dynaxla")
        torch.testing.assert_close(
            compiled(x), (x.amax(1), x.amin(1), x.max(1), x.argmin(1), x.softmax(1), x.sum(1)), equal_nan=True, rtol=1e-4, atol=1e-5
        )


def test_infinities_of_one_sign() -> None:
    """The identities with which the operand is padded do not appear in the result."""
    for value in (-math.inf, math.inf):
        x = torch.full((2, 197), value)
        compiled = torch.compile(lambda x: (x.amax(1), x.amin(1)), backend="dynaxla")
        torch.testing.assert_close(compiled(x), (x.amax(1), x.amin(1)))


def test_other_platforms_have_the_plain_reduction() -> None:

    def text(platform: str) -> str:
        traced = jax.jit(lambda x: vectorized_reductions.reduce_max(x, (1,))).trace(jax.ShapeDtypeStruct((4, 128), np.float32))
        return traced.lower(lowering_platforms=(platform,)).as_text()

    assert "slice" in text("cpu")
    assert "slice" not in text("cuda")
    assert text("cuda").count("stablehlo.reduce") == 1


@pytest.mark.sample(usual=10)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32])
@pytest.mark.parametrize(
    ("shape", "dims"),
    [
        ((4, 128, 24), (0,)),
        ((4, 128, 24), (1,)),
        ((4, 128, 24), (0, 1)),
        ((4, 128, 24), (0, 1, 2)),
        ((4, 128, 24), (1, 2)),
        ((4, 128, 24), (0, 2)),
        ((4, 1, 128, 1, 5), (0, 2)),
        ((4, 1, 128, 1, 5), (0, 1, 2, 3)),
        ((1, 4, 1, 128, 5), (1, 3)),
        ((2, 3, 4, 5), (1, 2)),
        ((2, 3, 40, 5), (1, 2)),
        ((8, 3, 14, 14), (2, 3)),
        ((2, 0, 5), (0, 1)),
        ((0, 3, 4), (0, 1, 2)),
        ((3, 4, 0), (0, 1, 2)),
        ((0, 3, 40), (1, 2)),
        ((1, 1), (0, 1)),
        ((), ()),
        ((1, 7, 300, 1), (1, 2)),
        ((4, 5, 8, 8), (0, 2, 3)),
        ((40, 5, 48), (0, 2)),
        ((3, 40, 2, 40, 5), (1, 3)),
        ((2, 3, 4, 40, 6, 7), (0, 2, 3, 5)),
        ((4, 0, 5, 40), (0, 2, 3)),
        ((32, 5, 7, 32), (0, 3)),
        ((3, 6, 4, 6, 5), (0, 2, 4)),
        ((2, 9, 16), (0, 2)),
    ],
)
def test_sums_over_any_dimensions(dtype: torch.dtype, shape: tuple[int, ...], dims: tuple[int, ...]) -> None:
    x = (torch.randn(shape, dtype=torch.float64) * 10).to(dtype)
    with jax.enable_x64(True):
        result = np.asarray(jax.jit(lambda x: vectorized_reductions.vectorized_sum(x, dims))(x.numpy()))
    expected = x.double().sum(dims).numpy() if dims else x.double().numpy()
    tolerance = {torch.float32: 1e-3, torch.float64: 1e-9, torch.int32: 0}[dtype]
    assert result.shape == expected.shape
    np.testing.assert_allclose(result.astype(np.float64), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("size", [128, 56])
def test_adjacent_dimensions_are_summed_as_one(size: int, tmp_path: Path) -> None:
    """XLA would reduce windows of 32x32 elements if it saw the dimensions."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 32, 3, padding=1), torch.nn.BatchNorm2d(32), torch.nn.Conv2d(32, 4, 1))
    x = torch.randn(4, 3, size, size)
    with torch.no_grad():
        expected = copy.deepcopy(net)(x)
        torch.testing.assert_close(torch.compile(net, backend="dynaxla", options={"dump": tmp_path})(x), expected, rtol=1e-4, atol=1e-4)
    (program,) = tmp_path.glob("*.hlo.txt")
    windows = re.findall(r" reduce-window\(.*window=\{size=([\dx]+)", program.read_text())
    assert windows
    assert all(sum(length != "1" for length in window.split("x")) == 1 for window in windows), windows


@pytest.mark.parametrize(
    ("shape", "dims"),
    [
        ((4, 8, 128, 128), (0, 2, 3)),
        ((4, 8, 128, 128), (2, 3)),
        ((6, 16384), (1,)),
        ((64, 8, 256), (0, 2)),
        ((1 << 17,), (0,)),
        ((32, 32, 8, 32), (1, 3)),
    ],
)
def test_sums_are_no_single_sequential_loop(shape: tuple[int, ...], dims: tuple[int, ...], tmp_path: Path) -> None:
    """Neither a sequential loop over all elements nor a window of several dimensions is vectorized."""
    x = torch.randn(shape)
    sums = torch.compile(lambda x: (x * 2).sum(dims) + 1, backend="dynaxla", options={"dump": tmp_path})
    torch.testing.assert_close(sums(x), (x * 2).sum(dims) + 1, rtol=1e-5, atol=1e-3)
    (program,) = tmp_path.glob("*.hlo.txt")
    loops = re.split(r"\n\n", program.read_text())
    assert max(len(re.findall(r" reduce\(", loop)) for loop in loops) <= 2
    windows = re.findall(r" reduce-window\(.*window=\{size=([\dx]+)", program.read_text())
    assert all(sum(length != "1" for length in window.split("x")) == 1 for window in windows), windows
    result_sizes = [math.prod(map(int, sizes.split(","))) for sizes in re.findall(r" = f32\[([\d,]+)\]\S* reduce\(", program.read_text())]
    assert (
        max(result_sizes) >= x.numel() / 32
    )  # one reduction adds at most 32 elements for each result, and its results are adjacent in memory
