"""Empty template tensors: one for each device "jax:0", "jax:1", ..., and each dtype. All other tensors of the device are made from them.

torch's Python function for this purpose (`create_empty_tensor`) takes no device index: its tensors are on "jax:0". So templates are created
through DLPack, which has a device index.
"""

from __future__ import annotations

import ctypes
import functools

import torch

from ..runtime import private

# Source: dlpack.h, kDLExtDev and kDLUInt
_SPARE_DEVICE, _UNSIGNED = 12, 1


class _ManagedTensor(ctypes.Structure):
    """DLPack's struct DLManagedTensor, with its nested structs flattened. Source: dlpack.h"""

    _fields_ = [
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32), ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16), ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p), ("byte_offset", ctypes.c_uint64), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p),
    ]  # fmt: skip


_shape, _strides = (ctypes.c_int64 * 1)(0), (ctypes.c_int64 * 1)(1)
_alive: list[_ManagedTensor] = []  # torch keeps pointers to these structs


@functools.cache
def empty_template(dtype: torch.dtype, index: int) -> torch.Tensor:
    """Returns a tensor without elements on the device "jax:`index`". The tensor is cached, so the caller must not change it."""
    if dtype != torch.uint8:
        return private.call_cpu_kernel(torch.ops.aten.view.dtype, empty_template(torch.uint8, index), dtype)
    managed = _ManagedTensor(
        None, _SPARE_DEVICE, index, 1, _UNSIGNED, 8, 1, ctypes.addressof(_shape), ctypes.addressof(_strides), 0, None, None
    )
    _alive.append(managed)
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return torch.from_dlpack(capsule(ctypes.addressof(managed), b"dltensor", None))
