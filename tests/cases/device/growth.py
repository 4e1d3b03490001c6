"""Ops in a loop do not grow memory, in each mode. `python -m cases.device.growth 100000` (with PYTHONPATH=tests) runs so many in each."""

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

# Ops of each round of a loop.
_OPS = 10
# Numbers in a tensor, and how many KiB these are: memory that the process has varies by one or two MiB.
_SIZE, _KIBIBYTES = 65_536, 256


class Grown(NamedTuple):
    """How much more there is: blocks (of Python's allocator), arrays (jax.Arrays that live), kibibytes (of resident memory)."""

    blocks: int
    arrays: int
    kibibytes: int


def _now() -> Grown:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1]) if sys.platform == "linux" else 0
    return Grown(sys.getallocatedblocks(), len(jax.live_arrays()), pages * (os.sysconf("SC_PAGE_SIZE") >> 10))


def _round(x: torch.Tensor, weight: torch.Tensor, step: float) -> torch.Tensor:
    """Forward and backward ops, views, writes to a part, numbers that change: at least _OPS."""
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
    """What so many rounds leave each time: the least of three times, behind a first one. Caches fill in the others (256 numbers, ...)."""
    x, weight = torch.ones(_SIZE, device="jax"), torch.ones(_SIZE, device="jax", requires_grad=True)
    loop(x, weight, rounds)
    seen = [_now()]
    for _ in range(3):
        loop(x, weight, rounds)
        seen.append(_now())
    return Grown(*(min(later - early for early, later in itertools.pairwise(counts)) for counts in zip(*seen, strict=True)))


def _is_small(more: Grown, rounds: int) -> bool:
    """Less than what stays if one round in ten leaves one thing."""
    return more.blocks < rounds / 10 and more.arrays < rounds / 10 and more.kibibytes < rounds / 10 * _KIBIBYTES


LOOPS: dict[str, Callable[[], Callable[[torch.Tensor, torch.Tensor, int], None]]] = {
    "eager": lambda: _eager,
    "lazy": lambda: _lazy,
    "compiled": _compiled,
}


def check_loops_leave_nothing() -> None:
    for name, make in LOOPS.items():
        more = grown(make(), 600)
        assert _is_small(more, 600), (name, more)


def check_what_stays_is_found() -> None:
    """A number, an array without a tensor, a tensor's memory: in every third round."""
    kept: list[Any] = []
    for keep, part in (
        (lambda loss: [None], "blocks"), (lambda loss: loss.untyped_storage()._dynaxla_array, "arrays"),
        (lambda loss: bytearray(b"1") * (_KIBIBYTES << 10), "kibibytes"),
    ):  # fmt: skip

        def loop(x: torch.Tensor, weight: torch.Tensor, rounds: int, keep: Any = keep) -> None:
            for step in range(rounds):
                loss = _round(x, weight, step + 0.25)
                if step % 3 == 0:
                    kept.append(keep(loss))

        more = grown(loop, 90)
        assert getattr(more, part) >= (20 * _KIBIBYTES if part == "kibibytes" else 30), (part, more)
        assert not _is_small(more, 90)


def main(ops: int) -> int:
    dynaxla.device.enable()
    failed = 0
    for name, make in LOOPS.items():
        rounds = ops // _OPS // 4
        more = grown(make(), rounds)
        failed += not _is_small(more, rounds)
        print(f"{name}, {ops} ops: each quarter leaves {more.blocks} blocks, {more.arrays} arrays, {more.kibibytes} KiB", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
