"""Where dynaxla uses the calls of oneDNN in `onednn.py`: whether this jaxlib reads them as they are written, and for which dtypes and sizes
they are the faster way."""

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

# Releases of jaxlib whose reading of the configuration is known; others may number dimensions from one. They decide only where the
# self-test's results are not known.
KNOWN = ((0, 10), (0, 11), (0, 12))
# Those, exactly, that were tried with weights in oneDNN's own order. XLA looks at no such weight's size or order: where either is another
# than in the version that was tried, a kernel computes nonsense, reads past the weight's end, or ends the process.
PACKED = frozenset(["0.10.2"])

_SUBJECTS = ("float32", "bfloat16")


@functools.cache
def why_not() -> str:
    """The reason why oneDNN's calls are not used here with float32; "" if they are."""
    if not _has_calls():
        return "this jaxlib has none"
    return _refused("float32")


@functools.cache
def _self_test() -> dict[str, str] | None:
    """The results of oneDNN's self-test by dtype, see `self_tests.results`."""
    facts = [private.jaxlib_version(), machine.processor_facts()]
    found = self_tests.results(Path(onednn.__file__), _SUBJECTS, facts, Options().store("self_tests"))
    return None if found is None else dict(found)


def _refused(subject: str) -> str:
    """The reason why oneDNN's calls are not used with a dtype of the self-test, though jaxlib has them; "" if they are."""
    results = _self_test()
    if results is None:
        is_known = private.release(private.jaxlib_version()) in KNOWN
        return "" if is_known else f"not tried with jaxlib {private.jaxlib_version()}, and no self-test could be run and kept"
    return results[subject] and f"the self-test fails: {results[subject]}"


@functools.cache
def _has_calls() -> bool:
    """True if this XLA:CPU compiles a call of oneDNN."""
    device = clients.cpu_device()
    with jax.default_device(device):
        lowered = jax.jit(lambda x: onednn.matmul(x, x, False, False, x.dtype)).lower(jax.ShapeDtypeStruct((8, 8), np.float32))
    try:
        programs.compile_lowered(lowered, device, {})
    except jax.errors.JaxRuntimeError:  # no such call
        return False
    return True


def is_available() -> bool:
    """True if this XLA:CPU runs oneDNN's kernels, and they are right."""
    return not why_not()


def takes_packed() -> bool:
    """Whether weights may be given to oneDNN in its own order."""
    return private.jaxlib_version() in PACKED and is_available()


@functools.cache
def takes(dtype: DType) -> bool:
    """Whether oneDNN computes with this dtype here, and at least as fast as with float32."""
    if dtype == np.float32:
        return is_available()
    if dtype == jax.numpy.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported() and is_available() and not _refused("bfloat16")
    return False


# Where 1 / rows + 1 / columns is at least this, oneDNN's product for AVX2 copies no operand (its gemm_driver.cpp).
_NO_COPY = 0.0038
# float32 numbers: at such distances all that it reads one after another falls into few places of the first cache.
_CRITICAL_DISTANCE = 512


def is_slow(rows: int, columns: int, transpose_x: bool, transpose_y: bool, dtype: DType) -> bool:
    """Whether oneDNN's product misses the cache at each step: it takes 1.1 to 1.9 times as long as MKL's with AVX2. Arguments: as for
    `matmul`; rows and columns are the result's."""
    if not machine.has_avx2_alone() or dtype != np.float32:
        return False
    distances = ([rows] if transpose_x else []) + ([] if transpose_y else [columns])
    return 1 / rows + 1 / columns >= _NO_COPY and any(distance % _CRITICAL_DISTANCE == 0 for distance in distances)
