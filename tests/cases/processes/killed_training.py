"""Runs processes for tests/many_processes/test_killed_training.py: one is killed within a training step."""

from __future__ import annotations

import copy
import datetime
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dynaxla
from cases.processes import parallelisms
from dynaxla.runtime import private

# Seconds.
TIMEOUT = 20
# By name: the wrapper of the model, the mode of `parallelisms.train`, and the number of the collective in the third step at which the
# process is killed.
CASES: dict[str, tuple[str, str, int]] = {
    "a recorded step, tensor parallel": ("tensor_parallel", "recorded", 2),
    "a recorded step, data parallel": ("data_parallel", "recorded", 1),
    "a compiled model": ("tensor_parallel", "model", 1),
    "a compiled model, in its backward pass": ("tensor_parallel", "model", 3),
    "a step in eager mode": ("tensor_parallel", "step", 3),
}
# The exit status of the process that is not killed.
STATUS = 7


def die_at(count: int) -> None:
    """Kills this process at its collective with this number, counted from now."""
    find, calls = private.process_group, [0]

    def counted(name: str) -> Any:
        calls[0] += 1
        if calls[0] == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return find(name)

    private.process_group = counted


def state(net: nn.Module, optimizer: torch.optim.Optimizer, with_gradients: bool) -> list[Any]:
    found = [*net.parameters(), *net.buffers()]
    found += [value for states in optimizer.state.values() for value in states.values()]
    found += [parameter.grad for parameter in net.parameters()] if with_gradients else []
    local = [item.to_local() if isinstance(item, parallelisms.DTensor) else item for item in found]
    return [item.detach().clone() if isinstance(item, torch.Tensor) else copy.copy(item) for item in local]


def are_equal(before: list[Any], after: list[Any]) -> bool:
    return len(before) == len(after) and all(
        torch.equal(old, new) if isinstance(old, torch.Tensor) else old == new for old, new in zip(before, after, strict=True)
    )


def make_step(name: str, net: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    _, mode, _ = CASES[name]
    model = torch.compile(net, backend="dynaxla") if mode == "model" else net
    printed: list[int] = []

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if mode == "step":
            printed.append(1)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    run = dynaxla.compile_step(step, fullgraph=mode == "recorded") if mode != "model" else step
    return lambda: run(*parallelisms.batches(1)[0])


def run(name: str, rank: int, rendezvous: str, checkpoint: str, victim: int) -> None:
    os.environ["DYNAXLA_CACHE"] = ""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=TIMEOUT))
    wrapper, mode, count = CASES[name]
    net = parallelisms.network()
    if wrapper == "data_parallel":
        net = nn.Sequential(net, nn.BatchNorm1d(3, dtype=parallelisms.DTYPE))  # its buffers are broadcast from the first process
    wrapped, _, _ = parallelisms.WAYS[wrapper][0](net)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.01)
    step = make_step(name, wrapped, optimizer)
    for _ in range(3 if mode == "step" else 2):
        step()
    before = state(wrapped, optimizer, with_gradients=mode == "recorded")
    if rank == victim:
        die_at(count)
    start = time.monotonic()
    with pytest.raises(dynaxla.errors.CollectiveFailed, match=r"(?s)a collective of ranks \[0, 1\] failed.*op: .*restart all processes"):
        step()
    assert time.monotonic() - start < TIMEOUT + 10
    assert are_equal(before, state(wrapped, optimizer, with_gradients=mode == "recorded")), (
        "the failed step has changed the model or the optimizer"
    )
    torch.save([item.to_local() if isinstance(item, parallelisms.DTensor) else item for item in wrapped.state_dict().values()], checkpoint)
    assert torch.compile(lambda x: x * 2, backend="dynaxla")(torch.ones(2)).tolist() == [2, 2]
    sys.exit(STATUS)


if __name__ == "__main__":
    run(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5]))
