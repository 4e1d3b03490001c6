"""Inclusive ranges, window functions, and frequencies."""

from __future__ import annotations

import pytest
import torch

from support.comparisons.compare import check

aten = torch.ops.aten


@pytest.mark.parametrize("dtype", [None, torch.float64, torch.bfloat16], ids=str)
def test_windows(dtype: torch.dtype | None) -> None:
    def function():
        results = []
        for length in (0, 1, 2, 7, 8):
            for periodic in (True, False):
                results += [
                    torch.bartlett_window(length, periodic, dtype=dtype),
                    torch.blackman_window(length, periodic, dtype=dtype),
                    torch.hamming_window(length, periodic, dtype=dtype),
                    torch.hamming_window(length, periodic, 0.4, 0.7, dtype=dtype),
                    torch.kaiser_window(length, periodic, beta=5.0, dtype=dtype),
                ]
        return [*results, torch.kaiser_window(9, dtype=dtype), torch.bartlett_window(9, dtype=dtype), torch.hamming_window(9, dtype=dtype)]

    # Eager mode computes windows of half types in the half type.
    check(function, calls=1, tolerance=(0.05, 0.01) if dtype == torch.bfloat16 else None)


def test_ranges_and_frequencies() -> None:
    def function():
        return (
            aten.range(0, 5),
            aten.range(1.5, -3, -0.5),
            aten.range(2, 9, 3, dtype=torch.int64),
            torch.fft.fftfreq(7, 0.5),
            torch.fft.fftfreq(8, dtype=torch.float64),
            torch.fft.fftfreq(1),
            torch.fft.rfftfreq(7, 0.1),
            torch.fft.rfftfreq(8),
        )

    check(function, calls=1)
