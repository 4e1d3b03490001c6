"""Selects one engine for all processes of a group, from the measurements of each process.

No process blocks. A process posts its times, relative to its fastest engine, in the group's store and continues in eager mode. Its later
calls look for the answer. The first process that finds the times of all processes writes the answer: an engine that agrees with eager mode
in all processes, and whose largest relative time in any process is the smallest. Only the first answer in the store is valid. If a process
has not posted in time, because it never calls the graph or has compiled other graphs, the answer is the default engine, and a warning names
the missing processes.
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
from .contest import DEFAULT_ENGINE, EAGER, SingleProcessBallot

log = logging.getLogger("dynaxla")

# The minimum seconds between two queries of the store, and the seconds to wait for other processes while eager mode serves calls.
_PAUSE, _PATIENCE = 0.02, 120.0

# The number of graphs that this process has compiled, by content. The n-th graph with a content is the same graph in all processes.
_graph_counts: Counter[str] = Counter()
_lock = forks.lock()


def ballot_for(content: str, engines: Sequence[str]) -> SingleProcessBallot:
    """Returns the object that selects the engine of a graph: for this process alone, or for all processes of the default group.

    Args:
        content: a text that identifies the graph, the same in all processes.
        engines: the names of the engines.
    """
    if not torch.distributed.is_available() or not torch.distributed.is_initialized() or torch.distributed.get_world_size() < 2:
        return SingleProcessBallot()
    group = torch.distributed.group.WORLD
    store = private.store_of(group)
    if store is None:
        return SingleProcessBallot()
    label = hashlib.blake2b(repr((content, tuple(engines))).encode(), digest_size=16).hexdigest()
    with _lock:
        _graph_counts[label] += 1
        label = f"dynaxla/engines/{label}/{_graph_counts[label]}"
    return GroupBallot(store, torch.distributed.get_rank(), torch.distributed.get_world_size(), label)


class GroupBallot(SingleProcessBallot):
    """Decides together with the other processes of a group.

    Args:
        store: the store of the group.
        rank: the rank of this process.
        count: the number of processes.
        label: the prefix of the graph's keys in the store, the same in all processes.
        patience: the seconds to wait for the other processes.
    """

    def __init__(self, store: Any, rank: int, count: int, label: str, patience: float = _PATIENCE) -> None:
        self._store, self._rank, self._count, self._label, self._patience = store, rank, count, label, patience
        self._posted: dict[Hashable, float] = {}
        self._last_query = float("-inf")

    def decide(self, sizes: Hashable, seconds: Mapping[str, float]) -> str | None:
        start = time.monotonic()
        if sizes in self._posted and start - self._last_query < _PAUSE:
            return None
        prefix = f"{self._label}/{sizes!r}"
        answer_key = f"{prefix}/answer"
        try:
            if sizes not in self._posted:
                fastest = min(seconds.values()) or 1.0
                self._store.set(f"{prefix}/{self._rank}", json.dumps({name: value / fastest for name, value in seconds.items()}))
                self._posted[sizes] = start
            if not self._store.check([answer_key]):
                missing = [rank for rank in range(self._count) if not self._store.check([f"{prefix}/{rank}"])]
                if missing and start - self._posted[sizes] < self._patience:
                    return None
                posted = [json.loads(self._store.get(f"{prefix}/{rank}")) for rank in range(self._count) if rank not in missing]
                proposal = DEFAULT_ENGINE if missing else _best(posted)
                answer = self._store.compare_set(answer_key, "", proposal).decode()
                if missing and answer == proposal:
                    log.warning(
                        "no engine was chosen for a graph, because the processes %s have not measured the graph: all processes use %s",
                        missing,
                        answer,
                    )
            else:
                answer = self._store.get(answer_key).decode()
        except RuntimeError as error:  # the process that held the store has ended
            log.warning("the store of the process group does not answer, and this process chooses an engine by itself: %s", error)
            return super().decide(sizes, seconds)
        finally:
            self._last_query = time.monotonic()
        if answer not in seconds:
            log.warning(
                "the processes chose the engine %s, which does not agree with eager mode in this process: eager mode runs the graph here",
                answer,
            )
            return EAGER
        return answer


def _best(posted: Sequence[Mapping[str, float]]) -> str:
    """Returns the engine with the smallest maximum of all processes' relative times; eager mode if no engine has been posted by all."""
    common = [name for name in posted[0] if all(name in other for other in posted)]
    return min(common, key=lambda name: max(other[name] for other in posted), default=EAGER)
