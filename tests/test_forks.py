"""Tests of forked children of processes that have used XLA: correct results or a clear error, and no hang."""

from __future__ import annotations

import os

import pytest

from support.processes.scripts import completed
from support.processes.time_limits import FOR_A_CHILD
from support.timing import quick_compilation

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")

# The beginning of each script. `run(child)` runs a function in a forked child, and prints its exit status. Autograd starts threads in the
# first backward pass of a process, which a child cannot run afterwards. On a CUDA build without a GPU, only a pass on fake tensors does so.
_BEGIN = """
import faulthandler, os, sys, torch
import dynaxla
torch.set_num_threads({threads})
net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
x = torch.randn(16, 64)
torch.ones((), requires_grad=True).backward()

def run(child):
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        faulthandler.dump_traceback_later({patience}, exit=True)
        child()
        sys.exit(0)  # an ordinary end, which frees what there is
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def run_script(script: str, threads: int = 1) -> tuple[str, str]:
    """Runs a program in its own process, and returns what it prints to stdout and stderr."""
    code = _BEGIN.replace("{threads}", str(threads)).replace("{patience}", str(FOR_A_CHILD)) + script
    process = completed(code, XLA_FLAGS=quick_compilation.flags())
    assert process.returncode == 0, process.stdout + process.stderr[-3000:]
    return process.stdout, process.stderr


@pytest.mark.sample(usual=1)
@pytest.mark.parametrize("threads", [1, 2])
def test_child_compiles_and_calls_its_parents_functions(threads: int) -> None:
    out, log = run_script(
        """
compiled = torch.compile(net, backend="dynaxla")
expected, trained = net(x), torch.autograd.grad(net(x).sum(), net[0].weight)[0]
assert torch.allclose(compiled(x), expected, atol=1e-5)
loss = compiled(x).sum()
new = lambda x: (x @ x.T).exp().sum(0) + 1
value = new(x / 9)

def child():  # torch itself would wait forever here for OpenMP's threads, if there are two
    assert torch.allclose(compiled(x), expected, atol=1e-5)
    torch.testing.assert_close(torch.autograd.grad(loss, net[0].weight)[0], trained, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        assert torch.allclose(torch.compile(net, backend="dynaxla")(x[:3]), expected[:3], atol=1e-5)
        for options in ({}, {"freeze": True}):
            torch._dynamo.reset()
            assert torch.allclose(torch.compile(new, backend="dynaxla", options=options)(x / 9), value, atol=1e-4)
        torch._dynamo.reset()
        assert torch.allclose(torch.compile(new, backend="dynaxla_retrace")(x / 9), value, atol=1e-4)
        assert torch.get_num_threads() == THREADS
        torch.set_num_threads(1)
        assert torch.allclose(compiled(x), expected, atol=1e-5)
    net[0].weight.data.zero_()
    assert torch.allclose(compiled(x), net(x), atol=1e-5), "the child's own parameters"

run(child)
run(child)
assert torch.allclose(compiled(x), expected, atol=1e-5), "the parent goes on"
""".replace("THREADS", str(threads)),
        threads,
    )
    assert out == "0\n0\n"
    assert log.count("torch's own kernels run compiled graphs in this process") == 2, "each child logs it once"


def test_child_of_a_process_that_has_only_imported_dynaxla_uses_xla() -> None:
    out, log = run_script("""
from dynaxla.observe import metrics
def child():
    with torch.no_grad():
        assert torch.allclose(torch.compile(net, backend="dynaxla")(x), net(x), atol=1e-5)
    assert metrics.snapshot()["calls"] == 1
run(child)
""")
    assert out == "0\n"
    assert "torch's own kernels" not in log


def test_child_calls_frozen_and_split_programs_and_steps_of_its_parent() -> None:
    out, _ = run_script("""
sgd = torch.optim.SGD(net.parameters(), lr=0.0)

@dynaxla.compile_step(fullgraph=True)
def step(x):
    loss = net(x).square().mean()
    loss.backward()
    sgd.step()
    sgd.zero_grad()
    return loss

def pick(x):
    return x[x > 0] * 2

with torch.no_grad():
    split, frozen = torch.compile(pick, backend="dynaxla"), torch.compile(net, backend="dynaxla", options={"freeze": True})
    split(x), frozen(x)
loss = step(x)

def child():
    with torch.no_grad():
        assert torch.equal(split(x), pick(x))
        assert torch.allclose(frozen(x), net(x), atol=1e-5)
        net[2].bias.add_(1)
        assert torch.allclose(frozen(x), net(x), atol=1e-5)
        net[2].bias.sub_(1)
    assert torch.allclose(step(x), loss, atol=1e-5)
    assert torch.allclose(step(x[:5]), net(x[:5]).square().mean(), atol=1e-5), "a step recorded in the child"
run(child)
""")
    assert out == "0\n"


def test_fallback_error_is_raised_in_a_child() -> None:
    out, _ = run_script("""
compiled = torch.compile(net, backend="dynaxla", options={"fallback": "error"})
with torch.no_grad():
    compiled(x)
def child():
    try:
        with torch.no_grad():
            compiled(x)
    except dynaxla.errors.ForkError as error:
        assert "spawn" in str(error)
    else:
        raise AssertionError
run(child)
""")
    assert out == "0\n"


def test_fork_while_another_thread_holds_locks() -> None:
    out, _ = run_script("""
import threading
from dynaxla.observe import coverage, metrics
from dynaxla.runtime import capture_lock, clients
from dynaxla.tuning import tuner
compiled = torch.compile(net, backend="dynaxla")
with torch.no_grad():
    compiled(x)
held, done = threading.Event(), threading.Event()

def hold():
    with metrics._lock, coverage._lock, tuner._lock, capture_lock.capturing(), clients._creation_lock:
        held.set()
        done.wait()

threading.Thread(target=hold, daemon=True).start()
held.wait()

def child():
    with torch.no_grad():
        compiled(x)
        torch.compile(lambda x: x.sin() + 1, backend="dynaxla")(x)
run(child)
done.set()
""")
    assert out == "0\n"


def test_workers_of_a_data_loader_and_of_a_pool() -> None:
    out, _ = run_script(
        """
import multiprocessing
compiled = torch.compile(lambda x: (x * 2).tanh().sum(-1), backend="dynaxla")
compiled(x)

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return compiled(x + index)

def square(number):
    return torch.compile(lambda x: x * x, backend="dynaxla")(torch.tensor(float(number))).item()

found = torch.cat(list(torch.utils.data.DataLoader(Data(), batch_size=2, num_workers=1, multiprocessing_context="fork", timeout=600)))
assert torch.allclose(found, torch.stack([((x + index) * 2).tanh().sum(-1) for index in range(8)]), atol=1e-4)
with multiprocessing.get_context("fork").Pool(2) as pool:
    assert pool.map_async(square, range(4)).get(600) == [0.0, 1.0, 4.0, 9.0]
print("done")
""",
        threads=2,
    )
    assert out == "done\n"


def test_child_of_a_process_that_has_used_jax() -> None:
    out, _ = run_script("""
import jax, warnings
jax.jit(lambda x: x + 1)(1.0)
warnings.simplefilter("ignore")
def child():
    with torch.no_grad():
        assert torch.allclose(torch.compile(net, backend="dynaxla")(x), net(x), atol=1e-5)
    sys.stderr.flush()
    os._exit(0)  # JAX itself cannot end there
run(child)
""")
    assert out == "0\n"
