"""Cases for the processes of tests/many_processes/test_process_collectives.py: XLA's own collectives, compared with eager mode."""

from __future__ import annotations

import ctypes
import datetime
import os
import pickle
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from torch.distributed.device_mesh import init_device_mesh

import dynaxla
from cases.processes import parallelisms
from support.comparisons.compare import assert_equal

XLA, TORCH = {"distributed": "xla"}, {"distributed": "torch"}
QUICK: dict[str, Callable[[int], None]] = {}
WHOLE: dict[str, Callable[[int], None]] = {}
SLOW: dict[str, Callable[[int], None]] = {}
ops = torch.ops._c10d_functional


def quick(function: Callable[[int], None]) -> Callable[[int], None]:
    QUICK[function.__name__] = function
    return function


def whole(function: Callable[[int], None]) -> Callable[[int], None]:
    WHOLE[function.__name__] = function
    return function


def slow(function: Callable[[int], None]) -> Callable[[int], None]:
    SLOW[function.__name__] = function
    return function


def run(rank: int, world: str, rendezvous: str, results: str, *names: str) -> None:
    """Runs cases in one process of the group, and writes their errors to a file."""
    os.environ["DYNAXLA_CACHE"] = ""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*is deprecated.*", category=FutureWarning)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=int(world), timeout=datetime.timedelta(seconds=100)
    )
    found: dict[str, str] = {}
    for name in names:
        torch._dynamo.reset()
        torch.manual_seed(0)
        try:
            (QUICK | WHOLE | SLOW)[name](rank)
            found[name] = ""
        except BaseException:
            found[name] = traceback.format_exc()
        dist.barrier()
    Path(f"{results}{rank}").write_bytes(pickle.dumps(found))
    dist.destroy_process_group()


def compiled(function: Any, options: dict[str, Any] = XLA, **settings: Any) -> Any:
    return torch.compile(function, backend="dynaxla", options=options, fullgraph=True, **settings)


def count(name: str) -> int:
    return dynaxla.metrics.snapshot().get(name, 0)


def kernels_of(call: Callable[[], object]) -> int:
    """Returns the number of torch's kernels that a call runs. In these cases, all of them are collectives."""
    before = count("kernels")
    call()
    return count("kernels") - before


def agree(
    function: Callable[..., Any],
    *args: torch.Tensor,
    by_torch: int = 0,
    tolerance: tuple[float, float] | None = None,
    ways: tuple[dict[str, Any], ...] = (TORCH, XLA),
) -> None:
    """Results are those of eager mode with each option.

    Args:
        function: the function to compile.
        args: its arguments.
        by_torch: the number of collectives that torch runs with the option for XLA.
        tolerance: the relative and absolute tolerance.
        ways: the options.
    """
    settings = {} if tolerance is None else {"tolerance": tolerance}
    expected = torch.utils._pytree.tree_map_only(fc.AsyncCollectiveTensor, lambda tensor: tensor.wait(), function(*args))
    for options in ways:
        torch._dynamo.reset()
        call = compiled(function, options)
        for _ in range(2):
            seen = kernels_of(lambda call=call: assert_equal(call(*args), expected, **settings))
        assert options is TORCH or seen == by_torch, f"{seen} collectives are run by torch"


