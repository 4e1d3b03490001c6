"""docs/many-processes.md under torchrun: one of three processes is killed, and the run goes on from the last checkpoint."""

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

# In the middle of the fourth step, behind its backward pass, if no process has been killed before.
KILLED = """    loss.backward()
    if number == 4 and rank == 2 and not Path("killed").exists():
        Path("killed").touch()
        import os, signal
        os.kill(os.getpid(), signal.SIGKILL)
"""


def run(folder: Path, processes: int, restarts: int = 0) -> tuple[int, dict[int, tuple[int, float]], str]:
    """A run's status; on how many processes each step ran, and its loss, as said last; what it said on stderr."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    environment = {**found_here(), "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    command = [*torchrun, f"--max-restarts={restarts}", "train.py"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False)
    found = re.findall(r"step (\d+) on (\d): (\S+)", done.stdout)
    return done.returncode, {int(number): (int(world), float(loss)) for number, world, loss in found}, done.stderr[-3000:]


def program(folder: Path, *, killed: bool) -> Path:
    folder.mkdir()
    text = blocks_of("many-processes")[0]
    assert text.count("    loss.backward()\n") == 1
    (folder / "train.py").write_text(text.replace("    loss.backward()\n", KILLED) if killed else text)
    return folder


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_run_goes_on_after_a_crash(restarts: int, tmp_path: Path) -> None:
    """On two processes when it is started again with two; on three when torchrun starts them again."""
    status, expected, said = run(program(tmp_path / "whole", killed=False), 3)
    assert status == 0, said
    assert {number: world for number, (world, _) in expected.items()} == dict.fromkeys(range(1, 9), 3)
    folder = program(tmp_path / "killed", killed=True)
    status, found, said = run(folder, 3, restarts)
    assert (folder / "killed").exists()
    assert (status == 0) == (restarts == 1), said
    if not restarts:
        assert list(found) == [1, 2, 3]
        status, rest, said = run(folder, 2)
        assert status == 0, said
        assert {number: world for number, (world, _) in rest.items()} == dict.fromkeys(range(3, 9), 2)
        found |= rest
    assert found.keys() == expected.keys()
    for number, (_, loss) in found.items():
        assert abs(loss - expected[number][1]) < 1e-6, (number, loss, expected[number])
