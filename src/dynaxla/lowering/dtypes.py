"""The mapping between PyTorch's and JAX's dtypes, and small functions on dtypes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
import torch

DType = np.dtype

_TORCH_TO_JAX: dict[torch.dtype, np.dtype] = {
    torch.bool: np.dtype(np.bool_),
    torch.uint8: np.dtype(np.uint8),
    torch.uint16: np.dtype(np.uint16),
    torch.uint32: np.dtype(np.uint32),
    torch.uint64: np.dtype(np.uint64),
    torch.int8: np.dtype(np.int8),
    torch.int16: np.dtype(np.int16),
    torch.int32: np.dtype(np.int32),
    torch.int64: np.dtype(np.int64),
    torch.float16: np.dtype(np.float16),
    torch.bfloat16: np.dtype(jnp.bfloat16),
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
    torch.complex64: np.dtype(np.complex64),
    torch.complex128: np.dtype(np.complex128),
    torch.float8_e4m3fn: np.dtype(jnp.float8_e4m3fn),
    torch.float8_e5m2: np.dtype(jnp.float8_e5m2),
    torch.float8_e4m3fnuz: np.dtype(jnp.float8_e4m3fnuz),
    torch.float8_e5m2fnuz: np.dtype(jnp.float8_e5m2fnuz),
    torch.float8_e8m0fnu: np.dtype(jnp.float8_e8m0fnu),
}
_JAX_TO_TORCH = {jax_dtype: torch_dtype for torch_dtype, jax_dtype in _TORCH_TO_JAX.items()}

# Abbreviations of dtypes that do not follow the rule of `describe`.
_SHORT_NAMES = {"bool": "bool", "bfloat16": "bf16", "float8_e4m3fn": "f8e4m3fn", "float8_e5m2": "f8e5m2"}


def is_supported(dtype: torch.dtype) -> bool:
    """True if JAX has a counterpart of a torch dtype."""
    return dtype in _TORCH_TO_JAX


def to_jax(dtype: torch.dtype) -> DType:
    """Returns the JAX dtype for a torch dtype.

    Raises:
        KeyError: A dtype without a JAX counterpart (quantized, complex32, bit-packed).
    """
    return _TORCH_TO_JAX[dtype]


def to_torch(dtype: DType) -> torch.dtype:
    """Returns the torch dtype for a JAX dtype.

    Raises:
        KeyError: A dtype without a torch counterpart, such as int4.
    """
    return _JAX_TO_TORCH[np.dtype(dtype)]


def is_bool(dtype: DType) -> bool:
    return dtype == np.bool_


def is_integer(dtype: DType) -> bool:
    """True for signed and unsigned integers; False for bool."""
    return bool(jnp.issubdtype(dtype, jnp.integer))


def is_float(dtype: DType) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating))


def is_complex(dtype: DType) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.complexfloating))


def is_inexact(dtype: DType) -> bool:
    """True for floats and complex numbers."""
    return bool(jnp.issubdtype(dtype, jnp.inexact))


def accumulator(dtype: DType) -> DType:
    """Returns the dtype in which ATen computes and accumulates: float32 for narrower floats, the dtype itself otherwise."""
    if is_float(dtype) and np.dtype(dtype).itemsize < 4:
        return np.dtype(np.float32)
    return np.dtype(dtype)


def widen_integers(dtype: DType) -> DType:
    """Returns int64 for bool and integers (the dtype of ATen's sums and products), the dtype itself otherwise."""
    return dtype if is_inexact(dtype) else np.dtype("int64")


def real(dtype: DType) -> DType:
    """Returns the dtype of the real part of numbers of a dtype; the dtype itself if it is not complex."""
    real_dtypes: dict[DType, DType] = {np.dtype("complex64"): np.dtype("float32"), np.dtype("complex128"): np.dtype("float64")}
    return real_dtypes.get(np.dtype(dtype), np.dtype(dtype))


_thread = threading.local()  # `defaulting_to` sets its attribute `default`


@contextlib.contextmanager
def defaulting_to(dtype: torch.dtype) -> Iterator[None]:
    """Sets the result of `default()` in this thread while the context is open.

    Args:
        dtype: Torch's default dtype when the graph was specialized.
    """
    outer = getattr(_thread, "default", None)
    _thread.default = dtype
    try:
        yield
    finally:
        _thread.default = outer


def default() -> torch.dtype:
    """Returns the dtype that `defaulting_to` set in this thread, else `torch.get_default_dtype()`."""
    return getattr(_thread, "default", None) or torch.get_default_dtype()


def default_float() -> DType:
    """Returns the dtype to which ATen converts integers for ops on floats, such as sin: torch's default dtype."""
    return to_jax(default())


def describe(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    """Returns a dtype and a shape as text for messages, with JAX's abbreviations of dtypes: `f32[8, 1024]`."""
    name = str(dtype).removeprefix("torch.")
    for long, short in (("uint", "u"), ("int", "i"), ("complex", "c"), ("float", "f")):
        if name.startswith(long) and name not in _SHORT_NAMES:
            name = name.replace(long, short, 1)
            break
    return f"{_SHORT_NAMES.get(name, name)}[{', '.join(map(str, shape))}]"
