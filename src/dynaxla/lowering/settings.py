"""The PyTorch settings that change the numerical results of a program."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch
from jax import lax

from ..runtime import private
from .dtypes import DType


class Settings(NamedTuple):
    """The settings of one executable; part of its cache key.

    Attributes:
        matmul_tf32, convolution_tf32, recurrent_tf32: True if the operands of float32 products may be rounded to TF32. CUDA and ROCm only.
        deterministic: True if sums, including those of scatter ops, must have the same order at every call. CUDA and ROCm only.
        tpu_products: The precision of float32 matrix products, which a TPU computes from products of bfloat16. TPU only.

    Torch's other precision settings need no separate programs. Products of half types are accumulated in float32, and so are at least as
    precise as with `torch.backends.cuda.matmul.allow_fp16_accumulation`, `allow_fp16_reduced_precision_reduction` and
    `allow_bf16_reduced_precision_reduction`, on or off. On CUDA, the precision "bf16" counts as float32. The settings that
    select cuDNN's algorithm (`benchmark`, `deterministic`) change the order of sums, not their precision.
    """

    matmul_tf32: bool = False
    convolution_tf32: bool = False
    recurrent_tf32: bool = False
    deterministic: bool = False
    tpu_products: lax.Precision = lax.Precision.HIGHEST

    @staticmethod
    def current(platform: str) -> Settings:
        """Returns the settings that PyTorch's kernels would use now, whether they were set by torch's older API or by the newer one.

        Args:
            platform: JAX's name of the platform.
        """
        reader = _READERS.get(platform)
        return EXACT if reader is None else reader()

    @staticmethod
    def vary_on(platform: str) -> bool:
        """True if torch has settings for this platform. Then the settings must be part of a program's cache key."""
        return platform in _READERS

    @property
    def matmul_precision(self) -> lax.Precision:
        """The precision of matrix products: float32 products have PyTorch's precision, whatever XLA's default is."""
        return lax.Precision.DEFAULT if self.matmul_tf32 else self.tpu_products

    @property
    def convolution_precision(self) -> lax.Precision:
        """The precision of convolutions; see `matmul_precision`."""
        return lax.Precision.DEFAULT if self.convolution_tf32 else lax.Precision.HIGHEST

    @property
    def recurrent_precision(self) -> lax.Precision:
        """The precision of cuDNN's recurrent networks; see `matmul_precision`."""
        return lax.Precision.DEFAULT if self.recurrent_tf32 else lax.Precision.HIGHEST


def _for_cuda() -> Settings:
    matmul = private.float32_precision("cuda", "matmul") == "tf32"
    # Without cuDNN, torch computes convolutions as cuBLAS matrix products.
    convolution = private.float32_precision("cuda", "conv") == "tf32" if torch.backends.cudnn.enabled else matmul
    recurrent = private.float32_precision("cuda", "rnn") == "tf32"
    return _CUDA[matmul, convolution, recurrent, torch.are_deterministic_algorithms_enabled()]


def _for_tpu() -> Settings:
    try:
        return _TPU[torch.get_float32_matmul_precision()]
    except RuntimeError:  # torch's older and newer settings contradict each other
        return EXACT


_CUDA = {values: Settings(*values) for values in itertools.product((False, True), repeat=4)}
# By the value of torch.set_float32_matmul_precision. "high" is the sum of three products of bfloat16, "medium" is one product.
_TPU = {
    "highest": Settings(tpu_products=lax.Precision.HIGHEST),
    "high": Settings(tpu_products=lax.Precision.HIGH),
    "medium": Settings(tpu_products=lax.Precision.DEFAULT),
}
_READERS: dict[str, Callable[[], Settings]] = {"cuda": _for_cuda, "rocm": _for_cuda, "tpu": _for_tpu}
EXACT = Settings()


def precision_for(precision: lax.Precision, dtype: DType) -> lax.Precision:
    """Returns the precision for products of operands of this dtype. `precision`: the precision for float32.

    Products of half types are exact, so the result is the same for all precisions. On a TPU, XLA fuses a product with its consumers, such
    as a softmax, only if its precision is DEFAULT.
    """
    return lax.Precision.DEFAULT if dtype.itemsize <= 2 else precision
