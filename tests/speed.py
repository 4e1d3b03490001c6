"""Makes compilation in tests cheaper, in ways that change no result."""

from __future__ import annotations

import torch._dynamo.guards


def skip_guard_profile() -> None:
    """TorchDynamo times every graph's guards, for its log, with caches flushed: 17 ms of CPU time and 50 ms of wall time for each."""
    torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0
