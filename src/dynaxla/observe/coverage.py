"""Process-wide counts of ops: lowered, or computed by torch's own kernel as a fallback.

The ops of a compiled graph are counted when the graph is traced or its program is loaded from the cache directory, not when it runs.
Fallbacks of eager ops on the device "jax", and of whole graphs, are counted at each call.
"""

from __future__ import annotations

from collections import defaultdict

from .. import forks
from . import events
from .dump import log

_lock = forks.lock()
_lowered: defaultdict[str, int] = defaultdict(int)
_fallbacks: defaultdict[str, int] = defaultdict(int)
_logged: set[str] = set()


def count_lowered(op: str) -> None:
    """Counts a node of this op that was lowered."""
    with _lock:
        _lowered[op] += 1


def count_fallback(
    op: str, reason: str, where: str, remark: str = "XLA fuses nothing with it; options={'fallback': 'error'} raises an error instead"
) -> None:
    """Counts a fallback to torch's kernel, and logs a warning for the first fallback of each `op`.

    Args:
        op: the op's name, or "a graph" if torch runs a whole graph.
        reason: the reason for the fallback.
        where: the line of user code; "" if it is unknown.
        remark: the end of the warning: the consequence of the fallback, and how to avoid it.
    """
    with _lock:
        _fallbacks[op] += 1
        first = op not in _logged
        _logged.add(op)
    if events.has_listeners():
        events.emit(events.OpFellBack(op, reason, where))
    if first:
        place = f" (first at {where})" if where else ""
        log.warning("torch's own kernel computes %s: %s%s; %s", op, reason, place, remark)


def snapshot() -> dict[str, dict[str, int]]:
    """Returns, for each op, how often it was counted as "lowered" and as "fallback" since the last `reset()`, or since the start."""
    with _lock:
        return {
            op: {"lowered": _lowered.get(op, 0), "fallback": _fallbacks.get(op, 0)} for op in sorted(_lowered.keys() | _fallbacks.keys())
        }


def reset() -> None:
    """Sets all counts to zero. An op whose fallback was logged is not logged again."""
    with _lock:
        _lowered.clear()
        _fallbacks.clear()
