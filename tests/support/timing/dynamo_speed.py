"""Makes compilation in tests cheaper, in ways that change no result."""

from __future__ import annotations

import torch._dynamo.guards
from torch._logging._internal import trace_log


def skip_guard_profile() -> None:
    """Skips the measurement of each graph's guards that TorchDynamo makes for its log: 17 ms of CPU time and 50 ms of wall time."""
    torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0


def skip_trace() -> None:
    """Disables torch's trace log, which takes a thirtieth of the time.

    torch writes all that it compiles to this log if the log has a handler. pytest 9.2 adds handlers to all loggers that do not propagate.
    """
    trace_log.addHandler = lambda handler: None
