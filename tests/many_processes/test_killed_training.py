"""Tests of training in which a process is killed during a step: the others raise, lose no state, and end with their own exit status."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cases.processes import killed_training
from support.processes.fork_server import found_here
from support.processes.time_limits import PATIENCE

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="this torch has no gloo"),
]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.mark.parametrize("victim", [0, 1])  # rank 0 has the store
@pytest.mark.parametrize("name", killed_training.CASES)
def test_others_end_properly_after_a_process_is_killed(name: str, victim: int, tmp_path: Path) -> None:
    rendezvous, checkpoint = f"tcp://127.0.0.1:{free_port()}", tmp_path / "checkpoint"
    command = [sys.executable, killed_training.__file__, name]
    processes = [
        subprocess.Popen(
            [*command, str(rank), rendezvous, str(checkpoint), str(victim)], env=found_here(), stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=PATIENCE)[1] for process in processes]
    statuses = [process.returncode for process in processes]
    assert statuses[victim] == -signal.SIGKILL, errors[victim][-3000:]
    assert statuses[1 - victim] == killed_training.STATUS, errors[1 - victim][-3000:]
    assert len(torch.load(checkpoint)) > 5
