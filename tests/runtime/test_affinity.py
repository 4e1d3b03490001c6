"""How many processors a thread may run on, as oneDNN takes it to be."""

from __future__ import annotations

import os
import threading

import pytest

from dynaxla.runtime import affinity
from support import internals

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the system does not tell")


def in_a_new_thread() -> tuple[int, int]:
    """What a thread sees at its first look, and after it has been allowed other processors."""
    seen: list[int] = []

    def look() -> None:
        seen.append(affinity.processors())
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        seen.append(affinity.processors())

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return seen[0], seen[1]


def test_a_thread_keeps_what_it_saw_first() -> None:
    allowed = len(os.sched_getaffinity(0))
    assert in_a_new_thread() == (allowed, allowed)
    assert len(os.sched_getaffinity(0)) == allowed, "this thread is another one"


def test_each_thread_looks_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    before = affinity.processors()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 4, 5, 6})
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None)
    assert in_a_new_thread() == (7, 7)
    assert affinity.processors() == before


def test_all_threads_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = {10: {0, 1}, 11: {2, 3}, 12: {0, 1}}
    monkeypatch.setattr(os, "listdir", lambda _: [str(thread) for thread in (10, 11, 12, 13)])
    monkeypatch.setattr(os.path, "isdir", lambda path: path == "/proc/self/task")

    def of(thread: int) -> set[int]:
        if thread == 13:
            raise ProcessLookupError  # it has ended in the meantime
        return allowed[thread]

    monkeypatch.setattr(os, "sched_getaffinity", of)
    assert affinity.all_threads_have(2)
    assert not affinity.all_threads_have(3)
    allowed[12] = {0}
    assert not affinity.all_threads_have(2)


def test_where_it_cannot_be_known(monkeypatch: pytest.MonkeyPatch) -> None:
    internals.threads_folder(monkeypatch, "/nowhere/at/all")
    assert not affinity.all_threads_have(len(os.sched_getaffinity(0)))
