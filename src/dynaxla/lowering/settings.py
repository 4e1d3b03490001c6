"""The settings of PyTorch that change what a program computes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jax import lax


@dataclass(frozen=True)
class Settings:
    """They are part of every executable's key.

    Attributes: matmul_tf32, convolution_tf32 (whether float32 products may be rounded to TF32; CUDA only).
    """

    matmul_tf32: bool = False
    convolution_tf32: bool = False

    @staticmethod
    def current(platform: str) -> Settings:
        """As PyTorch is set now. platform: JAX's name."""
        if platform != "cuda":
            return EXACT
        return Settings(torch.get_float32_matmul_precision() != "highest", torch.backends.cudnn.allow_tf32)

    @property
    def matmul_precision(self) -> lax.Precision:
        """For dots: float32 products keep PyTorch's precision, whatever XLA's default is."""
        return lax.Precision.DEFAULT if self.matmul_tf32 else lax.Precision.HIGHEST

    @property
    def convolution_precision(self) -> lax.Precision:
        """For convolutions, as `matmul_precision` for dots."""
        return lax.Precision.DEFAULT if self.convolution_tf32 else lax.Precision.HIGHEST


EXACT = Settings()
