"""Settings of optimizers that only the recording thread sees.

During a recording learning rates are traced numbers, step counts stay in tensors, and fused steps are requested. These settings are not
written into the optimizer, because another thread may read its learning rates to log them: only the recording thread gets other groups.
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

_seen = threading.local()


@functools.cache
def _shadowed(kind: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """Returns a subclass of an optimizer class whose `param_groups` can be replaced in one thread."""

    def get(self: torch.optim.Optimizer) -> Any:
        shadows = getattr(_seen, "groups", {})
        return shadows.get(id(self)) or self.__dict__["param_groups"]

    def put(self: torch.optim.Optimizer, groups: Any) -> None:
        self.__dict__["param_groups"] = groups

    made: Any = type(kind.__name__, (kind,), {"param_groups": property(get, put), "__module__": kind.__module__, "__doc__": kind.__doc__})
    made.__qualname__ = kind.__qualname__
    return made


_lock = threading.Lock()
_users: dict[int, int] = {}


@contextlib.contextmanager
def other_groups(groups: Sequence[tuple[torch.optim.Optimizer, Sequence[Mapping[str, Any]]]]) -> Iterator[None]:
    """Inside the context, and in this thread only, these optimizers have these parameter groups."""
    before = getattr(_seen, "groups", {})
    with _lock:
        for optimizer, _ in groups:
            _users[id(optimizer)] = _users.get(id(optimizer), 0) + 1
            if _users[id(optimizer)] == 1:
                optimizer.__class__ = _shadowed(cast("Any", type(optimizer)))
    _seen.groups = {**before, **{id(optimizer): shadows for optimizer, shadows in groups}}
    try:
        yield
    finally:
        _seen.groups = before
        with _lock:
            for optimizer, _ in groups:
                _users[id(optimizer)] -= 1
                if not _users[id(optimizer)]:
                    del _users[id(optimizer)]
                    optimizer.__class__ = type(optimizer).__mro__[1]


class InKernel:
    """Stands for a fake mode that is inside an op's kernel: compiled functions then run as plain Python.

    DTensor runs ops in the current fake mode to find their results' metadata. Entering this object gives it a mode of its own, without the
    other dispatch modes.
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
def as_written() -> Iterator[None]:
    """Inside the context, and in this thread only, functions that `torch.compile` has compiled run as plain Python."""
    with torch._guards.tracing(torch._guards.TracingContext(cast("Any", InKernel()))):
        yield


class _Compiling:
    """A flag that is True in the threads that record; in other threads it has the value `elsewhere`."""

    def __init__(self, elsewhere: Any) -> None:
        self.elsewhere = elsewhere
        self.threads: dict[int, int] = {}

    def __bool__(self) -> bool:
        return threading.get_ident() in self.threads or bool(self.elsewhere)

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
        if not isinstance(flag, _Compiling):
            flag = _Compiling(flag)
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
                private.set_compiling_flag(flag.elsewhere)
