"""Tests of the number of processors that a thread may use, as oneDNN counts them."""

from __future__ import annotations

import os
import threading

import pytest

from dynaxla.runtime import affinity
from support import internals

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system does not report a thread's processors")


def in_a_new_thread() -> tuple[int, int]:
    """Returns the result of a new thread's first query, and of a query after the thread has been allowed another number of processors."""
    counts: list[int] = []

    def query() -> None:
        counts.append(affinity.processors())
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        counts.append(affinity.processors())

    thread = threading.Thread(target=query)
    thread.start()
    thread.join()
    return counts[0], counts[1]


def test_result_of_a_threads_first_query_stays() -> None:
    allowed = len(os.sched_getaffinity(0))
    assert in_a_new_thread() == (allowed, allowed)
    assert len(os.sched_getaffinity(0)) == allowed, "the affinity of this thread was changed"


def test_each_thread_has_its_own_result(monkeypatch: pytest.MonkeyPatch) -> None:
    before = affinity.processors()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 4, 5, 6})
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None)
    assert in_a_new_thread() == (7, 7)
    assert affinity.processors() == before


def test_all_threads_have(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = {10: {0, 1}, 11: {2, 3}, 12: {0, 1}}
    monkeypatch.setattr(os, "listdir", lambda _: [str(thread) for thread in (10, 11, 12, 13)])
    monkeypatch.setattr(os.path, "isdir", lambda path: path == "/proc/self/task")

    def sched_getaffinity(thread: int) -> set[int]:
        if thread == 13:
            raise ProcessLookupError  # the thread has ended in the meantime
        return allowed[thread]

    monkeypatch.setattr(os, "sched_getaffinity", sched_getaffinity)
    assert affinity.all_threads_have(2)
    assert not affinity.all_threads_have(3)
    allowed[12] = {0}
    assert not affinity.all_threads_have(2)


def test_all_threads_have_without_a_list_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    internals.threads_folder(monkeypatch, "/nowhere/at/all")
    assert not affinity.all_threads_have(len(os.sched_getaffinity(0)))
