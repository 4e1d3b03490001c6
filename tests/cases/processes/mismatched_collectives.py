"""Runs three processes for tests/runtime/test_collective_agreement.py, with collectives that match or do not match."""

from __future__ import annotations

import datetime
import pickle
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from torch import nn

import dynaxla
from cases.processes.collectives import compiled
from support.comparisons.compare import assert_equal

Case = Callable[[int, Any], None]
CASES: dict[str, Case] = {}
SLOW: list[str] = []
WORLD = 3
# Timeouts in seconds: LONG for groups in which all processes arrive, SHORT for the others.
LONG, SHORT = 100, 6


def case(seconds: int = LONG, ranks: Sequence[int] = (0, 1), slow: bool = False) -> Callable[[Case], Case]:
    """Adds a case.

    Args:
        seconds: the timeout of the case's group.
        ranks: the members of the group. Only these run the case.
        slow: True for a case of the slow tests.
    """

    def decorate(function: Case) -> Case:
        def run(rank: int, _: Any) -> None:
            group = dist.new_group(list(ranks), timeout=datetime.timedelta(seconds=seconds))
            if rank in ranks:
                function(rank, group)

        CASES[function.__name__] = run
        if slow:
            SLOW.append(function.__name__)
        return function

    return decorate


def run(rank: int, rendezvous: str, results: str, *names: str) -> None:
    """Runs cases in one process of the group, and writes their errors to a file."""
    torch.set_num_threads(1)
    warnings.filterwarnings("error", message=".*(unwaited|reduce_op).*")
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=WORLD)
    found: dict[str, str] = {}
    for name in names:
        torch._dynamo.reset()
        torch.manual_seed(0)
        try:
            CASES[name](rank, None)
            found[name] = ""
        except BaseException:
            found[name] = traceback.format_exc()
        dist.barrier()
    Path(f"{results}{rank}").write_bytes(pickle.dumps(found))
    dist.destroy_process_group()


