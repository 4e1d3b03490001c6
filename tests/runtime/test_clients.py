"""Tests of XLA's clients: the thread pool has torch's number of threads, and the user's environment and JAX do not change."""

from __future__ import annotations

import contextlib
import os

import pytest
import torch
from jax._src import xla_bridge

from dynaxla.runtime import clients, private
from support.processes.scripts import run_script


def test_each_number_of_threads_has_its_own_client() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        client = clients.cpu_device()
        torch.set_num_threads(2)
        assert clients.cpu_device() is not client
        torch.set_num_threads(1)
        assert clients.cpu_device() is client
    finally:
        torch.set_num_threads(before)
    assert "PJRT_NPROC" not in os.environ


def test_concurrent_first_uses_create_each_client_once() -> None:
    """The number of pool threads, which are found by their name, shows the number of clients. No thread sees the environment variable."""
    printed = run_script("""
import contextlib, os, sys, threading, time, torch
import dynaxla
from dynaxla.runtime import clients, private
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
    for attempt in range(300):  # a new thread takes a moment until it has its name
        names = []
        for task in os.listdir("/proc/self/task"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that was joined may take a moment to end
                names.append(open(f"/proc/self/task/{task}/comm").read().strip())
        if names.count("tf_XLAEigen") >= sum(clients._own_clients):
            break
        time.sleep(0.1)
    assert names.count("tf_XLAEigen") == sum(clients._own_clients), (names, clients._own_clients)
assert os.system('test -z "$PJRT_NPROC"') == 0, "the variable is still there for C"
print(failed, seen)
""")
    assert printed == "[] set()\n"


def test_results_with_any_number_of_threads() -> None:
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


@pytest.mark.skipif(not hasattr(xla_bridge, "_backends"), reason="this JAX stores its clients elsewhere")
def test_jaxs_own_clients_are_not_started() -> None:
    run_script("""
import torch
from jax._src import xla_bridge
torch.compile(lambda x: torch.nn.functional.dropout(x * 2) @ x, backend="dynaxla")(torch.ones(3, 3))
assert not xla_bridge._backends, xla_bridge._backends
""")


def test_c_environment_sets_a_variable_for_c_but_not_for_python(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "DYNAXLA_TEST_VARIABLE"
    monkeypatch.delenv(name, raising=False)
    for set_by_user, expected in ((False, "ours"), (True, "users")):
        if set_by_user:
            monkeypatch.setenv(name, "users")
        with clients.c_environment(name, "ours") as value:
            assert value == expected
            assert os.environ.get(name) == ("users" if set_by_user else None)
            assert os.system(f'test "${name}" = {expected}') == 0
        assert os.system(f'test "${name}" = "{"users" if set_by_user else ""}"') == 0


def test_environment_sets_a_variable_unless_the_user_has_set_it(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "DYNAXLA_TEST_VARIABLE"
    monkeypatch.delenv(name, raising=False)
    with contextlib.suppress(ValueError), clients.environment(name, "ours"):
        assert os.environ[name] == "ours"
        raise ValueError("a client that cannot be made")
    assert name not in os.environ
    monkeypatch.setenv(name, "users")
    with clients.environment(name, "ours"):
        assert os.environ[name] == "users"
    assert os.environ[name] == "users"


def test_is_own_and_threads_of_a_device() -> None:
    device = clients.cpu_device()
    assert clients.is_own(device)
    assert clients.threads_of(device) == os.environ.get("PJRT_NPROC", str(torch.get_num_threads()))
    with private.force_public():
        other = clients.cpu_device()
    assert not clients.is_own(other)
    assert clients.threads_of(other) == str(os.cpu_count())
