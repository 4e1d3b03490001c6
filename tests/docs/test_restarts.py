"""Tests of docs/many-processes.md with torchrun: one of three processes is killed, and the run continues from the last checkpoint."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_pages import blocks_of

from support.processes.fork_server import found_here
from support.processes.time_limits import PATIENCE

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="this torch has no gloo"),
]

# Kills a process in the fourth step, after its backward pass, if no process has been killed before.
KILLED = """    loss.backward()
    if number == 4 and rank == 2 and not Path("killed").exists():
        Path("killed").touch()
        import os, signal
        os.kill(os.getpid(), signal.SIGKILL)
"""


def run(folder: Path, processes: int, restarts: int = 0) -> tuple[int, dict[int, tuple[int, float]], str]:
    """Returns the status of a run, the number of processes and the loss of each step, as last printed, and the end of stderr."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    environment = {**found_here(), "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    command = [*torchrun, f"--max-restarts={restarts}", "train.py"]
    process = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False)
    printed_steps = re.findall(r"step (\d+) on (\d): (\S+)", process.stdout)
    return process.returncode, {int(number): (int(world), float(loss)) for number, world, loss in printed_steps}, process.stderr[-3000:]


def program(folder: Path, *, killed: bool) -> Path:
    folder.mkdir()
    text = blocks_of("many-processes")[0]
    assert text.count("    loss.backward()\n") == 1
    (folder / "train.py").write_text(text.replace("    loss.backward()\n", KILLED) if killed else text)
    return folder


@pytest.mark.parametrize("restarts", [0, 1])
def test_run_continues_after_a_crash(restarts: int, tmp_path: Path) -> None:
    """Without restarts by torchrun, the run is started again with two processes. With restarts, three processes continue."""
    status, expected, errors = run(program(tmp_path / "whole", killed=False), 3)
    assert status == 0, errors
    assert {number: world for number, (world, _) in expected.items()} == dict.fromkeys(range(1, 9), 3)
    folder = program(tmp_path / "killed", killed=True)
    status, steps, errors = run(folder, 3, restarts)
    assert (folder / "killed").exists()
    assert (status == 0) == (restarts == 1), errors
    if not restarts:
        assert list(steps) == [1, 2, 3]
        status, later_steps, errors = run(folder, 2)
        assert status == 0, errors
        assert {number: world for number, (world, _) in later_steps.items()} == dict.fromkeys(range(3, 9), 2)
        steps |= later_steps
    assert steps.keys() == expected.keys()
    for number, (_, loss) in steps.items():
        assert abs(loss - expected[number][1]) < 1e-6, (number, loss, expected[number])
