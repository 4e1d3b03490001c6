"""Methods of torch.UntypedStorage for storages on the device, in place of C++ methods that would read memory that does not exist."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ..runtime import private
from . import pjrt_devices, storages


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """Returns a uint8 tensor of all bytes of a storage."""
    if storage.device.type == storages.NAME:
        return storages.tensor_on(storage, (storage.nbytes(),), (1,), 0, torch.uint8)
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _data_ptr(storage: torch.UntypedStorage) -> int:
    """Returns a number that identifies a storage. torch.save and other code identify storages by their addresses, which do not exist here.

    `Tensor.data_ptr` raises an error.
    """
    return private.id_of_storage(storage)


def _copy(storage: torch.UntypedStorage, source: torch.UntypedStorage, non_blocking: bool = False) -> torch.UntypedStorage:
    if storage.nbytes() != source.nbytes():
        raise RuntimeError(f"size does not match, self was {storage.nbytes()} bytes but src was {source.nbytes()} bytes")
    with torch.no_grad():
        _bytes(storage).copy_(_bytes(source))
    return storage


def _get(storage: torch.UntypedStorage, index: Any) -> int:
    if not isinstance(index, int):
        raise RuntimeError(f"a storage on {storage.device} can be indexed only by one integer, not by {index!r}: use a tensor")
    return int(_bytes(storage)[index])


def _set(storage: torch.UntypedStorage, index: Any, value: int) -> None:
    with torch.no_grad():
        _bytes(storage)[index] = value


def _fill(storage: torch.UntypedStorage, value: int) -> torch.UntypedStorage:
    with torch.no_grad():
        _bytes(storage).fill_(value)
    return storage


def _write_file(storage: torch.UntypedStorage, file: Any, is_real_file: bool, save_size: bool, element_size: int) -> None:
    private.write_storage(_bytes(storage).cpu().untyped_storage(), file, is_real_file, save_size, element_size)


def _set_from_file(storage: torch.UntypedStorage, file: Any, offset: Any, is_real_file: bool, element_size: int) -> torch.UntypedStorage:
    host = torch.UntypedStorage(storage.nbytes())
    private.read_storage(host, file, offset, is_real_file, element_size)
    return _copy(storage, host)


# Replacements of methods of torch.UntypedStorage.
_STORAGE_METHODS: dict[str, Callable[..., Any]] = {
    "data_ptr": _data_ptr,
    "copy_": _copy,
    "new": lambda storage: storages.make_storage(0, storage.device),
    "clone": lambda storage: storages.make_storage(storage.nbytes(), storage.device, storages.array_of(storage)),
    "tolist": lambda storage: _bytes(storage).tolist(),
    "__getitem__": _get,
    "__setitem__": _set,
    "fill_": _fill,
    "_write_file": _write_file,
    "_set_from_file": _set_from_file,
    "is_shared": lambda storage: False,
}
# Methods that would access or resize a storage's memory, or share it with another process.
_UNSUPPORTED = (
    "_share_fd_cpu_", "_share_filename_cpu_", "_share_cuda_", "_byteswap", "byteswap", "resize_",
    "_swap_data_ptr_", "share_memory_", "_shared_incref", "_shared_decref", "pin_memory", "_weak_ref_for_ipc",
)  # fmt: skip


def _unsupported(name: str) -> Callable[..., Any]:
    """Returns a method that raises RuntimeError."""

    def refuse(storage: torch.UntypedStorage, *_: Any, **__: Any) -> Any:
        raise RuntimeError(
            f"UntypedStorage.{name}: a storage on {storage.device} is a jax.Array, whose memory torch cannot access or share; copy the "
            "tensor to the CPU first (.cpu())"
        )

    return refuse


def _dispatching(method: Any, replacement: Callable[..., Any]) -> Any:
    """Returns a method that calls `replacement` if `self` or a storage among the positional arguments is on the device, else `method`."""

    @functools.wraps(method)
    def choose(self: torch.UntypedStorage | torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        operands = (self, *(value for value in args if isinstance(value, torch.UntypedStorage)))
        if any(storage.device.type == storages.NAME for storage in operands):
            return replacement(self, *args, **kwargs)
        return method(self, *args, **kwargs)

    return choose


def _no_address(tensor: torch.Tensor) -> int:
    raise RuntimeError(f"a tensor on {tensor.device} has no address: copy it to the CPU first (.cpu())")


# Replacements of methods of torch.Tensor. Other methods that return an address raise because of `private.refuse_address`.
_TENSOR_METHODS: dict[str, Callable[..., Any]] = {"const_data_ptr": _no_address}


def install() -> None:
    """Patches methods of storages and tensors for the device, and makes `torch.UntypedStorage(n, device="jax")` work."""
    for name, replacement in _TENSOR_METHODS.items():
        if (method := getattr(torch.Tensor, name, None)) is not None:
            setattr(torch.Tensor, name, _dispatching(method, replacement))
    for name, replacement in {**_STORAGE_METHODS, **{name: _unsupported(name) for name in _UNSUPPORTED}}.items():
        if (method := getattr(torch.UntypedStorage, name, None)) is not None:
            setattr(torch.UntypedStorage, name, _dispatching(method, replacement))
    make = torch.UntypedStorage.__new__

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is None or torch.device(device).type != storages.NAME:
            return make(cls, *args, **kwargs)
        if len(args) > 1 or (args and not isinstance(args[0], int)) or set(kwargs) - {"device", "size"}:
            raise NotImplementedError("a storage on the device jax is created from a size: torch.UntypedStorage(size, device=...)")
        size = args[0] if args else kwargs.get("size", 0)
        return storages.make_storage(size, pjrt_devices.with_index(torch.device(device)))

    torch.UntypedStorage.__new__ = new
