"""Orders torch's and XLA's work on a CUDA device without blocking the host. This module has all of dynaxla's uses of CUDA streams, except
those for torch kernels that a program calls (`transfer.on_stream`) and for check codes (late_checks.py).

XLA runs every program on one stream of the device, its *compute stream*, which XLA does not expose. XLA orders the work on this stream as
follows:

- An array that is imported with a stream gets an event, which is recorded on that stream at the import. XLA accepts only streams that its
  device provides for this purpose (`get_stream_for_external_ready_events`, which returns four streams in turn).
- Before a program starts, the compute stream waits for the events of all its arguments, including unused ones.
- The results of a program share one event, which is recorded on the compute stream after the program. The export of a result makes a stream
  wait for this event.

So dynaxla imports one argument of each program, the seed, after all other arguments, with a stream of XLA's that waits for torch's stream.
The program then runs after all work that torch has queued. The other arguments need no events, so arrays on their memory may be cached. The
export of any one result makes torch's stream wait for the whole program. So torch may afterwards write or free memory that the program
reads.

XLA frees and allocates memory only in the order of its compute stream. Once torch has freed a result, only a later program can write to the
result's memory, and that program waits for every torch stream that has received results.

Source: openxla/xla at the commit of jaxlib 0.10.2, xla/pjrt/pjrt_stream_executor_client.cc (CreateViewOfDeviceBuffer, EnqueueExecution,
ExecuteHelper; moved to xla/pjrt/se/ since) and local_device_state.cc. Verified on an H200 with jaxlib 0.11.2 (docs/gpus.md).
"""

from __future__ import annotations

import contextlib
import functools
import threading

import jax
import torch

from ..errors import UnsupportedOp
from . import private


class Streams:
    """torch's streams and XLA's on one CUDA device. Thread-safe."""

    def __init__(self, torch_device: torch.device, device: jax.Device) -> None:
        self._torch_device, self._device = torch_device, device
        # Each dict is keyed by stream handle. "torch's own" streams are those that torch has created, without `torch.cuda.ExternalStream`s.
        self._readers: dict[int, torch.cuda.Stream] = {}  # torch's own streams that have received results
        self._torch_streams: dict[int, torch.cuda.Stream] = {}  # torch's own streams that have been current
        self._xla_streams: dict[int, torch.cuda.Stream] = {}  # XLA's streams
        # The attribute `event` is a CUDA event of the thread. Each call can record it again, since waits that are already queued refer to
        # the earlier recording.
        self._thread = threading.local()

    def stream_for_import(self) -> int:
        """Returns an XLA stream with which to import a program's seed.

        The stream waits for all work that is queued on torch's current stream, and on torch's streams that have received results.
        """
        current = self._current()
        handle = self._device.get_stream_for_external_ready_events()
        stream = self._xla_streams.get(handle)
        if stream is None:
            stream = self._xla_streams.setdefault(handle, torch.cuda.ExternalStream(handle, device=self._torch_device))
        event = getattr(self._thread, "event", None)
        if event is None:
            event = self._thread.event = torch.cuda.Event()
        for reader in {**self._readers, current.cuda_stream: current}.values():
            event.record(reader)
            stream.wait_event(event)
        return handle

    def stream_for_export(self) -> int:
        """Returns the handle of torch's current stream, with which to export a result. The export makes this stream wait for the program.

        The handle is as DLPack defines it: 1 is CUDA's default stream. Later programs wait for this stream, unless it is a
        `torch.cuda.ExternalStream`, which may be destroyed at any time. A user of an ExternalStream must make one of torch's own streams
        wait for it before results are freed.
        """
        current = self._current()
        handle: int = current.cuda_stream
        if handle in self._torch_streams:
            self._readers.setdefault(handle, current)
        return handle or 1

    def _current(self) -> torch.cuda.Stream:
        """Returns torch's current stream."""
        handle = private.current_raw_stream(self._torch_device.index)
        stream = self._torch_streams.get(handle)
        if stream is None:
            stream = torch.cuda.current_stream(self._torch_device)
            if stream.stream_id != stream.cuda_stream or not stream.cuda_stream:
                self._torch_streams[handle] = stream
        return stream

    def wait_until_idle(self) -> None:
        """Waits until the device is idle, after a failed call that may have started some of its work."""
        with contextlib.suppress(RuntimeError):  # the exception of the failed call is raised instead
            torch.cuda.synchronize(self._torch_device)


def give_back_memory(device: torch.device) -> bool:
    """Releases the unused GPU memory in torch's cache to CUDA, from which XLA allocates.

    Returns: True if torch had such memory. Only then should a failed call be repeated, because XLA waits for 10 seconds before it reports
    that memory is exhausted.
    """
    if device.type != "cuda" or torch.cuda.memory_reserved(device) == torch.cuda.memory_allocated(device):
        return False
    torch.cuda.empty_cache()
    return True


def check_not_captured() -> None:
    """Raises UnsupportedOp if torch captures a CUDA graph in this thread: the CUDA graph would miss the work on XLA's stream."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise UnsupportedOp(
            "a program of dynaxla was called while torch records a CUDA graph, which cannot contain XLA's kernels",
            hint="call it outside torch.cuda.graph: XLA creates CUDA graphs of its programs itself",
        )


@functools.cache
def of(torch_device: torch.device, device: jax.Device) -> Streams:
    """Returns the streams of a device, given as torch's device (with its index) and as JAX's device."""
    return Streams(torch_device, device)
