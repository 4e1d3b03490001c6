"""Threads that use the device side by side, and what interrupts a program in the middle."""

from __future__ import annotations

import copy
import functools
import gc
import operator
import os
import random
import signal
import sys
import warnings
from typing import Any

import jax
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import dynaxla
from dynaxla.device import copies, eager_mode, registration
from dynaxla.runtime import private

from .running import at_once, quick_switches


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
    for found in at_once(*[lambda: train("jax")] * 3):
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-10)


def check_threads_that_write_to_parts_of_one_storage() -> None:
    """No write is lost: not of ops, not of copies from the CPU, not of torch's kernels."""
    shared = torch.zeros(6, 4).to("jax")
    host = torch.ones(4)

    def by_ops(row: int) -> None:
        for _ in range(150):
            shared[row].add_(1)

    def by_copies(row: int) -> None:
        for step in range(150):
            shared[row].copy_(host * (step + 1))

    with quick_switches():
        at_once(*[lambda row=row: (by_copies if row % 3 == 2 else by_ops)(row) for row in range(6)])
    assert shared.tolist() == [[150] * 4] * 6


def _enters_or_leaves(frame: Any) -> bool:
    """Whether the code, or what has called it, is a context's beginning or end."""
    while frame is not None:
        if frame.f_code.co_name in ("__enter__", "__exit__"):
            return True
        frame = frame.f_back
    return False


def check_interruptions() -> None:
    """An interruption at calls of Python's: each op has written all or nothing, and what comes next is as ever.

    Not at any time: `check_torch_notices_signals_where_it_asks_the_guard`. And not where a context is entered or left: Python cannot undo
    half of it, so torch's FakeTensorMode would stay on.
    """
    chance = random.Random(0)
    total, leaf = torch.zeros(32, device="jax"), torch.ones(8, device="jax", requires_grad=True)

    def work(attempt: int) -> None:
        total.add_(1)
        (leaf * total[:8] + attempt).sum().backward()
        total[attempt % 32 :].mul_(1.0)
        torch.zeros(attempt + 1, device="jax").to("cpu")
        torch.full((attempt + 2,), 1.0, device="jax").add_(1)  # compiled anew

    def events(attempt: int, last: int) -> int:
        seen = 0

        def count(frame: Any, *_: Any) -> None:
            nonlocal seen
            if frame.f_code is not registration._device_types.__code__:
                seen += 1
                if 0 < last <= seen and not _enters_or_leaves(frame):
                    sys.setprofile(None)
                    raise KeyboardInterrupt

        sys.setprofile(count)
        try:
            work(attempt)
        finally:
            sys.setprofile(None)
        return seen

    length = min(events(attempt, -1) for attempt in range(60, 62))
    stopped = 0
    for attempt in range(60):
        try:
            events(attempt, chance.randrange(1, length))
        except KeyboardInterrupt:
            stopped += 1
        values = total.tolist()
        assert values == values[:1] * 32
        assert (total + 1).tolist() == [values[0] + 1] * 32
        torch.autograd.grad((leaf * 2).sum(), leaf)
    assert stopped > 30, stopped  # not all: how many calls an attempt makes depends on what is compiled by then


def check_torch_notices_signals_where_it_asks_the_guard() -> None:
    """A known limit, not in our code: pybind11 calls PyObject_Str, which looks at signals, before it asks us anything. C++ allows no
    exception in most places where it asks. Once this fails, torch is mended: docs/device.md, "Traps", is to be changed."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    reached: list[str] = []
    guard = registration._guard()
    before = signal.signal(signal.SIGALRM, interrupt)
    asks = {"ours": guard.type_, "torch's": functools.partial(private.DeviceGuard.type_, guard)}
    try:
        for name, ask in asks.items():
            steps = [  # all in C, so nobody looks at signals between them
                functools.partial(signal.setitimer, signal.ITIMER_REAL, 1e-4),
                functools.partial(sum, range(1_000_000)),
                ask,
                functools.partial(reached.append, name),
            ]
            with pytest.raises(KeyboardInterrupt):
                list(map(operator.methodcaller("__call__"), steps))
    finally:
        signal.signal(signal.SIGALRM, before)
    assert reached == ["ours"]


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
        except dynaxla.errors.ForkError as error:
            failed = str(error)
        assert "forked" in failed
        gc.collect()  # the loader, whose end would take later children for its workers
        for use in (lambda: there + 1, lambda: there.cpu(), lambda: there.tolist(), lambda: torch.ones(2).to("jax"), lambda: repr(there)):
            child = os.fork()
            if not child:
                try:
                    use()
                except dynaxla.errors.ForkError:
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
    caches = (eager_mode._programs, eager_mode._numbers, copies._programs)
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
