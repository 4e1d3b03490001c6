"""A call of an op as source text with tensors as arguments, so that TorchDynamo compiles the code that a user would write."""

from __future__ import annotations

import copy
import itertools
import linecache
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

_numbers = itertools.count()
_PATH = "<conformance"
_DTYPE = re.compile(r"\btorch\.(bfloat16|float16|float32|complex32|complex64)\b")
_PLAIN = (int, bool, str, type(None), type(Ellipsis), slice, torch.dtype, torch.memory_format, torch.layout)


@dataclass
class Call:
    """`function(*args, **kwargs)`, with the tensors separate.

    Attributes:
        text: The call, with t0, t1, ... for tensors, and c0, c1, ... for other values that cannot be written as literals.
        tensors: The values of t0, t1, ...
        constants: The values of c0, c1, ...
    """

    function: Callable[..., Any]
    text: str
    tensors: list[torch.Tensor]
    constants: list[Any]

    @staticmethod
    def of(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        writer = _Writer()
        parts = [writer.write(arg) for arg in args] + [f"{name}={writer.write(value)}" for name, value in kwargs.items()]
        return Call(function, f"op({', '.join(parts)})", writer.tensors, writer.constants)

    def python_function(self) -> Callable[..., Any]:
        """Returns a new function that takes the tensors."""
        scope: dict[str, Any] = {"op": self.function, "torch": torch, "inf": math.inf, "nan": math.nan}
        scope |= {f"c{index}": value for index, value in enumerate(self.constants)}
        return _function(len(self.tensors), self.text, scope)

    @property
    def key(self) -> tuple[Any, ...] | None:
        """A key that is equal for calls that one compiled function can run; None if this is unknown."""
        if self.constants:
            return None
        positions: dict[int, int] = {}
        metadata = []
        for tensor in self.tensors:
            if tensor.layout is not torch.strided or type(tensor) is not torch.Tensor:
                return None
            storage = positions.setdefault(tensor.untyped_storage()._cdata, len(positions))
            bits = (tensor.requires_grad, tensor.is_conj(), tensor.is_neg(), tensor._is_view())
            metadata.append((tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype, storage, bits))
        return (self.text, *metadata)

    def widened(self) -> Call:
        """Returns the call with wider dtypes in its text. The tensors are the same."""
        return Call(self.function, _DTYPE.sub(lambda match: repr(_wide(getattr(torch, match[1]))), self.text), self.tensors, self.constants)

    def describe(self) -> str:
        """Returns the call, and its tensors written as f32[2, 3]."""
        shapes = [f"t{index}: {describe(tensor)}" for index, tensor in enumerate(self.tensors)]
        constants = [f"c{index}: {value!r}"[:80] for index, value in enumerate(self.constants)]
        return "; ".join([self.text, *shapes, *constants])


def joined(calls: Sequence[Call]) -> Callable[..., Any]:
    """Returns a function that takes the tensors of all calls, in order, and returns the results of the calls."""
    numbers = itertools.count()
    texts = [f"f{index}({', '.join(f't{next(numbers)}' for _ in call.tensors)}), " for index, call in enumerate(calls)]
    scope = {f"f{index}": call.python_function() for index, call in enumerate(calls)}
    return _function(next(numbers), f"({''.join(texts)})", scope)


def _function(tensors: int, text: str, scope: dict[str, Any]) -> Callable[..., Any]:
    """Returns a function with a file of its own, because TorchDynamo records changed sizes by file and line."""
    source = f"def call({', '.join(f't{index}' for index in range(tensors))}):\n    return {text}\n"
    path = f"{_PATH} {next(_numbers)}>"
    linecache.cache[path] = (len(source), None, source.splitlines(keepends=True), path)
    exec(compile(source, path, "exec"), scope)
    return scope["call"]


def forget_sources() -> None:
    for path in [path for path in linecache.cache if path.startswith(_PATH)]:
        del linecache.cache[path]


def describe(tensor: torch.Tensor) -> str:
    text = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
    if tensor.layout is not torch.strided:
        return f"{text} {tensor.layout}"
    return text if tensor.is_contiguous() else f"{text} strides {tensor.stride()}"


@dataclass
class _Writer:
    tensors: list[torch.Tensor] = field(default_factory=list)
    constants: list[Any] = field(default_factory=list)

    def write(self, value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return f"t{self._index(self.tensors, value)}"
        if type(value) is list:
            return f"[{', '.join(map(self.write, value))}]"
        if type(value) is tuple:
            return f"({''.join(f'{self.write(item)}, ' for item in value)})"
        if type(value) is dict and all(isinstance(name, str) for name in value):
            return f"{{{', '.join(f'{name!r}: {self.write(item)}' for name, item in value.items())}}}"
        if type(value) in _PLAIN or isinstance(value, (torch.dtype, torch.memory_format, torch.layout)) or type(value) in (float, complex):
            return repr(value)
        if isinstance(value, torch.Size):
            return repr(tuple(value))
        return f"c{self._index(self.constants, value)}"

    @staticmethod
    def _index(values: list[Any], value: Any) -> int:
        for index, other in enumerate(values):
            if other is value:
                return index
        values.append(value)
        return len(values) - 1


def copy_tensors(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns copies that share storages as the originals do, with the same strides, offsets, bits and requires_grad."""
    storages: dict[int, torch.UntypedStorage] = {}
    copies = []
    for tensor in tensors:
        if tensor.layout is not torch.strided or type(tensor) is not torch.Tensor or tensor.device.type != "cpu":
            copied = copy.deepcopy(tensor) if tensor.layout is torch.strided else tensor.detach().clone()
            copies.append(copied.requires_grad_(tensor.requires_grad))
            continue
        storage = tensor.untyped_storage()
        if storage._cdata not in storages:
            storages[storage._cdata] = storage.clone()
        copied_view = torch.empty(0, dtype=tensor.dtype).set_(
            storages[storage._cdata], tensor.storage_offset(), tensor.shape, tensor.stride()
        )
        copied_view = torch._conj(copied_view) if tensor.is_conj() else copied_view
        copied_view = torch._neg_view(copied_view) if tensor.is_neg() else copied_view
        copies.append(copied_view.requires_grad_(tensor.requires_grad))
    return copies


def widened(value: Any) -> Any:
    """Returns a tensor as float64 or complex128, and the same for dtypes. Other dtypes stay. A tensor is always copied."""
    if isinstance(value, torch.Tensor):
        return value.detach().to(_wide(value.dtype), copy=True).requires_grad_(value.requires_grad)
    return _wide(value) if isinstance(value, torch.dtype) else value


def _wide(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else dtype
