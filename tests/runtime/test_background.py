"""Tests of the background thread: the order of its work, references, exceptions, the end of a process, and forks."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import weakref

import pytest

from dynaxla.runtime import background
from dynaxla.runtime.background import Background
from support import internals
from support.processes.scripts import completed
from support.processes.time_limits import FOR_A_CHILD, PATIENCE


class Worker:
    """Has pieces of work. Waits for `may_go` before each piece, and records it."""

    may_go = threading.Event()

    def __init__(self, name: str, pieces: int, done: list[str]) -> None:
        self.name, self.pieces, self.done = name, pieces, done

    def work(self) -> bool:
        assert Worker.may_go.wait(PATIENCE)
        self.done.append(self.name)
        self.pieces -= 1
        return self.pieces > 0


@pytest.fixture(autouse=True)
def new_event() -> None:
    Worker.may_go = threading.Event()


def test_last_enqueued_worker_comes_first_and_others_alternate() -> None:
    done: list[str] = []
    queue = Background()
    workers = [Worker(name, pieces, done) for name, pieces in (("a", 1), ("b", 2), ("c", 1), ("b again", 1))]
    for worker in workers:
        queue.enqueue(worker)
        if worker.name == "a":
            while queue._queue:  # until the thread has taken the worker
                time.sleep(0.001)
    queue.enqueue(workers[1])
    Worker.may_go.set()
    queue.finish()
    assert done == ["a", "b", "b again", "c", "b"]
    assert queue._thread is None
    queue.finish()


def test_failure_is_logged_and_other_workers_continue(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Worker):
        def work(self) -> bool:
            super().work()
            raise SystemExit("no more")

    done: list[str] = []
    queue, workers = Background(), [Worker("right", 1, done), Failing("wrong", 1, done)]
    for worker in workers:
        queue.enqueue(worker)
    Worker.may_go.set()
    queue.finish()
    assert sorted(done) == ["right", "wrong"]
    (record,) = [record for record in caplog.records if record.name == "dynaxla"]
    assert record.exc_info is not None
    assert "no more" in str(record.exc_info[1])


def test_queue_does_not_keep_workers_alive() -> None:
    done: list[str] = []
    queue, first, second = Background(), Worker("first", 1, done), Worker("second", 1, done)
    queue.enqueue(first)
    while queue._queue:
        time.sleep(0.001)
    queue.enqueue(second)
    references = [weakref.ref(first), weakref.ref(second)]
    del second
    gc.collect()
    assert references[1]() is None
    Worker.may_go.set()
    queue.finish()
    del first
    gc.collect()
    assert (done, references[0]()) == (["first"], None)


def test_finish_in_the_thread_itself_does_not_wait() -> None:
    class Waiting(Worker):
        def work(self) -> bool:
            queue.finish()
            return super().work()

    done: list[str] = []
    queue, worker = Background(), Waiting("waiting", 1, done)
    queue.enqueue(worker)
    Worker.may_go.set()
    queue.finish()
    assert done == ["waiting"]


def test_thread_yields_during_eager_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the background thread yields, only during eager calls, and it leaves no profile function."""
    rests = internals.background_rests(monkeypatch)

    class Python(Worker):
        def work(self) -> bool:
            before = len(rests)
            with background.eager_call():
                self.done.append("a call")
            self.done.append(str(len(rests) - before > 0))
            before = len(rests)
            self.done.append("no call")
            self.done.append(str(len(rests) - before > 0))
            return False

    done: list[str] = []
    queue, worker = Background(), Python("python", 1, done)
    queue.enqueue(worker)
    queue.finish()
    assert done == ["a call", "True", "no call", "False"]
    assert set(rests) == {(background._SLEEP_SECONDS, "dynaxla")}
    assert (sys.getprofile(), background._eager_calls) == (None, [])


SCRIPT = """
import atexit, faulthandler, os, sys, threading, torch
import dynaxla
from dynaxla.engine import build as engine_build
from dynaxla.observe import metrics
from dynaxla.runtime.background import _background
torch.set_num_threads(1)
compiled = torch.compile(lambda x: (x @ x.T).sin(), backend="dynaxla", dynamic=True, options={"compile": "background"})
may_go, right, started = threading.Event(), engine_build.build, threading.Event()

def build(unit, specialised):
    started.set()
    assert may_go.wait(PATIENCE)
    return right(unit, specialised)

def call(size):
    assert torch.allclose(compiled(torch.ones(size, 4)), torch.tensor(4.0).sin())

engine_build.build = build
call(3)
assert started.wait(PATIENCE)
for size in range(4, 30):
    call(size)

def hold():
    with _background._changed:
        has_it.set()
        may_go_on.wait(PATIENCE)

has_it, may_go_on = threading.Event(), threading.Event()
threading.Thread(target=hold).start()
assert has_it.wait(PATIENCE)
pid = os.fork()
if pid == 0:
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    dynaxla.synchronize()
    call(3)
    dynaxla.synchronize()
    assert metrics.snapshot()["by_torch"] == 1
    sys.exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
may_go_on.set()

def late():
    names = [thread.name for thread in threading.enumerate()]
    call(50)
    call(3)
    print(metrics.snapshot()["compile"], metrics.snapshot()["calls"], "dynaxla" in names)

atexit.register(late)
threading.Timer(0.2, may_go.set).start()
""".replace("PATIENCE", str(FOR_A_CHILD))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_fork_and_exit_while_the_thread_compiles() -> None:
    """The child has no thread, and waits for none. The exit waits for one of 27 compilations; calls after that work, too."""
    process = completed(SCRIPT)
    assert (process.returncode, process.stdout) == (0, "0\n1 1 False\n"), process.stderr
