"""Factory functions, copies, casts, and views as another dtype."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from support.comparisons.compare import check
from support.comparisons.gradients import check_gradients

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
ALL = [torch.bool, *INTEGERS, *FLOATS, torch.complex64, torch.complex128]


def test_constant_tensors() -> None:
    def function(x: torch.Tensor) -> list[Any]:
        out = []
        for dtype in (None, *ALL):
            out += [torch.full((2, 3), 1, dtype=dtype), torch.zeros(3, dtype=dtype), torch.ones((), dtype=dtype)]
            out += [torch.full_like(x, 3, dtype=dtype), torch.zeros_like(x, dtype=dtype), torch.ones_like(x, dtype=dtype)]
            out += [x.new_full((2,), 1, dtype=dtype), x.new_zeros(4, dtype=dtype), x.new_ones((0, 2), dtype=dtype)]
            out += [torch.scalar_tensor(1, dtype=dtype), torch.eye(3, dtype=dtype), torch.eye(2, 4, dtype=dtype)]
        out += [
            torch.full((), 2),
            torch.full((2,), True),
            torch.full((2,), 0.5),
            torch.full((2,), 1 + 2j),
            torch.full((2,), -1, dtype=torch.uint8),
        ]
        return [
            *out,
            torch.full((2,), float("-inf"), dtype=torch.float16),
            torch.tensor([1.5, 2.5]),
            torch.tensor(3),
            torch.zeros(2, 3).t(),
        ]

    check(function, torch.randn(4, 3).t(), calls=1)


def test_metadata_of_empty_tensors() -> None:
    def function(x: torch.Tensor) -> list[Any]:
        return [
            torch.empty(2, 3),
            torch.empty_like(x),
            x.new_empty(4, dtype=torch.int32),
            torch.empty_strided((2, 3), (1, 2)),
            x.new_empty_strided((2, 3), (1, 2)),
            torch.empty(2, 3, 4, 5, memory_format=torch.channels_last),
            torch.empty_permuted((2, 3, 4), (0, 2, 1)),
        ]

    check(function, torch.randn(2, 3), values=False)


@pytest.mark.sample(usual=3)
@pytest.mark.parametrize("dtype", [None, *INTEGERS, *FLOATS], ids=str)
def test_ranges(dtype: torch.dtype | None) -> None:
    def function() -> list[Any]:
        out = [torch.arange(7, dtype=dtype), torch.arange(3, 11, dtype=dtype), torch.arange(2, 20, 3, dtype=dtype)]
        out += [torch.arange(20, 3, -4, dtype=dtype), torch.arange(0, dtype=dtype), torch.arange(0, 120, dtype=dtype)]
        out += [torch.linspace(0, 10, 11, dtype=dtype), torch.linspace(3, 100, 7, dtype=dtype), torch.linspace(5, 1, 1, dtype=dtype)]
        out += [torch.linspace(5, 1, 0, dtype=dtype), torch.linspace(100, 1, 34, dtype=dtype), torch.linspace(0, 7, 2, dtype=dtype)]
        out += [torch.tril_indices(3, 4), torch.triu_indices(4, 3, 1, dtype=torch.int32)]
        if dtype is None or dtype.is_floating_point:
            out += [
                torch.arange(0, 1, 0.1, dtype=dtype),
                torch.arange(-2.5, 3.1, 0.7, dtype=dtype),
                torch.linspace(-0.3, 0.9, 50, dtype=dtype),
            ]
            out += [torch.logspace(-2, 2, 5, dtype=dtype), torch.arange(1e4, 2e4, 37.3, dtype=dtype)]
        return out

    check(function, calls=1)


def test_ranges_of_mixed_numbers() -> None:
    def function(x: torch.Tensor) -> list[Any]:
        out = [
            torch.arange(0.5, 5, 1.5, dtype=torch.int64),
            torch.arange(5.0),
            torch.arange(2**40, 2**40 + 3),
            torch.linspace(0, 1, 3, dtype=torch.complex64),
        ]
        return [*out, torch.arange(x.shape[0]), torch.linspace(0, x.shape[0], x.shape[1]), torch.linspace(x[0, 0], x[1, 1], 5)]

    check(function, torch.randn(3, 4))
    check(lambda x: torch.arange(x.shape[0], dtype=x.dtype) + torch.zeros(x.shape[0]), torch.randn(5, 2), dynamic=True)


@pytest.mark.sample(usual=2)
@pytest.mark.optimized
@pytest.mark.filterwarnings("ignore:Casting complex values to real")
@pytest.mark.parametrize("source", ALL, ids=str)
def test_casts(source: torch.dtype) -> None:
    x = (torch.rand(4, 3) * 200 - 100).to(torch.complex64 if source.is_complex else torch.float32).to(source)

    def function(x: torch.Tensor) -> list[Any]:
        out = [x.to(target) for target in ALL]
        return [
            *out,
            x.float(),
            x.half(),
            x.bool(),
            x.long(),
            x.t().to(torch.float32),
            x.to(memory_format=torch.contiguous_format),
            x.clone(),
        ]

    check(function, x)


@pytest.mark.optimized
def test_casts_to_bool_and_of_complex() -> None:
    x = torch.tensor([0.0, -0.0, 1e-30, float("nan"), float("inf"), -1.0])
    check(lambda x, z: (x.bool(), z.bool(), z.real.int(), z.to(torch.complex128)), x, torch.tensor([0j, 1j, 1 + 0j]))


def test_copies() -> None:
    def function(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> Any:
        x.copy_(y)
        z[1:].fill_(3)
        z[0].zero_()
        filled = torch.fill(x, torch.tensor(2, dtype=torch.int32))
        return (
            x.clone(),
            y.detach(),
            torch.empty_like(z).copy_(y[0]),
            filled,
            torch.fill(z, 7.5),
            y.clone(memory_format=torch.contiguous_format),
        )

    check(function, torch.zeros(3, 4), torch.arange(4), torch.randn(3, 4).t().contiguous().t())
    check(function, torch.zeros(3, 4, dtype=torch.int8), torch.rand(3, 4) * 9, torch.randn(3, 4).half())


def test_channels_last_copies() -> None:
    def function(x: torch.Tensor) -> Any:
        return x.to(memory_format=torch.channels_last), x.clone(memory_format=torch.channels_last), torch.ones_like(x), x.half()

    check(function, torch.randn(2, 3, 4, 5))
    check(function, torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))


def test_constants_in_the_users_code() -> None:
    table = torch.arange(6.0).reshape(2, 3)

    def function(x: torch.Tensor) -> Any:
        return x + table, torch.tensor([[1, 2, 3]]) * x, torch.as_tensor([0.5]) + x

    check(function, torch.randn(2, 3))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_complex_parts(dtype: torch.dtype) -> None:
    z = torch.randn(3, 4, dtype=dtype)

    def function(z: torch.Tensor) -> Any:
        pairs = torch.view_as_real(z) * 2
        return (
            torch.real(z) + 1,
            torch.imag(z) * 2,
            pairs,
            torch.view_as_complex(pairs),
            torch.complex(z.real * 1, z.imag * 3),
            torch.polar(z.abs(), z.angle()),
            torch.conj_physical(z),
            z.conj() * z,
            z.conj().resolve_conj(),
            z.mH @ z,
            z.abs(),
            torch.view_as_real(z[0, 0] * 1),
        )

    check(function, z)
    check(function, torch.randn(4, 3, dtype=dtype).t())


def test_real_and_conj_of_real_tensors() -> None:
    check(
        lambda x: (torch.real(x) + 1, torch.conj(x) * 2, torch.conj_physical(x), x.resolve_conj() + 0, x.resolve_neg() * 1), torch.randn(3)
    )


@pytest.mark.optimized  # without optimization, jaxlib 0.11 copies bfloat16 through float32, and loses denormals
def test_views_as_other_dtypes() -> None:
    same_size = [torch.float32, torch.int32]
    sizes = [torch.uint8, torch.int8, torch.int16, torch.bfloat16, torch.float16, torch.int32, torch.float32, torch.int64, torch.float64]
    tensors = [torch.randint(0, 2, (3, 8 * dtype.itemsize), dtype=torch.uint8).view(dtype).contiguous() for dtype in sizes]

    def function(*xs: torch.Tensor) -> list[torch.Tensor]:
        out = [x.clone().view(dtype) + 1 for x, dtype in itertools.product(xs, sizes)]
        return out + [xs[5][0, 0].clone().view(dtype) * 1 for dtype in same_size]

    check(function, *tensors, calls=1)
    z = torch.randn(2, 4, dtype=torch.complex64)
    check(
        lambda z, b: (z.clone().view(torch.float32) * 2, b.clone().view(torch.uint8) + 1, (z.real * 1).view(torch.complex64) + 1),
        z,
        z.real > 0,
    )
    check(lambda z: z.view(torch.int64) + 1, torch.tensor(1 + 2j, dtype=torch.complex64))


def test_gradient_of_a_tensor_times_a_complex_number() -> None:
    check_gradients(lambda x, y: (x * 1j, y * (1 + 2j)), torch.randn(3), torch.randn(()))
