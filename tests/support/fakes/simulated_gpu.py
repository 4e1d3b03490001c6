"""A double of a GPU, on a machine without one: in which order it does torch's and XLA's work.

Its streams hold work that is done when a test lets it be done, in an order that the test chooses. `install` puts it in the place of CUDA's
streams and events, of the hand-over by DLPack and of a program's execution, which order themselves as the docstring of runtime/streams.py
says XLA does. What calls do with them is dynaxla's own code.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
import torch

from dynaxla.buffers import native
from dynaxla.runtime import late_checks, private, seeds, streams, transfer
from dynaxla.runtime.layout import Layout

CUDA = torch.device("cuda", 0)


class Mark:
    """A place in a stream's work, which is done or not."""

    done = False


class Stream:
    """handle: 0 for CUDA's default stream. is_torchs: whether torch has made it."""

    def __init__(self, handle: int, is_torchs: bool = True) -> None:
        self.cuda_stream, self.stream_id = handle, (handle + 1 if is_torchs and handle else handle)
        self.work: deque[Mark | Callable[[], object]] = deque()  # a Mark that is not its own: it waits for that one
        self.own: set[Mark] = set()

    def mark(self) -> Mark:
        made = Mark()
        self.own.add(made)
        self.work.append(made)
        return made

    def wait_event(self, event: Any) -> None:
        self.work.append(event.mark)

    def step(self) -> bool:
        """Do the first piece of work, if it can be done. Returns: whether it was."""
        if not self.work:
            return False
        first = self.work[0]
        if isinstance(first, Mark):
            if first not in self.own and not first.done:
                return False
            first.done = True
        else:
            first()
        self.work.popleft()
        return True


class Array:
    """A jax.Array's double. mark: done when its contents are there."""

    def __init__(self, memory: torch.Tensor, mark: Mark) -> None:
        self.memory, self.mark = memory, mark


