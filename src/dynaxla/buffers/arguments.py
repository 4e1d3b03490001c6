"""Imports a call's torch tensors as the arrays that an executable reads.

An *alias* is a jax.Array that shares a tensor's memory without owning it. A later call may use the alias again if the call's tensor has the
same metadata (shape, strides, dtype, device) and the same `data_ptr()`, even if it is another tensor object. Every call compares metadata
and addresses, so an alias need not keep the memory alive. Through an alias, a program sees in-place updates of a parameter.
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
class ExpectedInput:
    """An input of the executable, as the executable was compiled for it.

    Attributes:
        shape, stride, dtype: The shape, strides and dtype of the tensor for which the program was compiled.
        layout: The memory order of that tensor.
        static: True if the tensor is a module's parameter or buffer, whose address hardly ever changes.
        is_unpacked: True if the program takes an array with the tensor's own shape and strides. False if it takes the packed array, as
            `Layout` describes it.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout
    static: bool
    is_unpacked: bool = False

    @property
    def array_shape_and_strides(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shape of the array, and the strides with which it reads a tensor's memory."""
        if self.is_unpacked:
            return self.shape, self.layout.strides
        return self.layout.packed_shape, row_major(self.layout.packed_shape)


class _LastCall(NamedTuple):
    """The addresses and aliases of the last call. The tuple is replaced as a whole, never mutated, because calls may run concurrently.

    Attributes:
        matches: Called with the tensors of a new call; returns true if they have the metadata of the last call's tensors.
        pointers: The address of each tensor.
        aliases: The alias of each tensor; None for a tensor that must be imported at each call.
        unaliased: The indices of the tensors without an alias.
        copied: For each tensor, True if `_prepare` copies it at each call, because it does not match the executable's input.
    """

    matches: Callable[..., bool]
    pointers: list[int]
    aliases: list[jax.Array | None]
    unaliased: list[int]
    copied: list[bool]


class Arguments:
    """Imports the tensors of one executable's calls. Thread-safe.

    On a GPU, the returned arrays do not make a program wait for torch's work on their memory, such as the copies that this class makes. The
    caller must do that (runtime/streams.py).
    """

    def __init__(self, parameters: Sequence[ExpectedInput], torch_device: torch.device, device: jax.Device) -> None:
        self.parameters = list(parameters)
        self._torch_device = torch_device
        self._device = device
        self._last_call: _LastCall | None = None

    def arrays(self, tensors: Sequence[torch.Tensor]) -> Sequence[jax.Array]:
        """Returns one array per tensor, in the layout for which the executable was compiled.

        Raises:
            DynaxlaError: A tensor has another shape or dtype than the executable's input. Or it is on another device, and is not one of
                the small CPU tensors that are copied (`is_device_agnostic`). Or the executable's input is expanded (stride 0) in a
                dimension in which the tensor is not.
            UnsupportedTensor: A tensor is a fake tensor.
        """
        if not tensors:
            return ()
        last = self._last_call
        if last is None or not last.matches(*tensors):
            return self._import_all(tensors)
        pointers, last_pointers = list(map(_data_ptr, tensors)), last.pointers
        to_import, have_moved = last.unaliased, pointers != last_pointers
        if have_moved:  # a new address of a tensor without an alias does not matter, since each call imports the tensor
            last_pointers_of_aliases = last_pointers.copy()
            for index in to_import:
                last_pointers_of_aliases[index] = pointers[index]
            if last_pointers_of_aliases != pointers:  # a tensor with an alias has another address
                to_import = [index for index, alias in enumerate(last.aliases) if alias is None or pointers[index] != last_pointers[index]]
        elif not to_import:
            return last.aliases
        arrays = last.aliases.copy()
        aliases, unaliased = last.aliases, []
        for index in to_import:
            if last.copied[index]:
                arrays[index], alias = self._import(index, self._prepare(index, tensors[index]), False, True)
            else:
                arrays[index], alias = self._import(index, tensors[index], pointers[index] == last_pointers[index])
            if alias is None:
                unaliased.append(index)
            if alias is not aliases[index]:
                aliases = aliases.copy() if aliases is last.aliases else aliases
                aliases[index] = alias
        if have_moved or aliases is not last.aliases:
            self._last_call = _LastCall(last.matches, pointers, aliases, unaliased, last.copied)
        return arrays

    def _import_all(self, tensors: Sequence[torch.Tensor]) -> Sequence[jax.Array]:
        prepared = [self._prepare(index, tensor) for index, tensor in enumerate(tensors)]
        copied = [imported is not tensor for imported, tensor in zip(prepared, tensors, strict=True)]
        # During a first call, AOTAutograd's dispatch modes are active. They would slow down every op below.
        with _disable_current_modes() if private.mode_count() else contextlib.nullcontext():
            imported = [self._import(index, tensor, False, copied[index]) for index, tensor in enumerate(prepared)]
        aliases = [alias for _, alias in imported]
        unaliased = [index for index, alias in enumerate(aliases) if alias is None]
        self._last_call = _LastCall(guards.ArgumentCheck(tensors).matches, list(map(_data_ptr, tensors)), aliases, unaliased, copied)
        return [array for array, _ in imported]

    def _prepare(self, index: int, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the tensor itself if it matches the executable's input at this index, else a copy that matches. Raises: see `arrays`."""
        parameter = self.parameters[index]
        expanded = [dim for dim, step in enumerate(parameter.stride) if step == 0 and parameter.shape[dim] > 1]
        if isinstance(tensor, FakeTensor):
            raise UnsupportedTensor(
                f"a program compiled for real tensors was called with a fake tensor as input {index}",
                hint="compile the function under the same FakeTensorMode",
            )
        has_same_type = tensor.shape == parameter.shape and tensor.dtype == parameter.dtype
        if not has_same_type or any(tensor.stride(dim) for dim in expanded):
            raise DynaxlaError(
                f"a program compiled for {parameter.dtype}{list(parameter.shape)} with strides {list(parameter.stride)} "
                f"was called with {tensor.dtype}{list(tensor.shape)} with strides {list(tensor.stride())} as input {index}",
                hint="call the function through torch.compile, which compiles it again for such inputs",
            )
        if tensor.device != self._torch_device:
            if not is_device_agnostic(tensor):
                raise DynaxlaError(
                    f"a program compiled for {self._torch_device} was called with a tensor on {tensor.device} as input {index}",
                    hint="call the function through torch.compile, which compiles it again for such inputs",
                )
            _report_copy(index, tensor, f"it is on {tensor.device}, and the program runs on {self._torch_device}")
            tensor = tensor.to(self._torch_device)
        if tensor.is_conj() or tensor.is_neg():
            _report_copy(index, tensor, "it has the conjugate or the negative bit, so its memory does not hold its values")
            tensor = tensor.detach().resolve_conj().resolve_neg()
        if tensor.stride() != parameter.stride and Layout.of(tuple(tensor.shape), tensor.stride()) != parameter.layout:
            _report_copy(index, tensor, f"its strides are {tuple(tensor.stride())}, and the program was compiled for {parameter.stride}")
            dense = torch.empty(parameter.layout.packed_shape, dtype=tensor.dtype, device=tensor.device)
            view = tensor.detach().permute(parameter.layout.permutation)
            for dim, size in enumerate(parameter.layout.packed_shape):
                view = view.narrow(dim, 0, size)
            dense.copy_(view)
            tensor = torch.as_strided(dense, parameter.shape, parameter.layout.strides)
        return tensor

    def _import(self, index: int, tensor: torch.Tensor, seen_before: bool, copied: bool = False) -> tuple[jax.Array, jax.Array | None]:
        """Returns the array for this call, and the alias that later calls may use (the same array), or None if there is no alias.

        Args:
            index: The index of the parameter.
            tensor: The tensor, as `_prepare` returns it.
            seen_before: True if the tensor has the same address as at the last call.
            copied: True if the tensor is a copy that was made for this call. It gets no alias, which would not keep the copy alive.
        """
        parameter = self.parameters[index]
        layout = parameter.layout
        if layout.dense and is_aligned(tensor):
            if not copied and (parameter.static or seen_before):
                metrics.add("aliases")
                alias = import_alias(tensor, *parameter.array_shape_and_strides, self._device)
                return alias, alias
            metrics.add("imports")
            packed = tensor if layout.is_row_major else transfer.reinterpret(tensor, *parameter.array_shape_and_strides)
            return transfer.import_tensor(packed, self._device), None
        gaps = f"its strides {tuple(tensor.stride())} leave gaps or overlap, and a program reads only dense memory"
        _report_copy(index, tensor, f"its memory is not aligned to {transfer.ALIGNMENT} bytes" if layout.dense else gaps)
        packed = layout.pack_tensor(tensor)
        if packed.data_ptr() == tensor.data_ptr() or not is_aligned(packed):
            packed = packed.clone()
        if parameter.is_unpacked:
            packed = transfer.reinterpret(packed, *parameter.array_shape_and_strides)
        return transfer.import_tensor(packed, self._device), None


def _report_copy(index: int, tensor: torch.Tensor, reason: str) -> None:
    """Counts the copy of an argument, and emits `InputCopied`."""
    metrics.add("input_copies")
    if events.has_listeners():
        events.emit(events.InputCopied(index, reason, tensor.numel() * tensor.element_size()))