def summed(group: Any, **settings: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns a compiled function that writes to its input: twice the sum of the inputs of the group."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return x.copy_(fc.all_reduce(x * 2, "sum", group))

    return compiled(function, fullgraph=True, dynamic=True, **settings)


def refused(kind: type[Exception], pattern: str, function: Callable[..., Any], *args: torch.Tensor) -> None:
    """The call raises this exception, and writes to none of its arguments."""
    before = [tensor.clone() for tensor in args]
    with pytest.raises(kind, match=f"(?s){pattern}"):
        function(*args)
    assert_equal(list(args), before)


@case()
def different_sizes(rank: int, group: Any) -> None:
    """Both processes raise an error with the details, and later calls with equal sizes work."""
    run = summed(group)
    pattern = (
        r"ranks 0 and 1 of the group of ranks \[0, 1\] call different collectives\n"
        r"  rank 0: all_reduce\(f32\[4, 2\], sum\) at \S*mismatched_collectives.py:\d+, in function\n"
        r"  rank 1: all_reduce\(f32\[5, 2\], sum\) at \S*mismatched_collectives.py:\d+, in function\n.*try: .*last batch"
    )
    for _ in range(2):
        refused(dynaxla.errors.CollectiveMismatch, pattern, run, torch.ones(4 + rank, 2))
    x = torch.full((4, 2), rank + 1.0)
    assert_equal(run(x), torch.full((4, 2), 6.0))
    assert_equal(run(torch.ones(7)), torch.full((7,), 4.0))


@case()
def other_differences(rank: int, group: Any) -> None:
    def coalesced(x: torch.Tensor) -> Any:
        return fc.all_reduce_coalesced([x, x + 1] if rank else [x + 1], "sum", group)

    pairs: dict[str, Sequence[Callable[[torch.Tensor], Any]]] = {
        r"all_reduce\(f32\[4\], sum.*all_reduce\(f32\[4\], max": (
            lambda x: fc.all_reduce(x * 2, "sum", group),
            lambda x: fc.all_reduce(x * 2, "max", group),
        ),
        r"all_reduce\(f32.*all_reduce\(i32": (
            lambda x: fc.all_reduce(x * 2, "sum", group),
            lambda x: fc.all_reduce(x.int(), "sum", group),
        ),
        r"rank 0: all_reduce\(.*rank 1: all_gather_into_tensor\(": (
            lambda x: fc.all_reduce(x * 2, "sum", group),
            lambda x: fc.all_gather_tensor(x * 2, 0, group),
        ),
        r"broadcast\(f32\[4\], 0\).*broadcast\(f32\[4\], 1\)": (
            lambda x: fc.broadcast(x * 2, 0, group),
            lambda x: fc.broadcast(x * 2, 1, group),
        ),
        r"rank 0: all_reduce_coalesced\(f32\[4\], sum.*rank 1: all_reduce_coalesced\(f32\[4\], f32\[4\], sum": (coalesced, coalesced),
        # The second collective differs, and neither process has started the first one.
        r"rank 0: all_reduce\(f32\[2\], sum.*rank 1: all_reduce\(f32\[\], sum": (
            lambda x: fc.all_reduce(x[:2] + fc.all_reduce(x.sum(), "sum", group), "sum", group),
            lambda x: fc.all_reduce(x[:2].sum() + fc.all_reduce(x.sum(), "sum", group), "sum", group),
        ),
        r"rank 0: all_to_all_single\(f32\[4\], sends \[1, 3\], gets \[1, 1\].*rank 1: .*sends \[2, 2\], gets \[3, 2\]": (
            lambda x: fc.all_to_all_single(x * 2, [1, 1], [1, 3], group),
            lambda x: fc.all_to_all_single(x * 2, [3, 2], [2, 2], group),
        ),
    }
    for pattern, functions in pairs.items():
        refused(dynaxla.errors.CollectiveMismatch, pattern, compiled(functions[rank], fullgraph=True), torch.arange(4.0))
    assert_equal(summed(group)(torch.ones(3)), torch.full((3,), 4.0))


@case()
def matching_unequal_splits(rank: int, group: Any) -> None:
    sizes = [[1, 3], [2, 2]][rank], [[1, 2], [3, 2]][rank]
    x = torch.arange(4.0) + 10 * rank
    out = compiled(lambda x: fc.all_to_all_single(x * 1, sizes[1], sizes[0], group), fullgraph=True)(x)
    assert_equal(out, torch.tensor([[0.0, 10, 11], [1.0, 2, 3, 12, 13]][rank] if rank == 0 else [1.0, 2, 3, 12, 13]))


@case(2 * SHORT, slow=True)
def mismatch_with_a_known_program(rank: int, group: Any) -> None:
    """Rank 1 has a new program, rank 0 has not. Rank 0 publishes its collectives while it waits."""
    run = summed(group)
    for size in (4, 5):
        for _ in range(2):
            assert_equal(run(torch.ones(size)), torch.full((size,), 4.0))
    start = time.monotonic()
    pattern = r"rank 0: all_reduce\(f32\[5\], sum.*rank 1: all_reduce\(f32\[7\], sum"
    refused(dynaxla.errors.CollectiveMismatch, pattern, run, torch.ones(5 if rank == 0 else 7))
    assert time.monotonic() - start < 2 * SHORT + (3 if rank == 0 else -3)


@case()
def only_one_process_has_a_new_program(rank: int, group: Any) -> None:
    """With batches of different sizes, the collectives are equal and the programs differ."""
    run = compiled(lambda x: fc.all_reduce(x.sum(0) * 2, "sum", group), fullgraph=True, dynamic=True)
    before = time.monotonic()
    for rows in [(4, 4), (4, 4), (4, 3), (4, 4), (4, 7), (6, 3)]:
        assert_equal(run(torch.ones(rows[rank], 2)), torch.full((2,), 2.0 * sum(rows)))
    assert time.monotonic() - before < LONG


@case(slow=True)
def only_one_process_reads_a_value(rank: int, group: Any) -> None:
    """In some steps, one process reads the loss. Its collectives are then divided among two programs."""
    net = nn.parallel.DistributedDataParallel(nn.Linear(4, 2), process_group=group)
    seen: list[float] = []

    def step(x: torch.Tensor, reads: bool) -> torch.Tensor:
        net.zero_grad()
        loss = fc.all_reduce(net(x).square().sum(), "sum", group) * 1
        if reads:
            seen.append(loss.item())
        net(x).square().sum().backward()
        return loss

    compiled_step, eager_step = dynaxla.compile_step(step), step
    start = net.state_dict()
    for number in range(8):
        found = []
        for run in (compiled_step, eager_step):
            net.load_state_dict(start)
            x = torch.full((3, 4), 1.0 + number + rank)
            found.append((run(x, rank == 0 and number % 3 > 0).detach(), [item.grad.clone() for item in net.parameters()]))
        assert_equal(found[0], found[1], tolerance=(1e-4, 1e-5))
    assert rank or len(seen) == 2 * 5, seen


@case(slow=True)
def a_step_that_one_process_cannot_record(rank: int, group: Any) -> None:
    """torch's reducer all-reduces other tensors than a program does, so both processes must run eager mode."""
    net = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)), process_group=group)
    seen: list[int] = []

    def step(x: torch.Tensor) -> torch.Tensor:
        if rank == 0:
            seen.append(len(seen))
        net.zero_grad()
        loss = net(x).pow(3).sum()
        loss.backward()
        return loss

    run = dynaxla.compile_step(step)
    for number in range(5):
        x = torch.arange(12.0).view(3, 4).cos() * (rank + 1 + number)
        state = {name: value.clone() for name, value in net.state_dict().items()}
        found = []
        for function in (run, step):
            net.load_state_dict(state)
            found.append((function(x).detach(), [item.grad.clone() for item in net.parameters()], net.state_dict()))
        assert_equal(found[0], found[1], tolerance=(1e-4, 1e-5))
    assert rank or len(seen) == 10


