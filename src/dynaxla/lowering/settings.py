"""The PyTorch settings that change the numerics of a program."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from jax import lax

from ..runtime import private


class Settings(NamedTuple):
    """The settings of one executable; part of its cache key.

    Attributes:
        matmul_tf32, convolution_tf32, recurrent_tf32: True if float32 products may be rounded to TF32. CUDA only.
        deterministic: True if sums, including those of scatter ops, must have the same order at every call. CUDA only.

    Torch's other precision settings need no program of their own. Products of half types are accumulated in float32, and so are at least as
    precise as with `torch.backends.cuda.matmul.allow_fp16_accumulation`, `allow_fp16_reduced_precision_reduction` and
    `allow_bf16_reduced_precision_reduction`, on or off. "bf16" is no precision of CUDA's, and counts as float32 there. The settings that
    select cuDNN's algorithm (`benchmark`, `deterministic`) change the order of sums, not their precision.
    """

    matmul_tf32: bool = False
    convolution_tf32: bool = False
    recurrent_tf32: bool = False
    deterministic: bool = False

    @staticmethod
    def current(platform: str) -> Settings:
        """Returns the settings that PyTorch's kernels would read now, from its older API, its newer one, or both.

        Args:
            platform: JAX's name.
        """
        if platform != "cuda":
            return EXACT
        matmul = private.float32_precision("cuda", "matmul") == "tf32"
        # Without cuDNN, torch computes convolutions as cuBLAS matrix products.
        convolution = private.float32_precision("cuda", "conv") == "tf32" if torch.backends.cudnn.enabled else matmul
        recurrent = private.float32_precision("cuda", "rnn") == "tf32"
        return _ALL[matmul, convolution, recurrent, torch.are_deterministic_algorithms_enabled()]

    @property
    def matmul_precision(self) -> lax.Precision:
        """The precision of dots: float32 products keep PyTorch's precision, whatever XLA's default is."""
        return lax.Precision.DEFAULT if self.matmul_tf32 else lax.Precision.HIGHEST

    @property
    def convolution_precision(self) -> lax.Precision:
        """The precision of convolutions; see `matmul_precision`."""
        return lax.Precision.DEFAULT if self.convolution_tf32 else lax.Precision.HIGHEST

    @property
    def recurrent_precision(self) -> lax.Precision:
        """The precision of cuDNN's recurrent networks; see `matmul_precision`."""
        return lax.Precision.DEFAULT if self.recurrent_tf32 else lax.Precision.HIGHEST


_ALL = {values: Settings(*values) for values in itertools.product((False, True), repeat=len(Settings._fields))}
EXACT = Settings()
