"""The settings of PyTorch that change what a program computes."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from jax import lax

from ..runtime import private


class Settings(NamedTuple):
    """They are part of every executable's key.

    Attributes: matmul_tf32, convolution_tf32, recurrent_tf32 (whether float32 products may be rounded to TF32; CUDA only); deterministic
    (whether sums must have the same order at every call, those of what is scattered to one place included; CUDA only).

    torch's other settings of precision need no program of their own. Products of half types are added in float32, and so are at least as
    precise as with `torch.backends.cuda.matmul.allow_fp16_accumulation` and its `allow_fp16_reduced_precision_reduction` and
    `allow_bf16_reduced_precision_reduction`, on or off. "bf16" is no precision of CUDA's, and counts as float32 there. What decides which
    algorithm cuDNN takes (`benchmark`, `deterministic`) changes the order of sums, not their precision.
    """

    matmul_tf32: bool = False
    convolution_tf32: bool = False
    recurrent_tf32: bool = False
    deterministic: bool = False

    @staticmethod
    def current(platform: str) -> Settings:
        """As PyTorch's kernels would read them now, whether set in the older way, the newer or both. platform: JAX's name."""
        if platform != "cuda":
            return EXACT
        matmul = private.float32_precision("cuda", "matmul") == "tf32"
        # Without cuDNN, convolutions are cuBLAS's products.
        convolution = private.float32_precision("cuda", "conv") == "tf32" if torch.backends.cudnn.enabled else matmul
        recurrent = private.float32_precision("cuda", "rnn") == "tf32"
        return _ALL[matmul, convolution, recurrent, torch.are_deterministic_algorithms_enabled()]

    @property
    def matmul_precision(self) -> lax.Precision:
        """For dots: float32 products keep PyTorch's precision, whatever XLA's default is."""
        return lax.Precision.DEFAULT if self.matmul_tf32 else lax.Precision.HIGHEST

    @property
    def convolution_precision(self) -> lax.Precision:
        """For convolutions, as `matmul_precision` for dots."""
        return lax.Precision.DEFAULT if self.convolution_tf32 else lax.Precision.HIGHEST

    @property
    def recurrent_precision(self) -> lax.Precision:
        """For cuDNN's recurrent networks, as `matmul_precision` for dots."""
        return lax.Precision.DEFAULT if self.recurrent_tf32 else lax.Precision.HIGHEST


_ALL = {values: Settings(*values) for values in itertools.product((False, True), repeat=len(Settings._fields))}
EXACT = Settings()
