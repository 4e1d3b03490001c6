"""Threads that use the device side by side, and what interrupts a program in the middle."""

from __future__ import annotations

import copy
import gc
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import jax
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import dynaxla
from dynaxla.device import copies, op_by_op


def _at_once(*jobs: Callable[[], Any]) -> list[Any]:
    results: dict[int, Any] = {}
    failed: list[BaseException] = []
    start = threading.Barrier(len(jobs))

    def work(index: int, job: Callable[[], Any]) -> None:
        try:
            start.wait()
            results[index] = job()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=item) for item in enumerate(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return [results[index] for index in range(len(jobs))]


def check_threads_that_train() -> None:
    """Each has a model of its own; their ops are the same, and are compiled by whichever comes first."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 9), nn.BatchNorm1d(9), nn.Mish(), nn.Linear(9, 2)).double()
    data = torch.randn(3, 8, 5, dtype=torch.float64)

    def train(place: str) -> list[list[float]]:
        mine = copy.deepcopy(model).to(place)
        optimizer = torch.optim.RMSprop(mine.parameters(), lr=0.01)
        for x in data.to(place):
            optimizer.zero_grad()
            mine(x).square().mean().backward()
            optimizer.step()
        return [parameter.detach().cpu().flatten().tolist() for parameter in mine.parameters()]

    expected = train("cpu")
    for found in _at_once(*[lambda: train("jax")] * 6):
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-10)


def check_threads_that_write_to_parts_of_one_storage() -> None:
    """No write is lost: not of ops, not of copies from the CPU, not of torch's kernels."""
    shared = torch.zeros(6, 4).to("jax")
    host = torch.ones(4)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)

    def by_ops(row: int) -> None:
        for _ in range(150):
            shared[row].add_(1)

    def by_copies(row: int) -> None:
        for step in range(150):
            shared[row].copy_(host * (step + 1))

    try:
        _at_once(*[lambda row=row: (by_copies if row % 3 == 2 else by_ops)(row) for row in range(6)])
    finally:
        sys.setswitchinterval(interval)
    assert shared.tolist() == [[150] * 4] * 6


def check_interruptions() -> None:
    """Ctrl-C anywhere: each op has written all or nothing, and what comes next is as ever."""
    armed = [False]

    def interrupt(*_: Any) -> None:
        if armed[0]:
            armed[0] = False
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    chance = random.Random(0)
    total, leaf = torch.zeros(32, device="jax"), torch.ones(8, device="jax", requires_grad=True)
    stopped = 0
    try:
        for attempt in range(40):
            try:
                armed[0] = True
                signal.setitimer(signal.ITIMER_REAL, chance.uniform(2e-4, 4e-3))
                for step in range(10_000):
                    total.add_(1)
                    (leaf * total[:8] + attempt).sum().backward()
                    total[attempt % 32 :].mul_(1.0)
                    torch.zeros(attempt + 1, device="jax").to("cpu")
                    if step % 7 == 0:
                        torch.full((attempt + 2,), 1.0, device="jax").add_(1)  # compiled anew
            except (KeyboardInterrupt, TypeError):  # jaxlib's bindings may make the latter of it, while they look at arguments
                stopped += 1
            finally:
                armed[0] = False
                signal.setitimer(signal.ITIMER_REAL, 0)
            values = total.tolist()
            assert values == values[:1] * 32
            assert (total + 1).tolist() == [values[0] + 1] * 32
            torch.autograd.grad((leaf * 2).sum(), leaf)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert stopped > 30


class _Numbers(Dataset[torch.Tensor]):
    def __init__(self, there: torch.Tensor | None = None) -> None:
        self.there = there

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((2,), float(index)) if self.there is None else self.there[index] * 2


def check_children() -> None:
    """A loader's workers make tensors of the CPU; what is on the device they cannot use, and say so."""
    with warnings.catch_warnings(action="ignore"):  # JAX's of forks
        batches = list(DataLoader(_Numbers(), batch_size=3, num_workers=2, pin_memory=True))
        assert [batch.to("jax").sum().item() for batch in batches] == [6, 24]
        there = torch.ones(6, 2).to("jax")
        failed = ""
        try:
            list(DataLoader(_Numbers(there), batch_size=3, num_workers=1))
        except dynaxla.ForkError as error:
            failed = str(error)
        assert "forked" in failed
        gc.collect()  # the loader, whose end would take later children for its workers
        for use in (lambda: there + 1, lambda: there.cpu(), lambda: there.tolist(), lambda: torch.ones(2).to("jax"), lambda: repr(there)):
            child = os.fork()
            if not child:
                try:
                    use()
                except dynaxla.ForkError:
                    torch.ones(2).add_(1)
                    os._exit(7)
                except BaseException as error:
                    print(type(error), error, file=sys.stderr)
                os._exit(1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        child = os.fork()
        if not child:
            del there
            gc.collect()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert there.sum().item() == 12


def check_many_shapes_are_bounded() -> None:
    """Caches have an end; and what falls out of them is compiled again."""
    caches = (op_by_op._programs, op_by_op._numbers, copies._reads)
    before = [cache.capacity for cache in caches]
    x = torch.ones(1, device="jax")
    gc.collect()
    arrays = len(jax.live_arrays())
    try:
        for cache in caches:
            cache.capacity = 5
        for turn in range(2):
            for size in range(1, 20):
                found = (x.expand(size) * (size + turn / 2))[size // 2 :].cpu()
                assert found.tolist() == [size + turn / 2] * (size - size // 2)
        assert [len(cache) for cache in caches] == [5, 5, 5]
    finally:
        for cache, capacity in zip(caches, before, strict=True):
            cache.capacity = capacity
    gc.collect()
    assert len(jax.live_arrays()) <= arrays + 8
