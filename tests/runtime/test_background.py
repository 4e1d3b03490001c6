"""A thread that works while calls go on: what it does first, what it leaves, and how a process ends or forks meanwhile."""

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
    """Has pieces of work, notes when it does one, and waits for `may_go` before that."""

    may_go = threading.Event()

    def __init__(self, name: str, pieces: int, done: list[str]) -> None:
        self.name, self.pieces, self.done = name, pieces, done

    def work(self) -> bool:
        assert Worker.may_go.wait(PATIENCE)
        self.done.append(self.name)
        self.pieces -= 1
        return self.pieces > 0


@pytest.fixture(autouse=True)
def held() -> None:
    Worker.may_go = threading.Event()


def test_what_was_wanted_last_comes_first_and_others_take_turns() -> None:
    done: list[str] = []
    found = Background()
    workers = [Worker(name, pieces, done) for name, pieces in (("a", 1), ("b", 2), ("c", 1), ("b again", 1))]
    for worker in workers:
        found.enqueue(worker)
        if worker.name == "a":
            while found._queue:  # until the thread has taken it
                time.sleep(0.001)
    found.enqueue(workers[1])
    Worker.may_go.set()
    found.finish()
    assert done == ["a", "b", "b again", "c", "b"]
    assert found._thread is None
    found.finish()


def test_a_failure_is_logged_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Worker):
        def work(self) -> bool:
            super().work()
            raise SystemExit("no more")

    done: list[str] = []
    found, workers = Background(), [Worker("right", 1, done), Failing("wrong", 1, done)]
    for worker in workers:
        found.enqueue(worker)
    Worker.may_go.set()
    found.finish()
    assert sorted(done) == ["right", "wrong"]
    (record,) = [record for record in caplog.records if record.name == "dynaxla"]
    assert record.exc_info is not None
    assert "no more" in str(record.exc_info[1])


def test_what_waits_is_not_kept_alive_and_nor_is_what_is_done() -> None:
    done: list[str] = []
    found, first, second = Background(), Worker("first", 1, done), Worker("second", 1, done)
    found.enqueue(first)
    while found._queue:
        time.sleep(0.001)
    found.enqueue(second)
    references = [weakref.ref(first), weakref.ref(second)]
    del second
    gc.collect()
    assert references[1]() is None
    Worker.may_go.set()
    found.finish()
    del first
    gc.collect()
    assert (done, references[0]()) == (["first"], None)


def test_the_thread_itself_does_not_wait_for_its_end() -> None:
    class Waiting(Worker):
        def work(self) -> bool:
            found.finish()
            return super().work()

    done: list[str] = []
    found, worker = Background(), Waiting("waiting", 1, done)
    found.enqueue(worker)
    Worker.may_go.set()
    found.finish()
    assert done == ["waiting"]


def test_it_rests_while_calls_run_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only in its own thread, only then, and no profile function is left."""
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
    found, worker = Background(), Python("python", 1, done)
    found.enqueue(worker)
    found.finish()
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
def test_a_fork_and_the_end_of_python_while_the_thread_compiles() -> None:
    """The child has no thread, and nothing that waits for it. The end waits for one compilation of 27, and calls come after it, too."""
    done = completed(SCRIPT)
    assert (done.returncode, done.stdout) == (0, "0\n1 1 False\n"), done.stderr
