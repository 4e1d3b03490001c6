"""Callbacks by which an XLA program runs torch's own kernels. The call of the program raises the exceptions of these kernels."""

from __future__ import annotations

import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import jax
import torch

from .. import forks
from ..observe import metrics
from . import private, transfer

Strided = tuple[tuple[int, ...], tuple[int, ...]]  # shape and strides


@dataclass(eq=False)
class Kernel:
    """A callback that runs torch ops on the buffers of a running program. XLA calls it from any thread.

    Attributes:
        write: Called with a list of the results' buffers and a list of the operands, all as tensors. It writes to the results, and must not
            write to the operands.
        operands: The shape and strides with which `write` sees each operand's buffer.
        copies: True if the operands are copied to torch's memory, so that `write` may keep them. XLA frees or reuses its own memory as soon
            as the callback returns.
    """

    write: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], object]
    operands: Sequence[Strided]
    copies: bool = False

    def __call__(self, context: Any, outputs: Sequence[Any], *inputs: Any) -> None:
        """Runs the kernel. The arguments are those of `jax.experimental.buffer_callback`."""
        try:
            with private.without_modes(), private.below_autograd(), transfer.on_stream(context, (*inputs, *outputs)[0]):
                operands = [transfer.on_buffer(buffer) for buffer in inputs]
                if self.copies:
                    operands = [operand.clone() for operand in operands]
                tensors = [transfer.reinterpret(operand, *view) for operand, view in zip(operands, self.operands, strict=True)]
                self.write([transfer.on_buffer(buffer) for buffer in outputs], tensors)
        except BaseException as error:
            raise KernelFailed(_failures.keep(error)) from None
        metrics.add("kernels")


class KernelFailed(Exception):
    """Raised to XLA in place of a kernel's exception. XLA passes on only the text, which contains the exception's number in `_failures`."""


@dataclass(frozen=True)
class _Failure:
    """The exception of a kernel.

    Attributes:
        error: The exception.
        trace: The exception's traceback when the kernel raised it.
        thread: The id of the kernel's thread.
    """

    error: BaseException
    trace: TracebackType | None
    thread: int


class _Failures:
    """Keeps exceptions of kernels until the call of their program raises them.

    XLA often runs a kernel in the thread that calls the program. An exception that was raised in this thread belongs to this call. An
    exception of another thread is found by its number in XLA's message. If kernels fail in several threads at the same time, a message may
    contain the numbers of several exceptions, since Python may switch threads while jaxlib writes the message. The last number is usually
    that of the message's own call.
    """

    def __init__(self) -> None:
        self._last = 0
        self._kept: OrderedDict[int, _Failure] = OrderedDict()
        self._calls = 0
        self._lock = forks.lock()

    @contextmanager
    def call(self) -> Iterator[None]:
        """A context for the call of a program that may call kernels. It raises a kernel's exception in place of XLA's.

        If several kernels fail in one call, one of their exceptions is raised. The other exceptions are dropped when no program is running.
        """
        with self._lock:
            self._calls += 1
            before = self._last
        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            original = self._take(str(error), before)
            if original is None:
                raise
            raise original from None
        finally:
            with self._lock:
                self._calls -= 1
                if not self._calls:
                    self._kept.clear()

    def keep(self, error: BaseException) -> str:
        """Keeps an exception. Returns: a text for XLA to pass on, by which `_take` finds the exception."""
        with self._lock:
            self._last = number = self._last + 1
            self._kept[number] = _Failure(error, error.__traceback__, threading.get_ident())
            while len(self._kept) > _MAX_FAILURES:
                self._kept.popitem(last=False)
        return f"{type(error).__name__}: {error} [dynaxla: failure {os.getpid()}.{number}]"

    def _take(self, text: str, before: int) -> BaseException | None:
        """Removes and returns the exception of a call; None if there is none.

        Args:
            text: XLA's message.
            before: The number of the last exception that any call had kept before this call began.
        """
        in_text = [int(number) for process, number in re.findall(r"\[dynaxla: failure (\d+)\.(\d+)\]", text) if int(process) == os.getpid()]
        if not in_text:
            return None
        with self._lock:
            thread = threading.get_ident()
            of_thread = [number for number, failure in self._kept.items() if failure.thread == thread and number > before]
            failure = next((self._kept.pop(number) for number in (*of_thread, *reversed(in_text)) if number in self._kept), None)
        if failure is None:
            return None
        _release(failure.trace)
        return failure.error


# The maximum number of kept exceptions. Without a maximum, exceptions that no call raises could pile up: they are dropped only when no
# program is running, which may never happen.
_MAX_FAILURES = 100

_failures = _Failures()
call = _failures.call

# dynaxla's folder, and the file of torch's ops. Frames of these files refer to tensors on XLA's memory, which is freed before the caller
# catches the exception.
_DYNAXLA_FOLDER = os.path.dirname(os.path.dirname(__file__))
_TORCH_OPS_FILE = torch._ops.__file__


def _release(trace: TracebackType | None) -> None:
    """Clears the frames of a traceback that refer to XLA's memory, so that no debugger reads freed memory."""
    while trace is not None:
        if trace.tb_frame.f_code.co_filename.startswith((_DYNAXLA_FOLDER, _TORCH_OPS_FILE)):
            with suppress(RuntimeError):  # the frame is still running, because the same exception object was raised earlier, too
                trace.tb_frame.clear()
        trace = trace.tb_next
