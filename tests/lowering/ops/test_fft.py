"""Fourier transforms and their gradients: every normalization, lengths that pad or truncate, several dimensions."""

from __future__ import annotations

import pytest
import torch

from support.comparisons.compare import check
from support.comparisons.gradients import check_gradients
from support.comparisons.single_op import check_op
from support.releases import fails_in_oldest

aten = torch.ops.aten

OTHER_STRIDES = fails_in_oldest("its shape functions of transforms have other strides than its kernels, or fail")


def real(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype)


def complex_(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.complex128)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_normalization(dtype: torch.dtype) -> None:
    def transforms(x: torch.Tensor, z: torch.Tensor) -> list[torch.Tensor]:
        return [
            out
            for norm in ("backward", "ortho", "forward")
            for out in (
                torch.fft.fft(x, norm=norm),
                torch.fft.ifft(z, norm=norm),
                torch.fft.rfft(x, norm=norm),
                torch.fft.irfft(z, norm=norm),
                torch.fft.hfft(z, norm=norm),
                torch.fft.ihfft(x, norm=norm),
                torch.fft.fft2(z, norm=norm),
                torch.fft.irfft2(z, norm=norm),
            )
        ]

    x = real(3, 7, dtype=dtype)
    check(transforms, x, torch.complex(x, x.flip(0)))


@pytest.mark.parametrize(
    ("last", "length"), [(7, 5), (5, 1), *(pytest.param(*sizes, marks=OTHER_STRIDES) for sizes in ((6, 6), (4, 9), (1, 4)))]
)
def test_lengths(last: int, length: int) -> None:
    def transforms(x: torch.Tensor, z: torch.Tensor) -> list[torch.Tensor]:
        return [
            torch.fft.fft(x, length),
            torch.fft.rfft(x, length, dim=-1),
            torch.fft.irfft(z, length),
            torch.fft.rfftn(x, (2, length), dim=(0, 2)),
            torch.fft.hfft2(z, (2, length)),
        ]

    check(transforms, real(2, 3, last), complex_(2, 3, last))


@pytest.mark.sample(usual=3)
@pytest.mark.parametrize(
    "dims",
    [None, *(pytest.param(dims, marks=OTHER_STRIDES) for dims in ((0,), (4, 1), (3, 0, 2), (1, 2, 3, 0), (4, 3, 2, 1, 0)))],
)
def test_dimensions(dims: tuple[int, ...] | None) -> None:
    def transforms(x: torch.Tensor, z: torch.Tensor) -> list[torch.Tensor]:
        return [torch.fft.fftn(z, dim=dims), torch.fft.fftn(x, dim=dims), torch.fft.rfftn(x, dim=dims), torch.fft.irfftn(z, dim=dims)]

    check(transforms, real(2, 3, 4, 3, 2), complex_(2, 3, 4, 3, 2).transpose(1, 3))


def test_ops_without_decomposition() -> None:
    z = complex_(3, 4)
    check_op(aten._fft_c2c.default, z, [], 2, True)
    check_op(aten._fft_c2c.default, z.conj(), [1], 0, False)
    check_op(aten._fft_c2r.default, z, [0, 1], 2, 6)
    check_op(aten._fft_r2c.default, real(3, 1), [1, 0], 1, False)


def test_empty_batches() -> None:
    """Eager mode refuses them if it uses MKL."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: (torch.fft.fft(x), torch.fft.rfft(x), torch.fft.irfft(x)), backend="dynaxla", fullgraph=True)
    outs = compiled(real(0, 4))
    assert [tuple(out.shape) for out in outs] == [(0, 4), (0, 3), (0, 6)]
    assert [out.dtype for out in outs] == [torch.complex128, torch.complex128, torch.float64]


def test_nan_spreads() -> None:
    x = real(2, 4)
    x[0, 1] = float("nan")
    check(lambda x: torch.fft.fft(x).isnan(), x)


def test_spectrograms() -> None:
    window = torch.hann_window(16, dtype=torch.float64)

    def stft_and_istft(x: torch.Tensor, window: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        spectrum = torch.stft(x, 16, window=window, return_complex=True)
        return spectrum, torch.istft(spectrum, 16, window=window)

    check(stft_and_istft, real(2, 64), window)


@pytest.mark.parametrize("norm", ["backward", "ortho"])
def test_gradients(norm: str) -> None:
    def transforms(x: torch.Tensor, z: torch.Tensor) -> list[torch.Tensor]:
        return [
            torch.fft.fft(x, norm=norm),
            torch.fft.rfftn(x, norm=norm),
            torch.fft.irfft2(z, (3, 5), norm=norm),
            torch.fft.ifft2(z, norm=norm),
            torch.fft.hfft(z, norm=norm),
        ]

    check_gradients(transforms, real(3, 4), complex_(3, 4))
