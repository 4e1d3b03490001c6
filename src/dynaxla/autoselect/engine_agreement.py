"""Selects one engine for all processes of a group, from the measurements of each.

No process blocks. A process posts its times in the group's store and goes on with eager mode; later calls look for the answer. The process
that finds all times posted chooses, among the engines that are right in all processes, the one whose slowest process is the fastest. The
first answer in the store counts. If a process has not posted in time (it never calls the graph, or has compiled other graphs), the answer
is the engine for untried graphs, and a warning names the missing processes.
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

# Seconds between two queries of the store, and seconds to wait for the other processes while eager mode serves.
_PAUSE, _PATIENCE = 0.02, 120.0

# The number of graphs with the same content that this process has compiled. A graph has the same number in all processes.
_counts: Counter[str] = Counter()
_lock = forks.lock()


def ballot_for(content: str, engines: Sequence[str]) -> Alone:
    """Returns the object that decides about a graph: for this process alone, or for all processes of the default group.

    Args:
        content: identifies the graph, and is the same in all processes.
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
    """Decides together with the other processes of a group.

    Args:
        store: of the group.
        rank: of this process.
        count: the number of processes.
        label: of the graph, the same in all processes.
        patience: the seconds to wait for the other processes.
    """

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
                    log.warning(
                        "no engine was chosen for a graph, because the processes %s have not measured it: all processes use %s",
                        missing,
                        found,
                    )
            else:
                found = self._store.get(answer).decode()
        except RuntimeError as error:  # the process that held the store has ended
            log.warning("the store of the process group does not answer, and this process chooses an engine by itself: %s", error)
            return super().decide(sizes, seconds)
        finally:
            self._asked = time.monotonic()
        if found not in seconds:
            log.warning("the processes chose the engine %s, whose results are wrong in this process: eager mode runs the graph here", found)
            return EAGER
        return found


def _best(posted: Sequence[Mapping[str, float]]) -> str:
    """Returns the engine whose slowest process is the fastest, among the engines of all processes; eager mode if there is none."""
    common = [name for name in posted[0] if all(name in other for other in posted)]
    return min(common, key=lambda name: max(other[name] for other in posted), default=EAGER)
