"""Checks of tensors' metadata and of dicts, in C++ if torch provides it; and guards on state that TorchDynamo itself does not guard."""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import CodeType
from typing import Any, TypeVar

import torch
from torch._dynamo import source as _source
from torch._dynamo.guards import GuardBuilder, GuardManagerType, install_guard
from torch._guards import TracingContext

from .private import Fast

# A getter: a function without arguments, given as a module's name and the attribute path in it: ("torch", ("cuda", "current_device")).
Getter = tuple[str, tuple[str, ...]]
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


class ArgumentCheck:
    """Checks that tensors have the same types, dtypes, devices, shapes, strides, and conjugate and negative bits as some example tensors.

    The check keeps no reference to the examples.

    Args:
        tensors: The example tensors.

    Attributes:
        matches: Called with the tensors to check, one argument each; returns true if they match the examples.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.matches: Callable[..., bool]
        if Fast.guards is not None and tensors:
            sizes, strides = [list(tensor.shape) for tensor in tensors], [list(tensor.stride()) for tensor in tensors]
            self.matches = Fast.guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
        else:
            metadata = [_metadata(tensor) for tensor in tensors]
            self.matches = lambda *others: all(_metadata(other) == expected for other, expected in zip(others, metadata, strict=True))


class DictCheck:
    """Checks that dicts are unchanged since construction, by the version number that CPython or torch keeps for each dict.

    If neither keeps version numbers, the dicts always count as changed.
    """

    def __init__(self, dicts: Sequence[dict[Any, Any]]) -> None:
        self._dicts = list(dicts)
        self._tree = None
        if Fast.guard_tree is not None:
            self._tree = Fast.guard_tree()
            for index, checked in enumerate(self._dicts):
                item = self._tree.list_getitem_manager(index, "", checked, GuardManagerType.GUARD_MANAGER)
                item.add_dict_version_guard(checked, [""], None)

    def are_unchanged(self) -> bool:
        """True if no entry was added, removed or replaced. False if one was, or if that is unknown."""
        return self._tree is not None and bool(self._tree.check(self._dicts))


def _metadata(tensor: torch.Tensor) -> tuple[Any, ...]:
    flags = tensor.is_conj(), tensor.is_neg(), tensor.is_inference()
    return (type(tensor), tensor.dtype, tensor.device, tensor.shape, tensor.stride(), *flags)


# True if guards of this version of torch can compare the result of a function (see `guard_on_result`).
CAN_GUARD_RESULTS = all(hasattr(_source, name) for name in ("AttrSource", "CallFunctionNoArgsSource", "ImportSource"))


# dynaxla's code that runs during the user's functions. Observations of effects (guards/observation.py) ignore this code, and its callees.
unobserved_code: set[CodeType] = set()
# Classes whose `__call__` calls `guard_on_result` for all global state that it reads.
self_guarding: set[type] = set()


def is_not_observed(function: F) -> F:
    """Decorator: adds a function's code to `unobserved_code`; not the code of its wrappers, which other functions may share."""
    unobserved_code.add(inspect.unwrap(function).__code__)
    return function


def guards_its_state(cls: type[T]) -> type[T]:
    """Decorator: adds a class to `self_guarding`, and the code of its `__call__` to `unobserved_code`."""
    self_guarding.add(cls)
    is_not_observed(cls.__call__)
    return cls


class _Collection(threading.local):
    """The getters with which this thread has called `guard_on_result`; None outside of `collected_getters`."""

    getters: set[Getter] | None = None


_collection = _Collection()


@contextlib.contextmanager
def collected_getters() -> Iterator[set[Getter]]:
    """Collects the getters with which this thread calls `guard_on_result` inside the context: a capture depends on their results."""
    before, _collection.getters = _collection.getters, set()
    try:
        yield _collection.getters
    finally:
        _collection.getters = before


def call_getter(getter: Getter) -> Any:
    """Calls a getter and returns its result."""
    module, attributes = getter
    value: Any = sys.modules[module]
    for name in attributes:
        value = getattr(value, name)
    return value()


def guard_on_result(module: str, attributes: Sequence[str]) -> None:
    """Adds a guard on the result of a getter to TorchDynamo's current capture. TorchDynamo captures again if the result changes.

    Inside `collected_getters` the getter is collected, too. Without a capture and outside of `collected_getters`, the call has no effect.
    Requires CAN_GUARD_RESULTS.

    Args:
        module: The name of the getter's module.
        attributes: The attribute path to the getter.
    """
    if _collection.getters is not None:
        _collection.getters.add((module, tuple(attributes)))
    if TracingContext.try_get() is not None:
        source: Any = _source.ImportSource(module)
        for name in attributes:
            source = _source.AttrSource(source, name)
        install_guard(_source.CallFunctionNoArgsSource(source).make_guard(GuardBuilder.EQUALS_MATCH))


def guard_current_gpu() -> None:
    """Adds a guard on torch's current GPU to TorchDynamo's current capture, since TorchDynamo does not guard on it.

    The call has no effect without a capture, or if CAN_GUARD_RESULTS is false.
    """
    if CAN_GUARD_RESULTS:
        guard_on_result("torch", ("cuda", "current_device"))
