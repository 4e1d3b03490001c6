"""torch's own kernels inside an XLA program: what XLA calls back, and what becomes of an exception there."""

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
    """Work of torch's on the buffers of a running program. XLA calls it from whatever thread it likes.

    Attributes:
        write: gets the results' buffers and the operands, as tensors; it writes the former and leaves the latter alone.
        operands: the shape and strides with which each operand's buffer is read.
        copies: whether the operands are copies in torch's memory, which `write` may keep. XLA's own memory is freed, or holds something
            else, as soon as the kernel returns.
    """

    write: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], object]
    operands: Sequence[Strided]
    copies: bool = False

    def __call__(self, context: Any, outputs: Sequence[Any], *inputs: Any) -> None:
        """context, outputs, inputs: XLA's (`jax.experimental.buffer_callback`)."""
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
    """What XLA gets in place of a kernel's exception. XLA hands on nothing but its text, which says where the exception is kept."""


@dataclass(frozen=True)
class _Failure:
    """What a kernel raised, the traceback that it had then, and the thread in which it ran."""

    error: BaseException
    trace: TracebackType | None
    thread: int


class _Failures:
    """Exceptions of kernels, from where they were raised to the call of the program that they belong to.

    XLA often runs a kernel in the thread that calls the program: its exception is that call's. For others XLA's message tells the number
    under which it is kept. Threads that fail at the same time may find numbers of each other in it, if Python gives way to another thread
    while jaxlib writes one: their own is the last, for the most part.
    """

    def __init__(self) -> None:
        self._last = 0
        self._kept: OrderedDict[int, _Failure] = OrderedDict()
        self._calls = 0
        self._lock = forks.lock()

    @contextmanager
    def call(self) -> Iterator[None]:
        """Inside, a program runs that may call kernels. Raises what its kernel raised; of two that fail in one call, one.

        The others are dropped when no program runs any more.
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
        """Keep an exception. Returns: the text for XLA to hand on, by which it is found again."""
        with self._lock:
            self._last = number = self._last + 1
            self._kept[number] = _Failure(error, error.__traceback__, threading.get_ident())
            while len(self._kept) > _MOST_FAILURES:
                self._kept.popitem(last=False)
        return f"{type(error).__name__}: {error} [dynaxla: failure {os.getpid()}.{number}]"

    def _take(self, text: str, before: int) -> BaseException | None:
        """The exception of a call that began when `before` had been kept, and that XLA's message is about."""
        told = [int(number) for process, number in re.findall(r"\[dynaxla: failure (\d+)\.(\d+)\]", text) if int(process) == os.getpid()]
        if not told:
            return None
        with self._lock:
            thread = threading.get_ident()
            own = [number for number, failure in self._kept.items() if failure.thread == thread and number > before]
            found = next((self._kept.pop(number) for number in (*own, *reversed(told)) if number in self._kept), None)
        if found is None:
            return None
        _release(found.trace)
        return found.error


# Programs that run without a pause have no end at which to drop what nobody took.
_MOST_FAILURES = 100

_failures = _Failures()
call = _failures.call

# Frames of these files hold tensors on XLA's memory, which is gone when the exception is seen.
_HERE = os.path.dirname(os.path.dirname(__file__))
_OPS = torch._ops.__file__


def _release(trace: TracebackType | None) -> None:
    """Let an exception's frames forget XLA's memory, so that no debugger reads it."""
    while trace is not None:
        if trace.tb_frame.f_code.co_filename.startswith((_HERE, _OPS)):
            with suppress(RuntimeError):  # an exception that was raised before, with frames that run
                trace.tb_frame.clear()
        trace = trace.tb_next
