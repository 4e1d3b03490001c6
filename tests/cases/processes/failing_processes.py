"""Runs processes for tests/many_processes/test_process_collectives.py: one dies, hangs, calls other collectives, or ends early."""

from __future__ import annotations

import datetime
import os
import signal
import sys
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc

import dynaxla

# Seconds.
TIMEOUT = 10


def join(rank: int, world: int, rendezvous: str) -> None:
    timeout = datetime.timedelta(seconds=TIMEOUT)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world, timeout=timeout)


def compiled(reduction: str) -> Any:
    torch._dynamo.reset()
    options = {"distributed": "xla"}
    function = lambda x: fc.all_reduce(x * 2, reduction, dist.group.WORLD) + 1  # noqa: E731
    return torch.compile(function, backend="dynaxla", fullgraph=True, options=options)


def run(case: str, rank: int, world: int, rendezvous: str, later: str) -> None:
    os.environ["DYNAXLA_CACHE"] = ""
    torch.set_num_threads(1)
    join(rank, world, rendezvous)
    x, last, call = torch.ones(4), rank == world - 1, compiled("sum")
    assert call(x).tolist() == [2 * world + 1] * 4
    dist.barrier()
    if case == "first ends first" or case == "last ends first":
        time.sleep(3 * (last == (case == "first ends first")))
    elif case == "again":
        dist.destroy_process_group()
        with pytest.raises(Exception, match=r"(?i)group"):
            call(x)
        join(rank, world, later)
        assert call(x).tolist() == [2 * world + 1] * 4
        child = os.fork()
        if not child:
            os._exit(int(torch.compile(lambda x: x * 3, backend="dynaxla")(x)[0]))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        assert call(x).tolist() == [2 * world + 1] * 4
    else:
        if last and case == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if last and case == "hangs":
            time.sleep(3 * TIMEOUT)
            return
        expected = dynaxla.errors.CollectiveMismatch if case == "differs" else dynaxla.errors.CollectiveFailed
        start, before = time.monotonic(), x.clone()
        with pytest.raises(expected):
            (compiled("max") if last and case == "differs" else call)(x)
        assert time.monotonic() - start < (2 * TIMEOUT if case == "hangs" else TIMEOUT - 2)
        assert torch.equal(x, before)
        assert torch.compile(lambda x: x * 2, backend="dynaxla")(x).tolist() == [2] * 4


if __name__ == "__main__":
    run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5])
