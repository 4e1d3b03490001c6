"""Decides where dynaxla uses the oneDNN calls of `onednn.py`.

The calls are used for dtypes and sizes for which they are faster, if the installed jaxlib interprets them correctly.
"""

from __future__ import annotations

import functools
from pathlib import Path

import jax
import numpy as np
import torch

from ...config import Options
from ...runtime import clients, machine, private, programs, self_tests
from ..dtypes import DType
from . import onednn

# Releases of jaxlib that are known to interpret the configuration correctly. Other releases may number dimensions from one, for example.
# The list is used only if the self-test has no results.
KNOWN = ((0, 10), (0, 11), (0, 12))

_TESTED_DTYPES = ("float32", "bfloat16")


@functools.cache
def why_not() -> str:
    """Returns the reason why oneDNN's calls are not used with float32; "" if they are used."""
    if not _has_calls():
        return "this jaxlib has none"
    return _refused("float32")


@functools.cache
def _self_test() -> dict[str, str] | None:
    """Returns the results of oneDNN's self-test by dtype; see `self_tests.results`."""
    facts = [private.jaxlib_version(), machine.processor_facts()]
    found = self_tests.results(Path(onednn.__file__), _TESTED_DTYPES, facts, Options().store("self_tests"))
    return None if found is None else dict(found)


def _refused(dtype_name: str) -> str:
    """Returns the reason why oneDNN's calls are not used with a tested dtype, provided that jaxlib has the calls; "" if they are used."""
    results = _self_test()
    if results is None:
        is_known = private.release(private.jaxlib_version()) in KNOWN
        return "" if is_known else f"not tried with jaxlib {private.jaxlib_version()}, and no self-test could be run and kept"
    return results[dtype_name] and f"the self-test fails: {results[dtype_name]}"


@functools.cache
def _has_calls() -> bool:
    """True if this XLA:CPU compiles a call of oneDNN."""
    device = clients.cpu_device()
    with jax.default_device(device):
        lowered = jax.jit(lambda x: onednn.matmul(x, x, False, False, x.dtype)).lower(jax.ShapeDtypeStruct((8, 8), np.float32))
    try:
        programs.compile_lowered(lowered, device, {})
    except jax.errors.JaxRuntimeError:  # XLA knows no such call
        return False
    return True


def is_available() -> bool:
    """True if this XLA:CPU runs oneDNN's kernels, and their results are correct."""
    return not why_not()


@functools.cache
def supports(dtype: DType) -> bool:
    """True if oneDNN supports this dtype on this machine, and is at least as fast as with float32."""
    if dtype == np.float32:
        return is_available()
    if dtype == jax.numpy.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported() and is_available() and not _refused("bfloat16")
    return False


# If 1 / rows + 1 / columns is at least this, oneDNN's matmul for AVX2 copies no operand (oneDNN's gemm_driver.cpp).
_NO_COPY = 0.0038
# A stride in float32 elements. Consecutive reads at multiples of it map to few sets of the L1 cache.
_CRITICAL_DISTANCE = 512


def is_slow(rows: int, columns: int, transpose_x: bool, transpose_y: bool, dtype: DType) -> bool:
    """True if oneDNN's matmul misses the cache at each step, which occurs only on processors with AVX2 but no AVX-512.

    In this case, the matmul takes 1.1 to 1.9 times as long as MKL's.

    Args:
        rows: The number of rows of the result.
        columns: The number of columns of the result.
        transpose_x: True if x is transposed, as in `onednn.matmul`.
        transpose_y: True if y is transposed, as in `onednn.matmul`.
        dtype: The dtype of the operands.
    """
    if not machine.has_avx2_alone() or dtype != np.float32:
        return False
    distances = ([rows] if transpose_x else []) + ([] if transpose_y else [columns])
    return 1 / rows + 1 / columns >= _NO_COPY and any(distance % _CRITICAL_DISTANCE == 0 for distance in distances)
