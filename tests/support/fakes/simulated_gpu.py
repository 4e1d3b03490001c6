"""A fake GPU, which simulates the order of torch's and XLA's work, on a machine without one.

Its streams hold work until a test runs it, in an order that the test chooses. `install` replaces CUDA's streams and events, the exchange by
DLPack, and the execution of programs. Their order is that of XLA, described in runtime/streams.py. All other code is dynaxla's own.
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
    """A position in a stream's work. It is done once all work before it is done."""

    done = False


class Stream:
    """A stream.

    Args:
        handle: the handle; 0 for CUDA's default stream.
        is_torchs: True if torch has created it.
    """

    def __init__(self, handle: int, is_torchs: bool = True) -> None:
        self.cuda_stream, self.stream_id = handle, (handle + 1 if is_torchs and handle else handle)
        self.work: deque[Mark | Callable[[], object]] = deque()  # the stream waits for a Mark of another stream
        self.own: set[Mark] = set()

    def mark(self) -> Mark:
        mark = Mark()
        self.own.add(mark)
        self.work.append(mark)
        return mark

    def wait_event(self, event: Any) -> None:
        self.work.append(event.mark)

    def step(self) -> bool:
        """Does the first piece of work if it can be done. Returns True if it was done."""
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
    """A fake jax.Array.

    Args:
        memory: the contents.
        mark: done when the contents are computed.
    """

    def __init__(self, memory: torch.Tensor, mark: Mark) -> None:
        self.memory, self.mark = memory, mark


class Device:
    """A fake GPU.

    Attributes:
        host_waits: the kinds of objects that the host has waited for.
        executions: the number of started programs.
        missing: the number of next executions that fail for lack of memory.
        given_back: the number of times that torch's cache was emptied.
        drawn: the number of drawn seeds.
        cached_bytes: unused memory in torch's cache.
        is_capturing: True if torch records a CUDA graph.
    """

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
        self.cached_bytes = 1
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
        """Adds work to torch's current stream."""
        self.current_stream().work.append(work)

    def external_stream(self, handle: int, device: Any = None) -> Stream:
        return self.streams[handle]

    def event(self) -> Any:
        def record(stream: Stream) -> None:
            event.mark = stream.mark()

        def synchronize() -> None:
            self.host_waits.append("event")
            self.go()
            assert event.mark.done

        event = SimpleNamespace(mark=Mark(), record=record, query=lambda: event.mark.done, synchronize=synchronize)
        return event

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
        """Returns a tensor that gets this value on torch's current stream."""
        result = torch.full_like(value, -1, memory_format=torch.contiguous_format)
        self.queue(lambda: result.copy_(value))
        return result

    def seed(self, _: Any) -> torch.Tensor:
        self.drawn += 1
        return self.later(torch.tensor([self.drawn, 0], dtype=torch.int32))

    # XLA

    def get_stream_for_external_ready_events(self) -> int:
        with self.lock:
            self.turn += 1
            return self.external[self.turn % 4].cuda_stream

    def import_tensor(self, tensor: torch.Tensor, _: Any, stream: int | None = None) -> Array:
        assert stream is None or self.streams[stream] in self.external, "XLA accepts only its own streams"
        return Array(tensor, (self.compute if stream is None else self.streams[stream]).mark())

    def export_array(self, array: Array, stream: int | None = None) -> torch.Tensor:
        assert stream, "an export without a stream blocks, and stream 0 is ambiguous in CUDA"
        self.streams[0 if stream == 1 else stream].work.append(array.mark)
        return array.memory

    def program(self, compute: Callable[..., Sequence[torch.Tensor]], *shapes: tuple[int, ...]) -> Callable[[Sequence[Array]], Any]:
        """Returns a fake XLA program.

        Args:
            compute: computes float64 results from the arguments. The first argument is the seed.
            shapes: the shapes of the results.
        """

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
        """Returns memory that is free for XLA; torch may still read it."""
        reused = next((memory for memory in self.free if memory.shape == shape), None)
        if reused is None:
            return torch.full(shape, -1.0, dtype=torch.float64)
        self.free = [memory for memory in self.free if memory is not reused]
        return reused

    # For tests

    def go(self, order: Sequence[Stream] | None = None) -> None:
        """Does all work.

        Args:
            order: the streams by priority. A stream works only when no stream before it can. By default, XLA's streams come first.
        """
        with self.lock:
            order = order or [self.compute, *self.external, *self.streams.values()]
            while any(stream.step() for stream in order):
                pass
            assert not any(stream.work for stream in order), "a stream waits forever"


def install(monkeypatch: pytest.MonkeyPatch) -> Device:
    """Replaces CUDA by a fake device for one test, and returns this device."""
    device = Device()
    monkeypatch.setattr(torch.cuda, "current_stream", device.current_stream)
    monkeypatch.setattr(private, "current_raw_stream", lambda _: device.current_stream().cuda_stream)
    monkeypatch.setattr(torch.cuda, "ExternalStream", device.external_stream)
    monkeypatch.setattr(torch.cuda, "Event", device.event)
    monkeypatch.setattr(torch.cuda, "synchronize", device.synchronize)
    monkeypatch.setattr(torch.cuda, "empty_cache", device.empty_cache)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: device.cached_bytes)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 0)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: device.is_capturing)
    monkeypatch.setattr(late_checks, "pinned", device.pinned)
    monkeypatch.setattr(late_checks, "MAX_IN_FLIGHT", 8)
    monkeypatch.setattr(late_checks, "_reports", {})
    monkeypatch.setattr(late_checks, "atexit", SimpleNamespace(register=lambda _: None))
    both = streams.Streams(CUDA, device)
    monkeypatch.setattr(streams, "of", lambda *_: both)
    monkeypatch.setattr(seeds, "seed", device.seed)
    monkeypatch.setattr(native, "_unused_seed", lambda _: torch.zeros(2, dtype=torch.int32))
    monkeypatch.setattr(transfer, "import_tensor", device.import_tensor)
    monkeypatch.setattr(transfer, "export_array", device.export_array)
    pack = Layout.pack_tensor
    monkeypatch.setattr(Layout, "pack_tensor", lambda layout, tensor: device.later(pack(layout, tensor).clone()))
    return device


def on_synchronization_of_checks(monkeypatch: pytest.MonkeyPatch, function: Callable[[], None]) -> None:
    """Makes the host call a function when it waits for the first check in flight."""
    monkeypatch.setattr(late_checks.of(CUDA)._in_flight[0].sent.event, "synchronize", function)
