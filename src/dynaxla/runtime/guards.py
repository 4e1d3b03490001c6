"""Whether tensors and dicts are as they were, compared in C where torch has the means; and a guard that TorchDynamo does not set."""

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

# A function without arguments: a module's name, and the names by which it is found there.
Question = tuple[str, tuple[str, ...]]
T = TypeVar("T")


class ArgumentCheck:
    """Whether tensors have the types, dtypes, devices, shapes, strides and flags (conjugate, negative) of those seen at construction.

    Holds no reference to the tensors.
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
    """Whether nothing has been put into dicts, or taken out, since construction: by the version that CPython or torch keeps of each.

    Where nobody keeps one, or after something has changed, the answer is no.
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
        """True if nothing has been put in or taken out. False does not mean that something has."""
        return self._tree is not None and bool(self._tree.check(self._dicts))


def _facts(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (type(tensor), tensor.dtype, tensor.device, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())


# Whether this torch's guards can call a function (see below).
CAN_ASK = all(hasattr(_source, name) for name in ("AttrSource", "CallFunctionNoArgsSource", "ImportSource"))


# Classes whose instances call `guard_answer` for all that they read when they are called; and the code of these calls.
answering: dict[type, CodeType] = {}


def answers_for_itself(kind: type[T]) -> type[T]:
    """A decorator of such a class."""
    answering[kind] = kind.__call__.__code__
    return kind


class _Asked(threading.local):
    """What `guard_answer` is called with in this thread. Attributes: questions (None outside of the function `questions`)."""

    questions: set[Question] | None = None


_asked = _Asked()


@contextlib.contextmanager
def questions() -> Iterator[set[Question]]:
    """Inside, in this thread: the functions that `guard_answer` is called with, on whose answers a capture depends."""
    before, _asked.questions = _asked.questions, set()
    try:
        yield _asked.questions
    finally:
        _asked.questions = before


def answer(question: Question) -> Any:
    """What such a function gives now."""
    module, attributes = question
    found: Any = sys.modules[module]
    for name in attributes:
        found = getattr(found, name)
    return found()


def guard_answer(module: str, attributes: Sequence[str]) -> None:
    """Let TorchDynamo compile anew what it captures now when a function without arguments, found in a module by these names, gives
    something else, and note it inside of `questions`. Elsewhere nothing happens. Only where CAN_ASK."""
    if _asked.questions is not None:
        _asked.questions.add((module, tuple(attributes)))
    if TracingContext.try_get() is not None:
        found: Any = _source.ImportSource(module)
        for name in attributes:
            found = _source.AttrSource(found, name)
        install_guard(_source.CallFunctionNoArgsSource(found).make_guard(GuardBuilder.EQUALS_MATCH))


def guard_current_gpu() -> None:
    """Let TorchDynamo compile anew what it captures now when torch has another current GPU: of itself it does not ask. Outside of its
    captures, and with a torch that has no such guard, nothing happens."""
    if CAN_ASK:
        guard_answer("torch", ("cuda", "current_device"))
