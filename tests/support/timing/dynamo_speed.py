"""Makes compilation in tests cheaper, in ways that change no result."""

from __future__ import annotations

import torch._dynamo.guards
from torch._logging._internal import trace_log


def skip_guard_profile() -> None:
    """TorchDynamo times every graph's guards, for its log, with caches flushed: 17 ms of CPU time and 50 ms of wall time for each."""
    torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0


def skip_trace() -> None:
    """torch writes all that it compiles, as text and JSON, to a log that nobody reads, if that has a handler: a thirtieth of the time.
    pytest 9.2 gives its own handlers to every logger that hands nothing on. From now on this one takes none."""
    trace_log.addHandler = lambda handler: None
