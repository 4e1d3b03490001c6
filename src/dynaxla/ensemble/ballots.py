"""One choice for all processes of a group: each says what it has measured, and one answer is for all.

Nobody waits. A process that has measured posts its times in the group's store, and goes on with eager mode until the choice is there: it
asks at later calls. Whoever finds that all have posted chooses, among the engines that are right everywhere, the one whose slowest process
is fastest; the first answer in the store counts. Where a process has not posted in time (it never calls the graph, or has compiled others),
the answer is the engine for graphs that are not tried, and a warning says who is missing.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch

from .. import forks
from ..runtime import private
from .contest import EAGER, UNTRIED, Alone

log = logging.getLogger("dynaxla")

# Seconds: between two questions; how long a process waits for the others, while eager mode serves.
_PAUSE, _PATIENCE = 0.02, 120.0

# How many graphs of one content this process has compiled: the same ones have the same number in all processes.
_counts: Counter[str] = Counter()
_lock = forks.lock()


def ballot_for(content: str, engines: Sequence[str]) -> Alone:
    """Who decides about a graph: this process, or those of the default group, if there are several.

    content: what the graph is, in all processes alike.
    """
    if not torch.distributed.is_available() or not torch.distributed.is_initialized() or torch.distributed.get_world_size() < 2:
        return Alone()
    group = torch.distributed.group.WORLD
    store = private.store_of(group)
    if store is None:
        return Alone()
    label = hashlib.blake2b(repr((content, tuple(engines))).encode(), digest_size=16).hexdigest()
    with _lock:
        _counts[label] += 1
        label = f"dynaxla/engines/{label}/{_counts[label]}"
    return Ballot(store, torch.distributed.get_rank(), torch.distributed.get_world_size(), label)


class Ballot(Alone):
    """store: the group's. rank: this process's, of `count`. label: the graph's, in all processes. patience: seconds."""

    def __init__(self, store: Any, rank: int, count: int, label: str, patience: float = _PATIENCE) -> None:
        self._store, self._rank, self._count, self._label, self._patience = store, rank, count, label, patience
        self._posted: dict[Hashable, float] = {}
        self._asked = float("-inf")

    def decide(self, sizes: Hashable, seconds: Mapping[str, float]) -> str | None:
        moment = time.monotonic()
        if sizes in self._posted and moment - self._asked < _PAUSE:
            return None
        place = f"{self._label}/{sizes!r}"
        answer = f"{place}/answer"
        try:
            if sizes not in self._posted:
                least = min(seconds.values()) or 1.0
                self._store.set(f"{place}/{self._rank}", json.dumps({name: value / least for name, value in seconds.items()}))
                self._posted[sizes] = moment
            if not self._store.check([answer]):
                missing = [rank for rank in range(self._count) if not self._store.check([f"{place}/{rank}"])]
                if missing and moment - self._posted[sizes] < self._patience:
                    return None
                posted = [json.loads(self._store.get(f"{place}/{rank}")) for rank in range(self._count) if rank not in missing]
                proposal = UNTRIED if missing else _best(posted)
                found = self._store.compare_set(answer, "", proposal).decode()
                if missing and found == proposal:
                    log.warning("no engine was chosen for a graph: processes %s have not measured it; all take %s", missing, found)
            else:
                found = self._store.get(answer).decode()
        except RuntimeError as error:  # the store has gone, with the process that held it
            log.warning("the processes' store does not answer, so this process chooses an engine alone: %s", error)
            return super().decide(sizes, seconds)
        finally:
            self._asked = time.monotonic()
        if found not in seconds:
            log.warning("the processes take the engine %s, which is not right in this one: eager mode runs the graph here", found)
            return EAGER
        return found


def _best(posted: Sequence[Mapping[str, float]]) -> str:
    """The engine whose slowest process is fastest, of those that all have; eager mode if there is none."""
    common = [name for name in posted[0] if all(name in other for other in posted)]
    return min(common, key=lambda name: max(other[name] for other in posted), default=EAGER)