@case(SHORT, slow=True)
def one_process_never_arrives(rank: int, group: Any) -> None:
    if rank == 1:
        time.sleep(2 * SHORT)
        return
    start = time.monotonic()
    pattern = r"rank 1 of the group of ranks \[0, 1\] did not reach a collective within 6 s.*all_reduce\(f32\[3\], sum\).*try:"
    refused(dynaxla.errors.CollectiveFailed, pattern, summed(group), torch.ones(3))
    assert SHORT - 1 < time.monotonic() - start < 3 * SHORT


@case(SHORT, ranks=(0, 1, 2), slow=True)
def one_of_three_processes_never_arrives(rank: int, group: Any) -> None:
    """Ranks 0 and 1 call a second collective, rank 2 does not."""
    first = summed(group)
    assert_equal(first(torch.ones(3)), torch.full((3,), 6.0))
    if rank == 2:
        time.sleep(2 * SHORT)
        return
    again = compiled(lambda x: fc.all_reduce(x + 1, "sum", group) - 1, fullgraph=True)
    refused(dynaxla.errors.CollectiveFailed, r"rank 2 of the group of ranks \[0, 1, 2\] did not reach a collective", again, torch.ones(3))


@case(SHORT, ranks=(0, 1, 2), slow=True)
def known_collective_times_out(rank: int, group: Any) -> None:
    run = summed(group)
    for _ in range(2):
        assert_equal(run(torch.ones(3)), torch.full((3,), 6.0))
    if rank == 2:
        time.sleep(2 * SHORT)
        return
    pattern = (
        r"a collective of ranks \[0, 1, 2\] failed on rank \d: .*no answer came from rank 2\n.*all_reduce\(f32\[3\], sum\).*restart all"
    )
    refused(dynaxla.errors.CollectiveFailed, pattern, run, torch.ones(3))


@case(ranks=(0, 1, 2))
def groups_are_compared_separately(rank: int, group: Any) -> None:
    """Two of the three processes call one more collective in a group of their own, and threads have their own groups."""
    pair = dist.new_group([0, 2])

    def function(x: torch.Tensor) -> torch.Tensor:
        y = fc.all_reduce(x * 2, "sum", group)
        if rank != 1:
            y = y + fc.all_reduce(x, "max", pair)
        return fc.all_reduce(y, "sum", group)

    run = compiled(function, fullgraph=True)
    for _ in range(3):
        assert_equal(run(torch.full((2,), rank + 1.0)), torch.full((2,), 3 * 12.0 + 2 * 3.0))
    groups = [dist.new_group([0, 1, 2]) for _ in range(4)]
    found: list[Any] = [None] * 4

    def work(index: int) -> None:
        mine = compiled(lambda x: fc.all_reduce(x + index, "sum", groups[index]), fullgraph=True)
        found[index] = [mine(torch.full((2,), float(rank))) for _ in range(3)]

    threads = [threading.Thread(target=work, args=(index if rank else 3 - index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, results in enumerate(found):
        for result in results:
            assert_equal(result, torch.full((2,), 3.0 + 3 * index))


@case(ranks=(0, 1, 2))
def later_calls_do_not_compare(rank: int, group: Any) -> None:
    run = summed(group)
    run(torch.ones(3))
    dist.barrier()
    store, before = group.get_group_store(), dynaxla.metrics.snapshot()["agreements"]
    keys = store.num_keys()
    dist.barrier()
    for _ in range(50):
        assert_equal(run(torch.ones(3)), torch.full((3,), 6.0))
    dist.barrier()
    assert dynaxla.metrics.snapshot()["agreements"] == before
    assert store.num_keys() == keys


@case()
def broadcast_source_answers_later(rank: int, group: Any) -> None:
    """The source does not wait for the other processes. It runs a later program when they compare their collectives with it."""
    send = compiled(lambda x: fc.broadcast(x * 2, 0, group), fullgraph=True, dynamic=True)
    add = compiled(lambda x: fc.all_reduce(x + 1, "sum", group), fullgraph=True)
    x, other = torch.full((3,), rank + 1.0), torch.zeros(2)
    for _ in range(2):
        assert_equal((send(x), add(other)), (torch.full((3,), 2.0), torch.full((2,), 2.0)))
    if rank == 1:
        time.sleep(1)
        send = compiled(lambda x: fc.broadcast(x * 3, 0, group), fullgraph=True, dynamic=True)
    assert_equal((send(x), add(other)), (torch.full((3,), 2.0), torch.full((2,), 2.0)))