class Device:
    """See above. Attributes: host_waits (what the host has waited for); executions (programs that were started); missing (the
    executions that will have too little memory); given_back (how often torch's cache was emptied); drawn (seeds); cached_bytes (that torch
    keeps unused); is_capturing (whether torch records a CUDA graph)."""

    def __init__(self) -> None:
        self.default = Stream(0)
        self.compute = Stream(1000)
        self.external = [Stream(2000 + index) for index in range(4)]
        self.streams = {stream.cuda_stream: stream for stream in (self.default, self.compute, *self.external)}
        self.thread = threading.local()
        self.lock = threading.RLock()
        self.turn = 0
        self.host_waits: list[str] = []
        self.executions = self.missing = self.given_back = self.drawn = 0
        self.cached_bytes = 1  # that torch keeps unused
        self.is_capturing = False
        self.free: list[torch.Tensor] = []

    # torch.cuda

    def current_stream(self, _: Any = None) -> Stream:
        return getattr(self.thread, "stream", self.default)

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before = self.current_stream()
        self.streams[stream.cuda_stream] = stream
        self.thread.stream = stream
        try:
            yield
        finally:
            self.thread.stream = before

    def queue(self, work: Callable[[], object]) -> None:
        """What torch does on its current stream."""
        self.current_stream().work.append(work)

    def external_stream(self, handle: int, device: Any = None) -> Stream:
        return self.streams[handle]

    def event(self) -> Any:
        def record(stream: Stream) -> None:
            made.mark = stream.mark()

        def synchronize() -> None:
            self.host_waits.append("event")
            self.go()
            assert made.mark.done

        made = SimpleNamespace(mark=Mark(), record=record, query=lambda: made.mark.done, synchronize=synchronize)
        return made

    def synchronize(self, _: Any = None) -> None:
        self.host_waits.append("device")
        self.go()

    def empty_cache(self) -> None:
        self.given_back += 1
        self.cached_bytes = 0

    def pinned(self, count: int) -> Any:
        numbers = np.full(count, -1, np.int32)

        def copy(slot: int, code: torch.Tensor, non_blocking: bool) -> None:
            assert non_blocking
            self.queue(lambda: numbers.__setitem__(slot, int(code)))

        class Slots:
            def __getitem__(self, slot: int) -> Any:
                return SimpleNamespace(copy_=lambda code, non_blocking: copy(slot, code, non_blocking))

            def numpy(self) -> Any:
                return numbers

        return Slots()

    def later(self, value: torch.Tensor) -> torch.Tensor:
        """A tensor that torch gives this value on its current stream."""
        made = torch.full_like(value, -1, memory_format=torch.contiguous_format)
        self.queue(lambda: made.copy_(value))
        return made

    def seed(self, _: Any) -> torch.Tensor:
        self.drawn += 1
        return self.later(torch.tensor([self.drawn, 0], dtype=torch.int32))

    # XLA

    def get_stream_for_external_ready_events(self) -> int:
        with self.lock:
            self.turn += 1
            return self.external[self.turn % 4].cuda_stream

    def import_tensor(self, tensor: torch.Tensor, _: Any, stream: int | None = None) -> Array:
        assert stream is None or self.streams[stream] in self.external, "XLA takes its own streams alone"
        return Array(tensor, (self.compute if stream is None else self.streams[stream]).mark())

    def export_array(self, array: Array, stream: int | None = None) -> torch.Tensor:
        assert stream, "an export without a stream waits, and with 0 CUDA's meaning is not clear"
        self.streams[0 if stream == 1 else stream].work.append(array.mark)
        return array.memory

    def program(self, compute: Callable[..., Sequence[torch.Tensor]], *shapes: tuple[int, ...]) -> Callable[[Sequence[Array]], Any]:
        """compute: gives float64 results of these shapes, of the arguments, the seed first."""

        def call(arrays: Sequence[Array]) -> list[Array]:
            with self.lock:
                self.executions += 1
                if self.missing:
                    self.missing -= 1
                    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate")
                results = [self.allocate(shape) for shape in shapes]

                def run() -> None:
                    for result, value in zip(results, compute(*(array.memory for array in arrays)), strict=True):
                        result.copy_(value)

                self.compute.work.extend([*(array.mark for array in arrays), run])
                mark = self.compute.mark()
                return [Array(result, mark) for result in results]

        return call

    def allocate(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Memory that is free by XLA's own account: torch may still read it."""
        found = next((memory for memory in self.free if memory.shape == shape), None)
        if found is None:
            return torch.full(shape, -1.0, dtype=torch.float64)
        self.free = [memory for memory in self.free if memory is not found]
        return found

    # A test's own

    def go(self, order: Sequence[Stream] | None = None) -> None:
        """Let all work be done. order: of the streams: one works only where none before it can. XLA's first, if not said."""
        with self.lock:
            order = order or [self.compute, *self.external, *self.streams.values()]
            while any(stream.step() for stream in order):
                pass
            assert not any(stream.work for stream in order), "a stream waits for ever"


def install(monkeypatch: pytest.MonkeyPatch) -> Device:
    """A device in the place of CUDA's, for one test."""
    made = Device()
    monkeypatch.setattr(torch.cuda, "current_stream", made.current_stream)
    monkeypatch.setattr(private, "current_raw_stream", lambda _: made.current_stream().cuda_stream)
    monkeypatch.setattr(torch.cuda, "ExternalStream", made.external_stream)
    monkeypatch.setattr(torch.cuda, "Event", made.event)
    monkeypatch.setattr(torch.cuda, "synchronize", made.synchronize)
    monkeypatch.setattr(torch.cuda, "empty_cache", made.empty_cache)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: made.cached_bytes)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 0)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: made.is_capturing)
    monkeypatch.setattr(late_checks, "pinned", made.pinned)
    monkeypatch.setattr(late_checks, "MAX_IN_FLIGHT", 8)
    monkeypatch.setattr(late_checks, "_reports", {})
    monkeypatch.setattr(late_checks, "atexit", SimpleNamespace(register=lambda _: None))
    both = streams.Streams(CUDA, made)
    monkeypatch.setattr(streams, "of", lambda *_: both)
    monkeypatch.setattr(seeds, "seed", made.seed)
    monkeypatch.setattr(native, "_unused_seed", lambda _: torch.zeros(2, dtype=torch.int32))
    monkeypatch.setattr(transfer, "import_tensor", made.import_tensor)
    monkeypatch.setattr(transfer, "export_array", made.export_array)
    pack = Layout.pack_tensor
    monkeypatch.setattr(Layout, "pack_tensor", lambda layout, tensor: made.later(pack(layout, tensor).clone()))
    return made


def on_synchronization_of_checks(monkeypatch: pytest.MonkeyPatch, function: Callable[[], None]) -> None:
    """The host calls a function when it waits for the first of the checks in flight."""
    monkeypatch.setattr(late_checks.of(CUDA)._in_flight[0].sent.event, "synchronize", function)
