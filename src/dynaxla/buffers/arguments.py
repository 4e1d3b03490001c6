"""Imports a call's torch tensors as the arrays that an executable reads.

An alias is a jax.Array on a tensor's memory that does not own the memory. It is valid for as long as a live tensor of the same shape,
strides, dtype and device has the same `data_ptr()`, whichever tensor object that is. Both are checked at every call, so nothing is kept
alive, and an in-place update of a parameter is visible because there is no second copy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from ..capture.graph import is_device_agnostic
from ..errors import DynaxlaError, UnsupportedTensor
from ..observe import events, metrics
from ..runtime import guards, private, transfer
from ..runtime.layout import Layout, row_major
from .addresses import import_alias, is_aligned

_data_ptr = torch.Tensor.data_ptr


@dataclass(frozen=True)
class Parameter:
    """One parameter of the executable.

    Attributes:
        shape, stride, dtype: The tensor's.
        layout: The layout of its distinct elements.
        static: The tensor is a module's parameter or buffer, whose address hardly ever changes.
        as_laid_out: The array has the tensor's own shape and strides, for which the program was compiled; otherwise it is packed.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout
    static: bool
    as_laid_out: bool = False

    @property
    def array(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shape of the array, and the strides with which it reads a tensor's memory."""
        if self.as_laid_out:
            return self.shape, self.layout.strides
        return self.layout.packed_shape, row_major(self.layout.packed_shape)


class _Kept(NamedTuple):
    """The last call's addresses, and the aliases among its arrays. Replaced as a whole, never mutated, because calls may run concurrently.

    Attributes:
        matches: Returns true for tensors with the metadata of that call's.
        pointers: The tensors' addresses.
        arrays: The aliases; None where there is none.
        missing: The indices of the arrays that are no aliases.
        copied: By tensor, True if it does not match the executable's parameter and is copied at each call.
    """

    matches: Callable[..., bool]
    pointers: list[int]
    arrays: list[jax.Array | None]
    missing: list[int]
    copied: list[bool]


class Arguments:
    """Imports the tensors of one executable's calls. Thread-safe.

    On a GPU, neither the arrays nor the copies made here are ordered after torch's work by themselves; see runtime/streams.py.
    """

    def __init__(self, parameters: Sequence[Parameter], torch_device: torch.device, device: jax.Device) -> None:
        self.parameters = list(parameters)
        self._torch_device = torch_device
        self._device = device
        self._kept: _Kept | None = None

    def arrays(self, tensors: Sequence[torch.Tensor]) -> Sequence[jax.Array]:
        """Returns one row-major array per tensor, in the layout for which the executable was compiled.

        Raises:
            DynaxlaError: A tensor has another shape or dtype than the executable's parameter, or is not expanded where that one is.
        """
        if not tensors:
            return ()
        kept = self._kept
        if kept is None or not kept.matches(*tensors):
            return self._import_all(tensors)
        pointers, before = list(map(_data_ptr, tensors)), kept.pointers
        wanted, changed = kept.missing, pointers != before
        if changed:
            expected = before.copy()
            for index in wanted:
                expected[index] = pointers[index]
            if expected != pointers:  # the tensor of an alias has another address
                wanted = [index for index, array in enumerate(kept.arrays) if array is None or pointers[index] != before[index]]
        elif not wanted:
            return kept.arrays
        arrays = kept.arrays.copy()
        aliases, missing = kept.arrays, []
        for index in wanted:
            if kept.copied[index]:
                arrays[index], alias = self._import(index, self._prepare(index, tensors[index]), False, True)
            else:
                arrays[index], alias = self._import(index, tensors[index], pointers[index] == before[index])
            if alias is None:
                missing.append(index)
            if alias is not aliases[index]:
                aliases = aliases.copy() if aliases is kept.arrays else aliases
                aliases[index] = alias
        if changed or aliases is not kept.arrays:
            self._kept = _Kept(kept.matches, pointers, aliases, missing, kept.copied)
        return arrays

    def _import_all(self, tensors: Sequence[torch.Tensor]) -> Sequence[jax.Array]:
        prepared = [self._prepare(index, tensor) for index, tensor in enumerate(tensors)]
        copied = [mine is not theirs for mine, theirs in zip(prepared, tensors, strict=True)]
        # During a first call AOTAutograd has a dispatch mode active, whose handling of each op would take longer than the op itself.
        with _disable_current_modes() if private.mode_count() else contextlib.nullcontext():
            imported = [self._import(index, tensor, False, copied[index]) for index, tensor in enumerate(prepared)]
        aliases = [alias for _, alias in imported]
        missing = [index for index, alias in enumerate(aliases) if alias is None]
        self._kept = _Kept(guards.ArgumentCheck(tensors).matches, list(map(_data_ptr, tensors)), aliases, missing, copied)
        return [array for array, _ in imported]

    def _prepare(self, index: int, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the tensor itself if it matches the executable's parameter, otherwise a copy that does."""
        parameter = self.parameters[index]
        expanded = [dim for dim, step in enumerate(parameter.stride) if step == 0 and parameter.shape[dim] > 1]
        if isinstance(tensor, FakeTensor):
            raise UnsupportedTensor(
                f"a program compiled for real tensors was called with a fake tensor as input {index}",
                hint="compile the function under the same FakeTensorMode",
            )
        same = tensor.shape == parameter.shape and tensor.dtype == parameter.dtype
        if not same or any(tensor.stride(dim) for dim in expanded):
            raise DynaxlaError(
                f"a program compiled for {parameter.dtype}{list(parameter.shape)} with strides {list(parameter.stride)} "
                f"was called with {tensor.dtype}{list(tensor.shape)} with strides {list(tensor.stride())} as input {index}",
                hint="call it through torch.compile, whose guards compile the function again",
            )
        if tensor.device != self._torch_device:
            if not is_device_agnostic(tensor):
                raise DynaxlaError(
                    f"a program compiled for {self._torch_device} was called with a tensor on {tensor.device} as input {index}",
                    hint="call it through torch.compile, whose guards compile the function again",
                )
            _note_copy(index, tensor, f"it is on {tensor.device}, and the program on {self._torch_device}")
            tensor = tensor.to(self._torch_device)
        if tensor.is_conj() or tensor.is_neg():
            _note_copy(index, tensor, "it has the conjugate or the negative bit, and its memory holds other values")
            tensor = tensor.detach().resolve_conj().resolve_neg()
        if tensor.stride() != parameter.stride and Layout.of(tuple(tensor.shape), tensor.stride()) != parameter.layout:
            _note_copy(index, tensor, f"its strides are {tuple(tensor.stride())}, and the program was compiled for {parameter.stride}")
            exact = torch.empty(parameter.layout.packed_shape, dtype=tensor.dtype, device=tensor.device)
            view = tensor.detach().permute(parameter.layout.permutation)
            for dim, size in enumerate(parameter.layout.packed_shape):
                view = view.narrow(dim, 0, size)
            exact.copy_(view)
            tensor = torch.as_strided(exact, parameter.shape, parameter.layout.strides)
        return tensor

    def _import(self, index: int, tensor: torch.Tensor, seen_before: bool, copied: bool = False) -> tuple[jax.Array, jax.Array | None]:
        """Returns the array for this call, and the same array if it may be kept for the next call, else None.

        Args:
            seen_before: The tensor has the same address as at the last call.
            copied: The tensor is a copy for this call, whose memory nothing else keeps alive.
        """
        parameter = self.parameters[index]
        layout = parameter.layout
        if layout.dense and is_aligned(tensor):
            if not copied and (parameter.static or seen_before):
                metrics.add("aliases")
                alias = import_alias(tensor, *parameter.array, self._device)
                return alias, alias
            metrics.add("imports")
            packed = tensor if layout.is_row_major else transfer.reinterpret(tensor, *parameter.array)
            return transfer.import_tensor(packed, self._device), None
        gaps = f"its strides {tuple(tensor.stride())} leave gaps or overlap, and a program reads only dense memory"
        _note_copy(index, tensor, f"its memory is not aligned to {transfer.ALIGNMENT} bytes" if layout.dense else gaps)
        packed = layout.pack_tensor(tensor)
        if packed.data_ptr() == tensor.data_ptr() or not is_aligned(packed):
            packed = packed.clone()
        if parameter.as_laid_out:
            packed = transfer.reinterpret(packed, *parameter.array)
        return transfer.import_tensor(packed, self._device), None


def _note_copy(index: int, tensor: torch.Tensor, reason: str) -> None:
    metrics.add("input_copies")
    if events.has_listeners():
        events.emit(events.InputCopied(index, reason, tensor.numel() * tensor.element_size()))
