"""Threads that use the device at the same time, interruptions, forked processes, and the capacity of caches."""

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


def check_training_in_several_threads() -> None:
    """Each thread has its own model. The ops are the same, so the first thread that needs an op compiles it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 9), nn.BatchNorm1d(9), nn.Mish(), nn.Linear(9, 2)).double()
    data = torch.randn(3, 8, 5, dtype=torch.float64)

    def train(device: str) -> list[list[float]]:
        own_model = copy.deepcopy(model).to(device)
        optimizer = torch.optim.RMSprop(own_model.parameters(), lr=0.01)
        for x in data.to(device):
            optimizer.zero_grad()
            own_model(x).square().mean().backward()
            optimizer.step()
        return [parameter.detach().cpu().flatten().tolist() for parameter in own_model.parameters()]

    expected = train("cpu")
    for results in at_once(*[lambda: train("jax")] * 3):
        for actual_parameter, expected_parameter in zip(results, expected, strict=True):
            torch.testing.assert_close(actual_parameter, expected_parameter, rtol=1e-8, atol=1e-10)


def check_threads_write_to_parts_of_one_storage() -> None:
    """No write of an op, and no copy from the CPU, is lost."""
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


def _enters_or_exits_a_context(frame: Any) -> bool:
    """True if the frame, or one of its callers, runs `__enter__` or `__exit__`."""
    while frame is not None:
        if frame.f_code.co_name in ("__enter__", "__exit__"):
            return True
        frame = frame.f_back
    return False


def check_interruptions() -> None:
    """If a call in Python is interrupted, each op has written everything or nothing, and later ops work.

    Interruptions elsewhere are the subject of `check_signals_during_calls_of_the_device_guard`. Interruptions inside `__enter__` and
    `__exit__` are left out: Python cannot undo half of them, so torch's FakeTensorMode would stay active. So are interruptions before the
    `__exit__` of a lock, which would never be released. Signals do not arrive there.
    """
    generator = random.Random(0)
    total, leaf = torch.zeros(32, device="jax"), torch.ones(8, device="jax", requires_grad=True)

    def work(attempt: int) -> None:
        total.add_(1)
        (leaf * total[:8] + attempt).sum().backward()
        total[attempt % 32 :].mul_(1.0)
        torch.zeros(attempt + 1, device="jax").to("cpu")
        torch.full((attempt + 2,), 1.0, device="jax").add_(1)  # compiled anew

    def count_calls(attempt: int, interrupted_call: int) -> int:
        calls = 0

        def count(frame: Any, event: str, called: Any) -> None:
            nonlocal calls
            if event.startswith("c_") and called.__name__ in ("__exit__", "release"):
                return
            if frame.f_code is not registration._device_types.__code__:
                calls += 1
                if 0 < interrupted_call <= calls and not _enters_or_exits_a_context(frame):
                    sys.setprofile(None)
                    raise KeyboardInterrupt

        sys.setprofile(count)
        try:
            work(attempt)
        finally:
            sys.setprofile(None)
        return calls

    shortest = min(count_calls(attempt, -1) for attempt in range(60, 62))
    interruptions = 0
    for attempt in range(60):
        try:
            count_calls(attempt, generator.randrange(1, shortest))
        except KeyboardInterrupt:
            interruptions += 1
        values = total.tolist()
        assert values == values[:1] * 32
        assert (total + 1).tolist() == [values[0] + 1] * 32
        torch.autograd.grad((leaf * 2).sum(), leaf)
    assert interruptions > 30, interruptions  # not all: the number of calls depends on which programs exist already


def check_signals_during_calls_of_the_device_guard() -> None:
    """A known limit of torch: pybind11 calls PyObject_Str, which runs signal handlers, before it calls our device guard.

    C++ allows no exception in most of the places that call the guard. If this check fails, torch has fixed the limit: change
    docs/device.md, "Traps".
    """

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    reached: list[str] = []
    guard = registration._guard()
    before = signal.signal(signal.SIGALRM, interrupt)
    methods = {"ours": guard.type_, "torch's": functools.partial(private.DeviceGuard.type_, guard)}
    try:
        for name, method in methods.items():
            steps = [  # all in C, so Python runs no signal handler between them
                functools.partial(signal.setitimer, signal.ITIMER_REAL, 1e-4),
                functools.partial(sum, range(1_000_000)),
                method,
                functools.partial(reached.append, name),
            ]
            with pytest.raises(KeyboardInterrupt):
                list(map(operator.methodcaller("__call__"), steps))
    finally:
        signal.signal(signal.SIGALRM, before)
    assert reached == ["ours"]


class _Numbers(Dataset[torch.Tensor]):
    def __init__(self, values: torch.Tensor | None = None) -> None:
        self.values = values

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((2,), float(index)) if self.values is None else self.values[index] * 2


def check_forked_processes() -> None:
    """A data loader's workers create CPU tensors. Using a tensor of the device in a forked process raises ForkError."""
    with warnings.catch_warnings(action="ignore"):  # JAX warns of forks
        batches = list(DataLoader(_Numbers(), batch_size=3, num_workers=2, pin_memory=True))
        assert [batch.to("jax").sum().item() for batch in batches] == [6, 24]
        tensor = torch.ones(6, 2).to("jax")
        failed = ""
        try:
            list(DataLoader(_Numbers(tensor), batch_size=3, num_workers=1))
        except dynaxla.errors.ForkError as error:
            failed = str(error)
        assert "forked" in failed
        gc.collect()  # the loader: its finalizer would take later child processes for its workers
        for use in (
            lambda: tensor + 1,
            lambda: tensor.cpu(),
            lambda: tensor.tolist(),
            lambda: torch.ones(2).to("jax"),
            lambda: repr(tensor),
        ):
            child_pid = os.fork()
            if not child_pid:
                try:
                    use()
                except dynaxla.errors.ForkError:
                    torch.ones(2).add_(1)
                    os._exit(7)
                except BaseException as error:
                    print(type(error), error, file=sys.stderr)
                os._exit(1)
            assert os.waitstatus_to_exitcode(os.waitpid(child_pid, 0)[1]) == 7
        child_pid = os.fork()
        if not child_pid:
            del tensor
            gc.collect()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child_pid, 0)[1]) == 0
    assert tensor.sum().item() == 12


def check_caches_are_bounded() -> None:
    """Each cache has a capacity. Programs that were removed are compiled again."""
    caches = (eager_mode._programs, eager_mode._numbers, copies._programs)
    capacities = [cache.capacity for cache in caches]
    x = torch.ones(1, device="jax")
    gc.collect()
    arrays = len(jax.live_arrays())
    try:
        for cache in caches:
            cache.capacity = 5
        for round_number in range(2):
            for size in range(1, 20):
                result = (x.expand(size) * (size + round_number / 2))[size // 2 :].cpu()
                assert result.tolist() == [size + round_number / 2] * (size - size // 2)
        assert [len(cache) for cache in caches] == [5, 5, 5]
    finally:
        for cache, capacity in zip(caches, capacities, strict=True):
            cache.capacity = capacity
    gc.collect()
    assert len(jax.live_arrays()) <= arrays + 8