def numbers(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    return (drawn * 3).to(dtype)


HALF_TOLERANCE = (0.02, 0.02)


@quick
def every_collective(rank: int) -> None:
    group, size = dist.group.WORLD, dist.get_world_size()

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        total = fc.all_reduce(x * 2, "sum", group)
        gathered = ops.wait_tensor(ops.all_gather_into_tensor(total + rank, size, group.group_name))
        part = ops.wait_tensor(ops.reduce_scatter_tensor(gathered.sin(), "max", size, group.group_name))
        exchanged = ops.wait_tensor(ops.all_to_all_single(gathered, [4] * size, [4] * size, group.group_name))
        return total + 1, gathered, part, exchanged, ops.wait_tensor(ops.broadcast(part + rank, 1, group.group_name))

    agree(function, numbers(rank, 4, 3), tolerance=(1e-5, 1e-5), ways=(XLA,))


@whole
def reductions(rank: int) -> None:
    group, size = dist.group.WORLD, dist.get_world_size()

    def function(x: torch.Tensor, kind: str) -> tuple[torch.Tensor, ...]:
        whole = ops.wait_tensor(ops.all_reduce(x, kind, group.group_name))
        return whole, ops.wait_tensor(ops.reduce_scatter_tensor(x, kind, size, group.group_name))

    for kind in ("sum", "max", "min", "product"):
        agree(lambda x, kind=kind: function(x, kind), numbers(rank, 4 * size, 3), tolerance=(1e-5, 1e-5))
    for dtype in (torch.float64, torch.int64, torch.int32, torch.int8, torch.uint8):
        agree(lambda x: function(x, "sum"), numbers(rank, size, 5).abs().to(dtype))
    for dtype in (torch.float16, torch.bfloat16):
        agree(lambda x: function(x, "sum"), numbers(rank, size, 5, dtype=dtype), tolerance=HALF_TOLERANCE)
    agree(lambda x: ops.wait_tensor(ops.all_reduce(x, "max", group.group_name)), torch.tensor(rank + 2.5))


@whole
def averages(rank: int) -> None:
    """gloo may reject averages in eager mode, so the reference is the mean."""
    group, size = dist.group.WORLD, dist.get_world_size()
    parts = torch.stack([numbers(other, 2 * size, 3) for other in range(size)])

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        whole = ops.wait_tensor(ops.all_reduce(x, "avg", group.group_name))
        return whole, ops.wait_tensor(ops.reduce_scatter_tensor(x, "avg", size, group.group_name))

    call = compiled(function)
    assert kernels_of(lambda: call(parts[rank])) == 0
    assert_equal(call(parts[rank]), (parts.mean(0), parts.mean(0)[2 * rank : 2 * rank + 2]), tolerance=(1e-5, 1e-5))


@whole
def gathers_broadcasts_and_exchanges(rank: int) -> None:
    """Collectives that only move data keep every bit."""
    group, size = dist.group.WORLD, dist.get_world_size()
    name = group.group_name

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gathered = ops.wait_tensor(ops.all_gather_into_tensor(x, size, name))
        return gathered, ops.wait_tensor(ops.broadcast(x, size - 1, name))

    def exchange(x: torch.Tensor) -> torch.Tensor:
        return ops.wait_tensor(ops.all_to_all_single(x, [2] * size, [2] * size, name))

    for dtype in (torch.float32, torch.float64, torch.int64, torch.uint8):
        x = numbers(rank, 2 * size, 3, dtype=dtype)
        agree(lambda x: (*function(x), exchange(x)), x)
    x = numbers(rank, 2 * size, 3)
    reference = [compiled(call)(x) for call in (function, exchange)]  # for dtypes that gloo rejects
    for kind in (torch.bfloat16, torch.bool, torch.complex64):
        cast = [torch.utils._pytree.tree_map(lambda item, kind=kind: item.to(kind), item) for item in reference]
        assert_equal([compiled(call)(x.to(kind)) for call in (function, exchange)], cast)
    special = torch.tensor([float("nan"), -0.0, float("-inf"), 1e-42] * size)[: 2 * size, None].expand(-1, 3).contiguous() * (rank + 1)
    bits = compiled(lambda x: function(x)[1].view(torch.int32))(special)
    assert_equal(bits, (special / (rank + 1) * size).view(torch.int32))


@whole
def coalesced_collectives(rank: int) -> None:
    group, size = dist.group.WORLD, dist.get_world_size()

    def function(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        reduced = ops.all_reduce_coalesced([x, y.sin()], "sum", group.group_name)
        scattered = ops.reduce_scatter_tensor_coalesced([x, y], "sum", size, group.group_name)
        gathered = ops.all_gather_into_tensor_coalesced([x * 2, y], size, group.group_name)
        return [ops.wait_tensor(item) for item in (*reduced, *scattered, *gathered)]

    agree(function, numbers(rank, size, 4), numbers(rank, 2 * size), tolerance=(1e-5, 1e-5))


@whole
def collectives_left_to_torch(rank: int) -> None:
    """torch runs exchanges of unequal parts, permutations, and reductions that XLA lacks, in one order with XLA's collectives."""
    group, size = dist.group.WORLD, dist.get_world_size()
    sent = [other + 1 for other in range(size)]

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        total = fc.all_reduce(x, "sum", group)
        unequal = fc.all_to_all_single(total * 2, [rank + 1] * size, sent, group)
        moved = fc.permute_tensor(total.flatten(), [(other + 1) % size for other in range(size)], group)
        return total, unequal, moved, fc.all_reduce(moved + 1, "max", group)

    agree(function, numbers(0, sum(sent), 2), by_torch=2, tolerance=(1e-5, 1e-5))
    agree(lambda x: fc.all_reduce(x, "bor", group), torch.tensor([1 << rank, 8]), by_torch=1)


@whole
def empty_and_unused_results(rank: int) -> None:
    group = dist.group.WORLD

    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        fc.all_reduce(y * 3, "sum", group).wait()
        return fc.all_reduce(x, "sum", group) * 2, y + 1

    agree(function, torch.empty(0, 3), torch.ones(4), by_torch=1)


@whole
def constants_differ_between_processes(rank: int) -> None:
    """A constant of one process is gathered with the constants of the others."""
    size = dist.get_world_size()
    call = compiled(lambda x: fc.all_gather_tensor(torch.full((3,), float(rank)), 0, dist.group.WORLD) + x)
    assert_equal(call(torch.zeros(1)), torch.arange(float(size)).repeat_interleave(3))


@whole
def different_sizes_on_each_process(rank: int) -> None:
    """The programs differ, their collectives are equal. In both programs, the collectives run in the order of the graph."""

    def function(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        name = dist.group.WORLD.group_name
        found = [ops.wait_tensor(ops.all_reduce((x @ w * number).sin().sum(0), "sum", name)) for number in range(6)]
        return [item * 2 for item in found[::-1]]

    torch._dynamo.reset()
    x, w = numbers(rank, 3 + 40 * rank, 4), numbers(9, 4, 5)
    assert_equal(compiled(function)(x, w), function(x, w), tolerance=(1e-4, 1e-4))


@whole
def random_numbers_differ_between_processes(rank: int) -> None:
    """A graph with a collective, random numbers, a kernel of torch and a check of indices."""

    table = torch.arange(3.0)

    def function(x: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x + table[index]
        mine = torch.rand(4)
        return mine, fc.all_gather_tensor(mine + torch.special.zeta(x + 2, x + 1), 0, dist.group.WORLD)

    torch.manual_seed(rank)
    call = compiled(function)
    mine, gathered = call(torch.ones(4), torch.tensor([0]))
    again, _ = call(torch.ones(4), torch.tensor([0]))
    assert not torch.equal(mine, again)
    offset = torch.special.zeta(torch.tensor(3.0), torch.tensor(2.0))
    rows = gathered.view(-1, 4) - offset
    assert_equal(rows[rank], mine, tolerance=(1e-5, 1e-5))
    assert (rows[rank] - rows[rank - 1]).abs().max() > 0.01
    with pytest.raises(IndexError, match="out of"):
        call(torch.ones(4), torch.tensor([3]))


@whole
def group_of_some_processes(rank: int) -> None:
    """Only the processes of a group run its program."""
    size = dist.get_world_size()
    groups = [dist.new_group([other, (other + 1) % size]) for other in range(0, size, 2)]
    mine = groups[rank // 2]
    partner = rank ^ 1
    if rank < 2:
        call = compiled(lambda x: fc.all_reduce(x, "sum", mine) + 1)
        assert_equal(call(torch.full((3,), float(rank))), torch.full((3,), float(rank + partner) + 1))


@quick
def side_effects(rank: int) -> None:
    assert len(jax.devices()) == jax.device_count() == 1
    assert jax.process_count() == 1
    assert jax.process_index() == 0
    assert jax._src.distributed.global_state.client is None
    libc = ctypes.CDLL(None)
    for name in (b"XLA_FLAGS", b"PJRT_NPROC", b"no_grpc_proxy"):
        assert not libc.getenv(name), f"{name!r} is set"
    assert not jax.config.jax_enable_x64


@quick
def different_options_are_a_mismatch(rank: int) -> None:
    call = compiled(lambda x: fc.all_reduce(x * 5, "sum", dist.group.WORLD), XLA if rank == 0 else TORCH)
    if dist.get_world_size() == 2:
        with pytest.raises(dynaxla.errors.CollectiveMismatch, match=r"by XLA among ranks \[0, 1\]"):
            call(torch.ones(3))


@whole
def results_are_ordinary_tensors(rank: int) -> None:
    """Outputs outlive their program, an output that is an input is an alias of it, and writes to inputs are visible."""

    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x.mul_(2)
        total = fc.all_reduce(x, "sum", dist.group.WORLD) * 1
        return x, y, total, total[1:]

    size = dist.get_world_size()
    call = compiled(function)
    for _ in range(2):
        x, y = torch.ones(20), torch.ones(2)
        found = call(x, y)
        assert found[0] is x or found[0].data_ptr() == x.data_ptr()
        assert found[1].data_ptr() == y.data_ptr()
        assert found[3].untyped_storage().data_ptr() == found[2].untyped_storage().data_ptr()
        assert_equal(x, torch.full((20,), 2.0))
        torch._dynamo.reset()
        call = compiled(function)  # deletes the first program
        found[2].add_(1)
        assert_equal(found[3], torch.full((19,), 2.0 * size + 1))


@slow
def training_agrees_with_one_process(rank: int) -> None:
    """Losses and parameters of a compiled model, an eager step and a recorded step are as on one process, within 1e-6."""
    parallelisms.OPTIONS = XLA
    for name, (_, processes) in parallelisms.WAYS.items():
        for mode in ("model", "step", "recorded"):
            if processes <= dist.get_world_size():
                torch._dynamo.reset()
                parallelisms.agree(name, mode, "adamw")


@slow
def twenty_runs(rank: int) -> None:
    parallelisms.OPTIONS = XLA
    for _ in range(20):
        torch._dynamo.reset()
        parallelisms.agree("parametrized_fsdp", "model", "sgd")


@slow
def many_collectives_run_in_graph_order(rank: int) -> None:
    """A hundred independent collectives over overlapping groups run in the order of the graph."""
    everyone, half = dist.group.WORLD, dist.new_group([0, 1])

    def function(x: torch.Tensor) -> list[torch.Tensor]:
        groups = {number: half if number % 3 == 0 else everyone for number in range(100) if rank < 2 or number % 3}
        return [fc.all_reduce(x[: 1 + number % 7] + number, "sum", group) for number, group in groups.items()]

    x = numbers(rank, 7)
    torch.set_num_threads(4)
    call = compiled(function)
    for _ in range(50):
        found = call(x)
    torch.set_num_threads(1)
    assert_equal(found, [item.wait() for item in function(x)], tolerance=(1e-4, 1e-4))


@slow
def a_mesh_of_two_dimensions(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))

    def function(x: torch.Tensor) -> torch.Tensor:
        rows = fc.all_reduce(x, "sum", mesh.get_group("tp"))
        return fc.all_gather_tensor(rows * 2, 0, mesh.get_group("dp"))

    agree(function, numbers(rank, 3, 2), tolerance=(1e-5, 1e-5))


@slow
def groups_created_later(rank: int) -> None:
    size = dist.get_world_size()
    before = count("networks")
    for _ in range(2):
        group = dist.new_group(list(range(size)))
        torch._dynamo.reset()
        agree(lambda x, group=group: fc.all_reduce(x, "sum", group) + fc.all_reduce(x * 2, "max", dist.group.WORLD), numbers(rank, 4))
    assert count("networks") - before <= 2
