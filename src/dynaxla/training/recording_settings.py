"""Settings of optimizers, and of torch, that only the recording thread sees.

During a recording learning rates are traced numbers, step counts stay in tensors, and fused steps are requested. These settings are not
written to the optimizer's parameter groups, because another thread may read a learning rate to log it. Instead, the optimizer shows copies
of the groups to the recording thread.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from ..runtime import private

_thread = threading.local()


@functools.cache
def _with_replaceable_groups(cls: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """Returns a subclass of an optimizer class whose `param_groups` can be replaced in one thread."""

    def get(self: torch.optim.Optimizer) -> Any:
        copies = getattr(_thread, "groups", {})
        return copies.get(id(self)) or self.__dict__["param_groups"]

    def put(self: torch.optim.Optimizer, groups: Any) -> None:
        self.__dict__["param_groups"] = groups

    subclass: Any = type(cls.__name__, (cls,), {"param_groups": property(get, put), "__module__": cls.__module__, "__doc__": cls.__doc__})
    subclass.__qualname__ = cls.__qualname__
    return subclass


_lock = threading.Lock()
_reference_counts: dict[int, int] = {}


@contextlib.contextmanager
def replaced_param_groups(groups: Sequence[tuple[torch.optim.Optimizer, Sequence[Mapping[str, Any]]]]) -> Iterator[None]:
    """Inside the context, and in this thread only, each of these optimizers has the parameter groups that are next to it in `groups`."""
    before = getattr(_thread, "groups", {})
    with _lock:
        for optimizer, _ in groups:
            _reference_counts[id(optimizer)] = _reference_counts.get(id(optimizer), 0) + 1
            if _reference_counts[id(optimizer)] == 1:
                optimizer.__class__ = _with_replaceable_groups(cast("Any", type(optimizer)))
    _thread.groups = {**before, **{id(optimizer): copies for optimizer, copies in groups}}
    try:
        yield
    finally:
        _thread.groups = before
        with _lock:
            for optimizer, _ in groups:
                _reference_counts[id(optimizer)] -= 1
                if not _reference_counts[id(optimizer)]:
                    del _reference_counts[id(optimizer)]
                    optimizer.__class__ = type(optimizer).__mro__[1]


class InKernelFakeMode:
    """Stands for the fake mode of a tracing context. It claims to be inside a kernel, so `torch.compile`d functions run as plain Python.

    DTensor enters the current fake mode to find the metadata of ops' results. Entering this object gives DTensor a new fake mode, without
    the other dispatch modes.
    """

    in_kernel_invocation = True
    shape_env = None

    def __init__(self) -> None:
        self._entered: list[contextlib.ExitStack] = []

    def __enter__(self) -> FakeTensorMode:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_disable_current_modes())
            mode = stack.enter_context(FakeTensorMode())
            self._entered.append(stack.pop_all())
        return mode

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)


@contextlib.contextmanager
def without_torch_compile() -> Iterator[None]:
    """Inside the context, and in this thread only, functions that `torch.compile` has compiled run as plain Python."""
    with torch._guards.tracing(torch._guards.TracingContext(cast("Any", InKernelFakeMode()))):
        yield


class _ThreadFlag:
    """A flag that is True in the threads that record.

    Attributes:
        default: the flag's value in the other threads.
        threads: the number of entered `compiling` contexts, by thread id.
    """

    def __init__(self, default: Any) -> None:
        self.default = default
        self.threads: dict[int, int] = {}

    def __bool__(self) -> bool:
        return threading.get_ident() in self.threads or bool(self.default)

    def __eq__(self, other: object) -> bool:
        return bool(self) == other

    def __or__(self, other: Any) -> Any:
        return bool(self) | other

    def __and__(self, other: Any) -> Any:
        return bool(self) & other

    def __xor__(self, other: Any) -> Any:
        return bool(self) ^ other

    __ror__, __rand__, __rxor__ = __or__, __and__, __xor__

    def __int__(self) -> int:
        return int(bool(self))

    __index__ = __int__

    def __hash__(self) -> int:
        return hash(bool(self))

    def __repr__(self) -> str:
        return repr(bool(self))


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Inside the context, `torch.compiler.is_compiling()` is True in this thread only: torch.optim then keeps step counts in tensors."""
    thread = threading.get_ident()
    with _lock:
        flag = private.compiling_flag()
        if not isinstance(flag, _ThreadFlag):
            flag = _ThreadFlag(flag)
            private.set_compiling_flag(flag)
        flag.threads[thread] = flag.threads.get(thread, 0) + 1
    try:
        yield
    finally:
        with _lock:
            flag.threads[thread] -= 1
            if not flag.threads[thread]:
                del flag.threads[thread]
            if not flag.threads and private.compiling_flag() is flag:
                private.set_compiling_flag(flag.default)
