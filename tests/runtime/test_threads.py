"""XLA's pool follows torch's number of threads, and leaves the user's environment and JAX alone."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from jax._src import xla_bridge
from patience import PATIENCE

from dynaxla.runtime import clients


def test_each_number_of_threads_has_a_client() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = clients.cpu_device()
        torch.set_num_threads(2)
        assert clients.cpu_device() is not one
        torch.set_num_threads(1)
        assert clients.cpu_device() is one
    finally:
        torch.set_num_threads(before)
    assert "PJRT_NPROC" not in os.environ


def run_script(script: str) -> str:
    """What a program of its own prints."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_first_use_from_many_threads_makes_each_client_once_and_shows_nobody_the_environment() -> None:
    """A client's pool has as many threads, which bear a name, as the number that the client was made for."""
    printed = run_script("""
import os, sys, threading, torch
import dynaxla
from dynaxla.runtime import clients
sys.setswitchinterval(1e-6)
barrier, seen, failed, running = threading.Barrier(8), set(), [], True

def watch():
    while running:
        seen.update(name for name in os.environ.copy() if "NPROC" in name)

def work(number):
    try:
        torch.set_num_threads(1 + number % 2)
        barrier.wait()
        assert clients.cpu_device() is clients.cpu_device()
    except BaseException as error:
        failed.append(error)

watcher = threading.Thread(target=watch)
watcher.start()
threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
running = False
watcher.join()
if os.path.isdir("/proc/self/task"):
    names = [open(f"/proc/self/task/{task}/comm").read().strip() for task in os.listdir("/proc/self/task")]
    assert names.count("tf_XLAEigen") == sum(clients._own_clients), (names, clients._own_clients)
assert os.system('test -z "$PJRT_NPROC"') == 0, "the variable is still there for C"
print(failed, seen)
""")
    assert printed == "[] set()\n"


def test_steps_and_models_are_captured_in_several_threads_at_once() -> None:
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

    compiled, plain = dynaxla.compile_step(make(model, optimizers[0])), make(eager, optimizers[1])
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


def test_result_is_the_same_on_any_number_of_threads() -> None:
    x = torch.randn(256, 256)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            torch._dynamo.reset()
            compiled = torch.compile(lambda x: (x @ x).relu(), backend="dynaxla")
            torch.testing.assert_close(compiled(x), (x @ x).relu(), rtol=1e-4, atol=1e-4)
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(not hasattr(xla_bridge, "_backends"), reason="this JAX keeps its clients elsewhere")
def test_jax_is_not_started() -> None:
    script = """
import torch
from jax._src import xla_bridge
torch.compile(lambda x: torch.nn.functional.dropout(x * 2) @ x, backend="dynaxla")(torch.ones(3, 3))
assert not xla_bridge._backends, xla_bridge._backends
"""
    subprocess.run([sys.executable, "-c", script], check=True)
