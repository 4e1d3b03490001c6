"""Checks that tensors and dicts are unchanged, in C code if torch provides it; and guards that TorchDynamo itself does not install."""

from __future__ import annotations

import contextlib
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

# A function without arguments: the name of its module, and the attribute path to it.
Question = tuple[str, tuple[str, ...]]
T = TypeVar("T")


class ArgumentCheck:
    """Checks that tensors have the types, dtypes, devices, shapes, strides and flags (conjugate, negative) of those at construction.

    It holds no reference to the tensors.

    Attributes:
        matches: Called with tensors; returns true if they match.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.matches: Callable[..., bool]
        if Fast.guards is not None and tensors:
            sizes, strides = [list(tensor.shape) for tensor in tensors], [list(tensor.stride()) for tensor in tensors]
            self.matches = Fast.guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
        else:
            facts = [_facts(tensor) for tensor in tensors]
            self.matches = lambda *others: all(_facts(other) == fact for other, fact in zip(others, facts, strict=True))


class DictCheck:
    """Checks that dicts are unchanged since construction, by the version number that CPython or torch keeps for each.

    Without version numbers the dicts count as changed.
    """

    def __init__(self, dicts: Sequence[dict[Any, Any]]) -> None:
        self._dicts = list(dicts)
        self._tree = None
        if Fast.guard_tree is not None:
            self._tree = Fast.guard_tree()
            for index, each in enumerate(self._dicts):
                item = self._tree.list_getitem_manager(index, "", each, GuardManagerType.GUARD_MANAGER)
                item.add_dict_version_guard(each, [""], None)

    def are_unchanged(self) -> bool:
        """True if no entry was added, removed or replaced. False does not prove a change."""
        return self._tree is not None and bool(self._tree.check(self._dicts))


def _facts(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (type(tensor), tensor.dtype, tensor.device, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())


# True if the guards of this version of torch can call a function (see `guard_answer`).
CAN_ASK = all(hasattr(_source, name) for name in ("AttrSource", "CallFunctionNoArgsSource", "ImportSource"))


# Classes whose instances, when called, call `guard_answer` for all global state that they read; with the code object of `__call__`.
answering: dict[type, CodeType] = {}


def answers_for_itself(kind: type[T]) -> type[T]:
    """Decorator: registers a class in `answering`."""
    answering[kind] = kind.__call__.__code__
    return kind


class _Asked(threading.local):
    """The functions that `guard_answer` was called with in this thread; None outside of the context `questions`."""

    questions: set[Question] | None = None


_asked = _Asked()


@contextlib.contextmanager
def questions() -> Iterator[set[Question]]:
    """Collects, in this thread, the functions that `guard_answer` is called with inside the context: a capture depends on their results."""
    before, _asked.questions = _asked.questions, set()
    try:
        yield _asked.questions
    finally:
        _asked.questions = before


def answer(question: Question) -> Any:
    """Calls the function of a question and returns its result."""
    module, attributes = question
    found: Any = sys.modules[module]
    for name in attributes:
        found = getattr(found, name)
    return found()


def guard_answer(module: str, attributes: Sequence[str]) -> None:
    """Adds a guard on the result of a function without arguments to the current capture by TorchDynamo, which recompiles if the result
    changes. Inside of `questions` the function is also collected there. Otherwise it has no effect. Requires CAN_ASK.

    Args:
        module: The name of the function's module.
        attributes: The attribute path to the function.
    """
    if _asked.questions is not None:
        _asked.questions.add((module, tuple(attributes)))
    if TracingContext.try_get() is not None:
        found: Any = _source.ImportSource(module)
        for name in attributes:
            found = _source.AttrSource(found, name)
        install_guard(_source.CallFunctionNoArgsSource(found).make_guard(GuardBuilder.EQUALS_MATCH))


def guard_current_gpu() -> None:
    """Adds a guard on torch's current GPU to the current capture by TorchDynamo, which itself does not guard on it. Without such a capture,
    or if CAN_ASK is false, it has no effect."""
    if CAN_ASK:
        guard_answer("torch", ("cuda", "current_device"))
