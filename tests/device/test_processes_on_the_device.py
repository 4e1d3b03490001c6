"""Tests of the device with threads, forks, signals, the exit of a process, and other compilers."""

from __future__ import annotations

from pathlib import Path

import pytest

from cases.processes.process_ends import BEGINNING, ENDS
from support.processes.device_checks import NEEDS_DEVICE, run_checks
from support.processes.scripts import completed, run_script

pytestmark = NEEDS_DEVICE


def test_threads_forks_and_interrupts() -> None:
    run_checks("sharing")


@pytest.mark.thorough
def test_loops_do_not_grow_memory() -> None:
    """`python -m cases.device.growth 100000` runs longer loops."""
    run_checks("growth")


@pytest.mark.sample(usual=4)
@pytest.mark.parametrize("name", ENDS)
def test_exit_status_and_output(name: str) -> None:
    """A process exits with the program's own status, and without errors that are not the program's."""
    end, status, error, printed = ENDS[name]
    process = completed(BEGINNING + end)
    assert process.returncode == status, process.stderr[-2000:]
    assert process.stderr.strip().rpartition("\n")[2] == error, process.stderr[-2000:]
    assert process.stdout.strip() == printed


def test_finalizer_that_uses_the_device_at_exit() -> None:
    """The ops of the finalizer run, or raise an error that Python prints and ignores. The exit status does not change."""
    process = completed(
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
        own=True,  # children of the fork server do not delete their globals at exit
    )
    assert (process.returncode, process.stdout) == (3, "looks\n"), process.stderr[-2000:]


def test_enable_after_a_script_for_cuda_and_after_other_compilers() -> None:
    """Functions compiled before the device is enabled run afterwards, too."""
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


def test_cached_graphs_are_shared_by_processes_with_and_without_the_device(tmp_path: Path) -> None:
    script = """
import sys, torch, dynaxla
from dynaxla.observe import metrics
if sys.argv[2] == "with":
    dynaxla.device.enable()
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()).eval()
with torch.no_grad():
    torch.compile(model, backend="dynaxla", options={"cache": sys.argv[1]})(torch.ones(2, 4))
print(metrics.snapshot().get("graphs_from_cache", 0))
"""
    for first, second in (("without", "with"), ("with", "without")):
        folder = tmp_path / first
        cached_graphs = [int(run_script(script, [str(folder), enabled])) for enabled in (first, second)]
        assert cached_graphs == [0, 1], first
