"""The device in a process with other things: threads, forks, signals, its exit, other compilers, and what others have done before."""

from __future__ import annotations

from pathlib import Path

import pytest

from cases.processes.process_ends import BEGINNING, ENDS
from support.processes.device_checks import NEEDS_DEVICE, run_checks
from support.processes.scripts import completed, run_script

pytestmark = NEEDS_DEVICE


def test_threads_children_and_interruptions() -> None:
    run_checks("sharing")


@pytest.mark.thorough
def test_loops_do_not_grow_memory() -> None:
    """`python -m cases.device.growth 100000` runs longer ones."""
    run_checks("growth")


@pytest.mark.sample(usual=4)
@pytest.mark.parametrize("name", ENDS)
def test_exits(name: str) -> None:
    """With the program's own status, and without a crash; silently, where nothing of its own goes wrong."""
    end, status, error, printed = ENDS[name]
    done = completed(BEGINNING + end)
    assert done.returncode == status, done.stderr[-2000:]
    assert done.stderr.strip().rpartition("\n")[2] == error, done.stderr[-2000:]
    assert done.stdout.strip() == printed


def test_a_finalizer_at_the_exit() -> None:
    """What it does with a tensor is done, or refused by an exception that Python prints and ignores: the process ends as it would."""
    done = completed(
        BEGINNING
        + """
class Last:
    def __init__(self):
        self.x = x * 2

    def __del__(self):
        print("looks", flush=True)
        self.x.add_(1).tolist()

last = Last()
sys.exit(3)
""",
        own=True,  # the fork server's children keep their globals to the end
    )
    assert (done.returncode, done.stdout) == (3, "looks\n"), done.stderr[-2000:]


def test_what_others_did_before_and_do_after() -> None:
    """A script written for CUDA asks what there is; Inductor has compiled and trained, and does so again."""
    run_script("""
import warnings, torch
assert not torch.cuda.is_available()
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()).to(device)
optimizer = torch.optim.AdamW(model.parameters())
with torch.autocast(device.type, dtype=torch.bfloat16, enabled=False), torch.random.fork_rng():
    model(torch.ones(2, 4, device=device)).sum().backward()
optimizer.step()
torch.accelerator.is_available(), torch.get_default_device(), torch.amp.GradScaler(device.type, enabled=False)
x = torch.randn(3, 4)
for backend in ("inductor", "aot_eager", "dynaxla"):
    before = torch.compile(lambda x: torch.tanh(x @ x.T) * 2, backend=backend)
    expected = before(x)

    import dynaxla
    dynaxla.device.enable()
    torch.testing.assert_close(before(x), expected)
    torch.testing.assert_close(torch.compile(lambda x: torch.tanh(x @ x.T) * 2, backend=backend)(x), expected)
    for function in (torch.compile(model, backend=backend), model):
        optimizer.zero_grad()
        function(x).sum().backward()
        optimizer.step()
""")


def test_graphs_that_an_earlier_process_left_are_found(tmp_path: Path) -> None:
    """In processes that have enabled the device and in those that have not, from one another."""
    script = """
import sys, torch, dynaxla
from dynaxla.observe import metrics
if sys.argv[2] == "with":
    dynaxla.device.enable()
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()).eval()
with torch.no_grad():
    torch.compile(model, backend="dynaxla", options={"cache": sys.argv[1]})(torch.ones(2, 4))
print(metrics.snapshot().get("kept_graphs", 0))
"""
    for first, second in (("without", "with"), ("with", "without")):
        folder = tmp_path / first
        found = [int(run_script(script, [str(folder), enabled])) for enabled in (first, second)]
        assert found == [0, 1], first
