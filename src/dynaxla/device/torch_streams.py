"""`torch.jax.Stream` and `torch.jax.Event`, for code written for devices with several queues.

PJRT runs the programs of a device in order. So a device has a single stream, which never waits for another stream of the same device.
"""

from __future__ import annotations

import time
from typing import Any

import jax
import torch

from ..runtime import programs
from . import lazy_mode, pjrt_devices, storages


def wait(index: int) -> None:
    """Waits until all work submitted to a device is done. Recorded ops (lazy mode) run first."""
    lazy_mode.run_all()
    programs.wait_for(pjrt_devices.jax_device(index))
    _wait_for_arrays(pjrt_devices.live_arrays(index), index)


def is_done(index: int) -> bool:
    """True if all live arrays with elements on this device are computed. Recorded ops (lazy mode) run first."""
    lazy_mode.run_all()
    return all(map(_is_computed, pjrt_devices.live_arrays(index)))


def _wait_for_arrays(arrays: list[jax.Array], index: int) -> None:
    """Waits for arrays. If another thread donates one of them meanwhile, also waits for all programs of the device."""
    is_donated = False
    for array in arrays:
        try:
            array.block_until_ready()
        except RuntimeError:
            if not array.is_deleted():
                raise
            is_donated = True
    if is_donated:
        programs.wait_for(pjrt_devices.jax_device(index))


def _is_computed(array: jax.Array) -> bool:
    """True if an array is computed, or is deleted since another thread has donated it. jaxlib's `is_ready` crashes for a deleted array."""
    try:
        return array.is_deleted() or array.is_ready()
    except RuntimeError:
        if array.is_deleted():
            return True
        raise


class Stream:
    """The single queue of a device.

    Attributes:
        device: the torch device.
        priority: the priority that the user gave, without effect.
    """

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device = pjrt_devices.parse_device(device)
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
        """See `is_done`."""
        return is_done(self.device_index)

    def wait_stream(self, stream: Stream) -> None:
        """Waits for the stream of another device. For a stream of the same device it does nothing, since a device works in order."""
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
    """A point in the queue of a device.

    Attributes:
        enable_timing: True if `record` stores the time at which the event is reached.
        device: the torch device; None before the event is recorded.
    """

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        if interprocess:
            raise NotImplementedError(f'events of the device "{storages.NAME}" cannot be shared between processes')
        self.enable_timing = enable_timing
        self.device: torch.device | None = None
        self._seconds: float | None = None
        self._pending: list[jax.Array] = []

    def record(self, stream: Stream | None = None) -> None:
        """Records the event, which is reached when all arrays that exist now are computed. Recorded ops (lazy mode) run first.

        With timing, waits for these arrays, and stores the time.
        """
        lazy_mode.run_all()
        self.device = (stream or Stream()).device
        self._pending = pjrt_devices.live_arrays(self.device.index or 0)
        if self.enable_timing:
            wait(self.device.index or 0)
            self._seconds = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        (stream or Stream()).wait_event(self)

    def synchronize(self) -> None:
        pending, self._pending = self._pending, []
        if self.device is not None:
            _wait_for_arrays(pending, self.device.index or 0)

    def query(self) -> bool:
        return all(map(_is_computed, self._pending))

    def elapsed_time(self, end_event: Event) -> float:
        """Returns the milliseconds from this event to a later event. Raises: RuntimeError if one of them has no time."""
        if self._seconds is None or end_event._seconds is None:
            raise RuntimeError("both events must be made with enable_timing=True, and recorded, before elapsed_time is called")
        return (end_event._seconds - self._seconds) * 1e3
