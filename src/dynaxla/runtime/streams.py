"""The order of torch's and XLA's work on a CUDA device, without a wait of the host. All that dynaxla does with CUDA's streams is here, but
for kernels that a program calls back (`transfer.on_stream`).

XLA runs every program on one stream of the device, its compute stream, which it hands to nobody. What orders it is this:

- an array that is imported with a stream gets an event, recorded on that stream at the import. Only streams that the device itself gives
  for that (`get_stream_for_external_ready_events`, four in turn) are taken;
- before a program starts, the compute stream waits for the events of all its arguments, read or not;
- the results of a program share one event, recorded on the compute stream behind the program. An export lets a stream wait for it.

So a program whose first argument is imported last, with a stream that waits for torch's, runs after all that torch has queued; its other
arguments need no events, and aliases may be kept. And torch's stream, at the export of any one result, waits for all of the program: it may
write what the program reads, or free it. XLA frees and allocates for its compute stream alone. Memory of a result that torch has freed is
written by a later program at the earliest, and that one waits for every stream of torch's that results were given to.
Source: openxla/xla at the commit of jaxlib 0.10.2, xla/pjrt/pjrt_stream_executor_client.cc (CreateViewOfDeviceBuffer, EnqueueExecution,
ExecuteHelper; moved to xla/pjrt/se/ since) and local_device_state.cc. Seen on an H200 with jaxlib 0.11.2 (docs/gpus.md).
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
        self._readers: dict[int, torch.cuda.Stream] = {}
        self._torchs: dict[int, torch.cuda.Stream] = {}  # torch's own streams that have been current, by handle
        self._external: dict[int, torch.cuda.Stream] = {}  # XLA's own, by handle
        self._thread = threading.local()  # event: recorded anew at each call; a wait for it keeps what it was recorded for

    def before(self) -> int:
        """A stream of XLA's that waits for what torch's current stream has queued, and for what others may do with earlier results. An
        array that is imported with it is ready then."""
        current = self._current()
        handle = self._device.get_stream_for_external_ready_events()
        stream = self._external.get(handle)
        if stream is None:
            stream = self._external.setdefault(handle, torch.cuda.ExternalStream(handle, device=self._torch_device))
        event = getattr(self._thread, "event", None)
        if event is None:
            event = self._thread.event = torch.cuda.Event()
        for reader in {**self._readers, current.cuda_stream: current}.values():
            event.record(reader)
            stream.wait_event(event)
        return handle

    def after(self) -> int:
        """torch's current stream, for exports to let it wait for the program. As DLPack writes it: CUDA's default stream is 1.

        A stream that is not torch's own (`torch.cuda.ExternalStream`) may be destroyed at any time, so later programs do not wait for it:
        whoever uses one must let torch's stream wait for it before results are freed.
        """
        current = self._current()
        handle: int = current.cuda_stream
        if handle in self._torchs:
            self._readers.setdefault(handle, current)
        return handle or 1

    def _current(self) -> torch.cuda.Stream:
        """torch's current stream."""
        handle = private.current_raw_stream(self._torch_device.index)
        stream = self._torchs.get(handle)
        if stream is None:
            stream = torch.cuda.current_stream(self._torch_device)
            if stream.stream_id != stream.cuda_stream or not stream.cuda_stream:
                self._torchs[handle] = stream
        return stream

    def settle(self) -> None:
        """Wait until the device does nothing any more: a call that has failed may have started a part of its work."""
        with contextlib.suppress(RuntimeError):  # what is wrong with the device, the call's own exception says
            torch.cuda.synchronize(self._torch_device)


def give_back_memory(device: torch.device) -> bool:
    """Gives the GPU memory that torch caches unused back to CUDA, from which XLA allocates. Nothing but memory is affected.

    Returns True if torch had such memory. XLA waits for 10 seconds before it reports that memory is out, so nothing is tried again in vain.
    """
    if device.type != "cuda" or torch.cuda.memory_reserved(device) == torch.cuda.memory_allocated(device):
        return False
    torch.cuda.empty_cache()
    return True


def check_not_captured() -> None:
    """Raises: UnsupportedOp if torch records a CUDA graph in this thread: the work of XLA's stream would not be in it."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise UnsupportedOp(
            "a program of dynaxla is called while torch records a CUDA graph, which cannot hold what XLA launches",
            hint="call it outside of torch.cuda.graph: XLA makes CUDA graphs of its programs by itself",
        )


@functools.cache
def of(torch_device: torch.device, device: jax.Device) -> Streams:
    """Returns the streams of a device. torch_device (with its index), device: torch's and JAX's names for it."""
    return Streams(torch_device, device)
