"""Tests of the lock with which one thread at a time captures graphs."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref

import torch

from dynaxla.runtime import capture_lock
from support.processes.scripts import run_script
from support.releases import fails_in_oldest


def is_taken() -> bool:
    """True if another thread cannot take the lock."""
    results: list[bool] = []

    def attempt() -> None:
        lock = capture_lock.exclusive()
        results.append(not lock.acquire(blocking=False))
        if not results[0]:
            lock.release()

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    return results[0]


def test_lock_blocks_other_threads_and_is_reentrant() -> None:
    assert not is_taken()
    with capture_lock.exclusive(), capture_lock.capturing():
        assert is_taken()
        with capture_lock.capturing():
            assert is_taken()
        assert is_taken()
    assert not is_taken()


def test_torch_is_compiling_during_a_nested_capture() -> None:
    assert not torch.compiler.is_compiling()
    with contextlib.suppress(ValueError), capture_lock.capturing():
        assert is_taken()
        with capture_lock.capturing():
            assert torch.compiler.is_compiling()
        assert torch.compiler.is_compiling(), "the outer capture continues"
        raise ValueError("a capture that fails")
    assert not torch.compiler.is_compiling()
    assert not is_taken()


def test_lock_is_torch_dynamos_compile_lock() -> None:
    from torch._dynamo.convert_frame import compile_lock

    assert capture_lock.exclusive() is compile_lock


@fails_in_oldest("torch.compile in several threads at once ends the process, whatever the backend (Python 3.12.1)")
def test_several_threads_capture_steps_and_models() -> None:
    printed = run_script("""
import copy, sys, threading, torch
import dynaxla
dynaxla.compile_step  # two threads that import torch._dynamo at once may meet half of it: that is Python's
sys.setswitchinterval(1e-6)
barrier, failed = threading.Barrier(4), []

def train(number):
    torch.manual_seed(number)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    eager, x = copy.deepcopy(model), torch.randn(3, 4)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, eager)]

    def make(model, optimizer):
        def step(x):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss
        return step

    compiled, plain = dynaxla.compile_step(make(model, optimizers[0]), fullgraph=True), make(eager, optimizers[1])
    barrier.wait()
    for _ in range(3):
        torch.testing.assert_close(compiled(x), plain(x).detach(), rtol=1e-4, atol=1e-5)

def infer(number):
    torch.manual_seed(number)
    model, x = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU()), torch.randn(3, 4)
    compiled = torch.compile(model, backend="dynaxla")
    barrier.wait()
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)

def work(number):
    try:
        (train if number % 2 else infer)(number)
    except BaseException as error:
        failed.append(repr(error))

threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(failed)
""")
    assert printed == "[]\n"


def test_is_capturing_is_true_only_in_the_capturing_thread() -> None:
    is_capturing_in_other_thread = []
    assert not capture_lock.is_capturing()
    with capture_lock.capturing():
        thread = threading.Thread(target=lambda: is_capturing_in_other_thread.append(capture_lock.is_capturing()))
        thread.start()
        thread.join()
        with capture_lock.capturing():
            pass
        assert capture_lock.is_capturing()
    assert not capture_lock.is_capturing()
    assert is_capturing_in_other_thread == [False]


def test_kept_objects_live_until_the_outermost_capture_ends() -> None:
    class Thing:
        pass

    with capture_lock.capturing():
        with capture_lock.capturing():
            obj = Thing()
            reference = weakref.ref(obj)
            capture_lock.keep(obj)
            del obj
        gc.collect()
        assert reference() is not None
    gc.collect()
    assert reference() is None
