"""`torch.jax.Stream` and `torch.jax.Event`, for code that is written for devices with several queues. PJRT has one order of work for each
device: all streams are that one, so none ever waits for another."""

from __future__ import annotations

import time
from typing import Any

import jax
import torch

from ..runtime import programs
from . import places, recording, storages


def wait(index: int) -> None:
    """Until all that has been given to a device is computed; what is recorded (lazy mode) runs first."""
    recording.run_all()
    programs.wait_for(places.jax_device(index))
    _finish(_arrays(index), index)


def is_done(index: int) -> bool:
    recording.run_all()
    return all(map(_is_computed, _arrays(index)))


def _finish(arrays: list[jax.Array], index: int) -> None:
    """Wait for arrays. Where another thread donates one meanwhile, all programs of its device are waited for: one of them computes it."""
    is_donated = False
    for array in arrays:
        try:
            array.block_until_ready()
        except RuntimeError:
            if not array.is_deleted():
                raise
            is_donated = True
    if is_donated:
        programs.wait_for(places.jax_device(index))


def _is_computed(array: jax.Array) -> bool:
    """Also of one that another thread donates meanwhile: whoever did so has it no more. jaxlib crashes if a deleted one is asked."""
    try:
        return array.is_deleted() or array.is_ready()
    except RuntimeError:
        if array.is_deleted():
            return True
        raise


def _arrays(index: int) -> list[jax.Array]:
    """Those that another thread donates meanwhile included: their placement is known still."""
    device = places.jax_device(index)
    return [array for array in jax.live_arrays() if array.sharding.device_set == {device}]


class Stream:
    """A device's order of work. Attributes: device; priority (as it was given: it decides nothing)."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device = places.named(device)
        self.priority = priority

    @property
    def device_index(self) -> int:
        return self.device.index or 0

    @property
    def stream_id(self) -> int:
        return 0

    def synchronize(self) -> None:
        wait(self.device_index)

    def query(self) -> bool:
        """Whether all that has been given to the device is computed."""
        return is_done(self.device_index)

    def wait_stream(self, stream: Stream) -> None:
        """Work of one device is done in order; that of another one is waited for."""
        if stream.device != self.device:
            stream.synchronize()

    def wait_event(self, event: Event) -> None:
        if event.device is not None and event.device != self.device:
            event.synchronize()

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.device == self.device

    def __hash__(self) -> int:
        return hash(self.device)


class Event:
    """A point in a device's order of work. device: None before it is recorded."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        if interprocess:
            raise NotImplementedError(f'events of the device "{storages.NAME}" cannot be shared between processes')
        self.enable_timing = enable_timing
        self.device: torch.device | None = None
        self._seconds: float | None = None
        self._before: list[jax.Array] = []

    def record(self, stream: Stream | None = None) -> None:
        """With timing, it waits until all earlier work is done: only then the time of that point is known."""
        self.device = (stream or Stream()).device
        self._before = _arrays(self.device.index or 0)
        if self.enable_timing:
            wait(self.device.index or 0)
            self._seconds = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        (stream or Stream()).wait_event(self)

    def synchronize(self) -> None:
        before, self._before = self._before, []
        if self.device is not None:
            _finish(before, self.device.index or 0)

    def query(self) -> bool:
        return all(map(_is_computed, self._before))

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds from this point to another one, all work between them included."""
        if self._seconds is None or end_event._seconds is None:
            raise RuntimeError("both events must be made with enable_timing=True, and recorded, before the time between them is asked for")
        return (end_event._seconds - self._seconds) * 1e3
