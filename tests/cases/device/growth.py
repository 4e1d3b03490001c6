"""Ops in a loop do not increase memory, in each mode.

`python -m cases.device.growth 100000` (with PYTHONPATH=tests) runs 100,000 ops in each mode.
"""

from __future__ import annotations

import gc
import itertools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import torch

import dynaxla

from .running import compile_anew

# The minimum number of ops in a round of a loop.
_OPS = 10
# The number of elements of a tensor, and its KiB. A tensor is large because a process's memory varies by one or two MiB.
_SIZE, _KIBIBYTES = 65_536, 256


class Grown(NamedTuple):
    """An increase in memory.

    Attributes:
        blocks: Blocks of Python's allocator.
        arrays: Live jax.Arrays.
        kibibytes: Resident memory.
    """

    blocks: int
    arrays: int
    kibibytes: int


def _now() -> Grown:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1]) if sys.platform == "linux" else 0
    return Grown(sys.getallocatedblocks(), len(jax.live_arrays()), pages * (os.sysconf("SC_PAGE_SIZE") >> 10))


def _round(x: torch.Tensor, weight: torch.Tensor, step: float) -> torch.Tensor:
    """Runs at least _OPS ops: forward and backward, views, writes to a part, with changing numbers."""
    x.mul_(0.5)
    x[3:9].add_(step)
    loss = ((x * weight).sin().sum() + step) * step
    loss.backward()
    with torch.no_grad():
        weight.sub_(weight.grad * 1e-3)
        weight.grad = None
    return loss.detach()


def _eager(x: torch.Tensor, weight: torch.Tensor, rounds: int) -> None:
    for step in range(rounds):
        _round(x, weight, step + 0.25)


def _lazy(x: torch.Tensor, weight: torch.Tensor, rounds: int) -> None:
    for step in range(rounds):
        with dynaxla.device.lazy():
            _round(x, weight, step + 0.25)


def _compiled() -> Callable[[torch.Tensor, torch.Tensor, int], None]:
    def function(x: torch.Tensor, weight: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        x.mul_(0.5)
        x[3:9].add_(step)
        return ((x * weight).sin().sum() + step) * step

    compiled = compile_anew(function)

    def loop(x: torch.Tensor, weight: torch.Tensor, rounds: int) -> None:
        step = torch.zeros((), device="jax")
        for _ in range(rounds):
            step.add_(1)
            compiled(x, weight, step).backward()
            weight.grad = None

    return loop


def grown(loop: Callable[[torch.Tensor, torch.Tensor, int], Any], rounds: int) -> Grown:
    """Returns what a run of the loop adds to memory: the minimum of three runs. An earlier run is not measured.

    Caches (256 numbers, ...) may still grow in some of the runs.
    """
    x, weight = torch.ones(_SIZE, device="jax"), torch.ones(_SIZE, device="jax", requires_grad=True)
    loop(x, weight, rounds)
    counts_after_runs = [_now()]
    for _ in range(3):
        loop(x, weight, rounds)
        counts_after_runs.append(_now())
    return Grown(*(min(later - early for early, later in itertools.pairwise(counts)) for counts in zip(*counts_after_runs, strict=True)))


def _is_small(growth: Grown, rounds: int) -> bool:
    """True if memory grows by less than one object in ten rounds."""
    return growth.blocks < rounds / 10 and growth.arrays < rounds / 10 and growth.kibibytes < rounds / 10 * _KIBIBYTES


LOOPS: dict[str, Callable[[], Callable[[torch.Tensor, torch.Tensor, int], None]]] = {
    "eager": lambda: _eager,
    "lazy": lambda: _lazy,
    "compiled": _compiled,
}


def check_loops_do_not_increase_memory() -> None:
    for name, make in LOOPS.items():
        growth = grown(make(), 600)
        assert _is_small(growth, 600), (name, growth)


def check_increase_is_found() -> None:
    """Every third round keeps a Python object, an array without a tensor, or a tensor's memory."""
    kept: list[Any] = []
    for keep, field in (
        (lambda loss: [None], "blocks"), (lambda loss: loss.untyped_storage()._dynaxla_content, "arrays"),
        (lambda loss: bytearray(b"1") * (_KIBIBYTES << 10), "kibibytes"),
    ):  # fmt: skip

        def loop(x: torch.Tensor, weight: torch.Tensor, rounds: int, keep: Any = keep) -> None:
            for step in range(rounds):
                loss = _round(x, weight, step + 0.25)
                if step % 3 == 0:
                    kept.append(keep(loss))

        growth = grown(loop, 90)
        assert getattr(growth, field) >= (20 * _KIBIBYTES if field == "kibibytes" else 30), (field, growth)
        assert not _is_small(growth, 90)


def main(ops: int) -> int:
    dynaxla.device.enable()
    failed = 0
    for name, make in LOOPS.items():
        rounds = ops // _OPS // 4
        growth = grown(make(), rounds)
        failed += not _is_small(growth, rounds)
        print(f"{name}, {ops} ops: each quarter leaves {growth.blocks} blocks, {growth.arrays} arrays, {growth.kibibytes} KiB", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
