"""Cases for the processes of tests/many_processes/test_collectives.py. Each compares compiled code with eager mode in all processes."""

from __future__ import annotations

import copy
import os
import pickle
import random
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from torch import nn
from torch.utils import _pytree as pytree

import dynaxla
from cases.object_turns.processes import agree_in_turns
from dynaxla.capture.graph import AtenGraph
from dynaxla.config import Options
from dynaxla.engine.scheduler import engine_for
from support.comparisons.compare import aliases, assert_equal

Case = Callable[[int], None]
CASES: dict[str, Case] = {}
WORLD = 2


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def run(rank: int, rendezvous: str, results: str, *names: str) -> None:
    """Runs cases (default: all) in one process of the group, and writes their errors to a file."""
    os.environ["DYNAXLA_CACHE"] = ""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=WORLD)
    found: dict[str, str] = {}
    for name in names or CASES:
        torch._dynamo.reset()
        torch.manual_seed(0)
        try:
            globals()[name](rank)
            found[name] = ""
        except Exception:
            found[name] = traceback.format_exc()
        dist.barrier()
    Path(f"{results}{rank}").write_bytes(pickle.dumps(found))
    dist.destroy_process_group()


def compiled(function: Any, **settings: Any) -> Any:
    return torch.compile(function, backend="dynaxla", **settings)


def agree(function: Callable[..., Any], *args: Any, calls: int = 2, **settings: Any) -> None:
    """Results, mutations and aliases are as in eager mode."""
    compiled_function = compiled(function, **settings)
    for _ in range(calls):
        mine, theirs = copy.deepcopy(args), copy.deepcopy(args)
        expected = pytree.tree_map_only(fc.AsyncCollectiveTensor, lambda tensor: tensor.wait(), function(*theirs))
        actual = compiled_function(*mine)
        assert_equal(actual, expected)
        assert_equal(list(mine), list(theirs))
        assert aliases(mine, actual) == aliases(theirs, expected)


def large(rank: int) -> torch.Tensor:
    """Returns a tensor so large that its transfer takes a noticeable time."""
    return torch.arange(300_000.0).view(3, -1) * (rank + 1)


@case
def functional_all_reduce(rank: int) -> None:
    agree(lambda x: fc.all_reduce(x * 2, "sum", dist.group.WORLD) + 1, large(rank), fullgraph=True)


@case
def all_reduce_of_a_result(rank: int) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        dist.all_reduce(y)
        return y + 1

    agree(function, large(rank), fullgraph=True)


@case
def all_reduce_of_an_input(rank: int) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x, op=dist.ReduceOp.MAX)
        return x + 1

    agree(function, large(rank), fullgraph=True)


@case
def all_reduce_of_a_view_of_an_input(rank: int) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        row = x[1]
        dist.all_reduce(row)
        return x.sum(), row

    agree(function, large(rank), fullgraph=True)


@case
def work_between_call_and_wait(rank: int) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y, z = x * 2, x + 1
        arriving = fc.all_reduce(y, "sum", dist.group.WORLD)
        gathered = fc.all_gather_tensor(z, 0, dist.group.WORLD)
        mine = (x / 1e5).cos().sin()
        return arriving + 1, gathered.mean(0), mine

    agree(function, large(rank), fullgraph=True)


@case
def gather_scatter_and_exchange(rank: int) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gathered = fc.all_gather_tensor(x * 3, 1, dist.group.WORLD)
        scattered = fc.reduce_scatter_tensor(gathered + 1, "sum", 1, dist.group.WORLD)
        return gathered, scattered, fc.broadcast(scattered * 2, 1, dist.group.WORLD)

    agree(function, large(rank), fullgraph=True)


@case
def coalesced_all_reduce(rank: int) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        return [z + 1 for z in fc.all_reduce_coalesced([x * 2, y.sin()], "sum", dist.group.WORLD)]

    agree(function, large(rank), torch.randn(5), fullgraph=True)


@case
def in_place_ops_of_a_graph(rank: int) -> None:
    """`all_reduce_` writes to its argument: a program's result, and an input. AOTAutograd removes such ops, but a pass may add them."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    group = dist.group.WORLD.group_name
    real = large(rank)
    graph = torch.fx.Graph()
    mode = FakeTensorMode()

    def with_value(node: torch.fx.Node) -> torch.fx.Node:
        node.meta["val"] = mode.from_tensor(real.clone())
        return node

    x = with_value(graph.placeholder("x"))
    y = with_value(graph.call_function(torch.ops.aten.mul.Tensor, (x, 2)))
    for node, op in ((y, "sum"), (x, "max")):
        reduced = with_value(graph.call_function(torch.ops._c10d_functional.all_reduce_.default, (node, op, group)))
        with_value(graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (reduced,)))
    graph.output((with_value(graph.call_function(torch.ops.aten.add.Tensor, (y, x))), y))
    program = engine_for(Options()).runner(AtenGraph("in_place", torch.fx.GraphModule(torch.nn.Module(), graph)))
    for _ in range(2):
        x_value = real.clone()
        total, sums = program([x_value])
        whole = real / (rank + 1)
        assert_equal([total, sums, x_value], [whole * 8, whole * 6, whole * 2])


@case
def dynamic_sizes(rank: int) -> None:
    function = compiled(lambda x: fc.all_reduce(x * 2, "sum", dist.group.WORLD) + x.shape[0], dynamic=True, fullgraph=True)
    for rows in (3, 5, 4):
        x = torch.randn(rows, 7) + rank
        other = x + 1 - 2 * rank
        assert_equal(function(x), (x + other) * 2 + rows, tolerance=(1e-5, 1e-5))


@case
def unfinished_collective_as_input(rank: int) -> None:
    x = large(rank)
    arriving = fc.all_reduce(x, "sum", dist.group.WORLD)
    assert_equal(compiled(lambda x: x * 2)(arriving), x / (rank + 1) * 6)


@case
def frozen_model_with_collective(rank: int) -> None:
    """Values that depend only on parameters are computed once, but not results of collectives."""
    weight = nn.Parameter(torch.full((3,), rank + 1.0), requires_grad=False)
    module = nn.Module()
    module.weight = weight
    module.forward = lambda x: x + fc.all_reduce(module.weight * 2, "sum", dist.group.WORLD)
    function = compiled(module, options={"freeze": True})
    with torch.no_grad():
        assert_equal(function(torch.zeros(3)), torch.full((3,), 6.0))
        if rank == 0:
            weight += 1
        assert_equal(function(torch.zeros(3)), torch.full((3,), 8.0))


@case
def gradients_through_collectives(rank: int) -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        gathered = fc.all_gather_tensor_autograd(x @ w, 0, dist.group.WORLD).sin()
        return fc.reduce_scatter_tensor_autograd(gathered * 2, "sum", 0, dist.group.WORLD).square().sum()

    found = []
    for call in (function, compiled(function, fullgraph=True)):
        for _ in range(2):
            x = (torch.arange(6.0).view(2, 3) + rank).requires_grad_()
            w = torch.linspace(0, 1, 12).view(3, 4).requires_grad_()
            loss = call(x, w)
            loss.backward()
        found.append([loss.detach(), x.grad, w.grad])
    assert_equal(found[1], found[0], tolerance=(1e-4, 1e-4))


@case
def tensor_parallel(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (WORLD,))
    plain = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    parallel = parallelize_module(copy.deepcopy(plain), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    x = torch.randn(5, 8)
    function = compiled(parallel)
    for _ in range(2):
        plain.zero_grad()
        parallel.zero_grad()
        expected, actual = plain(x), function(x)
        assert_equal(actual, expected, tolerance=(1e-5, 1e-5))
        expected.square().sum().backward()
        actual.square().sum().backward()
        for mine, theirs in zip(parallel.parameters(), plain.parameters(), strict=True):
            assert_equal(mine.grad.full_tensor(), theirs.grad, tolerance=(1e-4, 1e-5))


@case
def tensor_parallel_inference(rank: int) -> None:
    """Inputs and output of the graph are DTensors."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (WORLD,))
    weight, x = torch.randn(8, 4), torch.randn(5, 8)
    parts = distribute_tensor(weight, mesh, [Shard(0)]), distribute_tensor(x, mesh, [Shard(1)])
    function = compiled(lambda x, w: (x @ w).redistribute(mesh, [Replicate()]) + 1, fullgraph=True)
    with torch.no_grad():
        for _ in range(2):
            out = function(parts[1], parts[0])
            assert type(out) is type(parts[0])
            assert_equal(out.to_local(), x @ weight + 1, tolerance=(1e-4, 1e-5))


@case
def checkpointed_collectives(rank: int) -> None:
    """The backward pass calls the collective again."""
    from torch.utils.checkpoint import checkpoint

    def region(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        gathered = fc.all_gather_tensor_autograd((x @ w).sin(), 0, dist.group.WORLD)
        return nn.functional.dropout(gathered, 0.0).exp().sum(0)

    found = []
    for call in (lambda function: function, compiled):
        x = (torch.arange(6.0).view(2, 3) + rank).requires_grad_()
        w = torch.linspace(0, 1, 12).view(3, 4).requires_grad_()
        loss = call(lambda x, w: checkpoint(region, x, w, use_reentrant=False).square().sum())(x, w)
        loss.backward()
        found.append([loss.detach(), x.grad, w.grad])
    assert_equal(found[1], found[0], tolerance=(1e-4, 1e-4))


@case
def sharded_parameters(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    found = []
    for wrap in (lambda net: net, compiled):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        fully_shard(net, mesh=init_device_mesh("cpu", (WORLD,)))
        model = wrap(net)
        x = torch.randn(WORLD, 5, 8)[rank]
        for _ in range(2):
            net.zero_grad()
            model(x).square().sum().backward()
        found.append([parameter.grad.full_tensor() for parameter in net.parameters()])
    assert_equal(found[1], found[0], tolerance=(1e-4, 1e-5))


@case
def data_parallel(rank: int) -> None:
    found = []
    for wrap in (lambda net: net, compiled):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        model = wrap(nn.parallel.DistributedDataParallel(net))
        x = torch.randn(WORLD, 5, 8)[rank]
        for _ in range(2):
            net.zero_grad()
            model(x).square().sum().backward()
        found.append([parameter.grad for parameter in net.parameters()])
    assert_equal(found[1], found[0], tolerance=(1e-4, 1e-5))


def agree_in_steps(
    net: nn.Module, step: Callable[[torch.Tensor], torch.Tensor], eager: Callable[[torch.Tensor], torch.Tensor], *more: Any
) -> None:
    """A step agrees with eager mode: as a program, in eager mode because of a side effect, and with one way on each rank."""
    rank = dist.get_rank()
    start = [copy.deepcopy(item.state_dict()) for item in (net, *more)]
    found = []
    printed: list[int] = []

    def printing(x: torch.Tensor) -> torch.Tensor:
        printed.append(len(printed))  # a side effect, so the step stays in eager mode
        return step(x)

    whole = dynaxla.compile_step(step, fullgraph=True)
    for run in (eager, whole, dynaxla.compile_step(printing), dynaxla.compile_step(printing) if rank else whole):
        for item, state in zip((net, *more), start, strict=True):
            item.load_state_dict(copy.deepcopy(state))
        results = [run(torch.full((3, 4), 1.0 + rank + number)).detach() for number in range(4)]
        found.append((results, [parameter.grad.clone() for parameter in net.parameters()], copy.deepcopy(net.state_dict())))
    for item in found[1:]:
        assert_equal(item, found[0], tolerance=(1e-4, 1e-5))


@case
def reducing_gradients_in_a_step(rank: int) -> None:
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = net(x).square().sum()
        loss.backward()
        for parameter in net.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        return loss

    agree_in_steps(net, step, step, optimizer)


@case
def functional_collectives_in_a_step(rank: int) -> None:
    net = nn.Linear(4, 2)

    def step(x: torch.Tensor) -> torch.Tensor:
        net.zero_grad()
        loss = fc.all_reduce(net(x).square().sum(), "sum", dist.group.WORLD) * 1
        net(x).sum().backward()
        return loss

    agree_in_steps(net, step, step)


@case
def data_parallel_in_a_step(rank: int) -> None:
    net = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))

    def step(x: torch.Tensor) -> torch.Tensor:
        net.zero_grad()
        loss = net(x).square().sum()
        loss.backward()
        return loss

    agree_in_steps(net, step, step)


@case
def data_parallel_models_in_turns(rank: int) -> None:
    agree_in_turns(lambda: nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))))


def agree_with_one_eager_rank(function: Callable[[torch.Tensor], Any], *, is_program: bool) -> None:
    """One rank runs a step in eager mode because of a side effect, the other a program if `is_program`. Then they change roles."""
    rank = dist.get_rank()
    for eager_rank in range(WORLD):
        seen: list[int] = []

        def step(x: torch.Tensor, has_effect: bool = rank == eager_rank, seen: list[int] = seen) -> Any:
            if has_effect:
                seen.append(len(seen))
            return function(x)

        run, before = dynaxla.compile_step(step), dynaxla.metrics.snapshot().get("steps", 0)
        for number in range(5):
            mine, theirs = (torch.arange(6.0).view(2, 3) + rank + number for _ in range(2))
            assert_equal(run(mine), function(theirs))
            assert_equal(mine, theirs)
        assert seen == ([*range(5)] if rank == eager_rank else [])
        assert dynaxla.metrics.snapshot().get("steps", 0) - before == (3 if is_program and rank != eager_rank else 0)


@case
def inplace_collectives_in_eager_mode_and_in_a_program(rank: int) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        before = x * 2
        dist.all_reduce(x)
        gathered = torch.empty(WORLD * 2, 3)
        dist.all_gather_into_tensor(gathered, x + 1)
        listed = [torch.empty_like(x) for _ in range(WORLD)]
        dist.all_gather(listed, before)
        work = dist.broadcast(before, 1, async_op=True)
        assert work is not None
        work.wait()
        part = torch.empty(3)
        dist.reduce_scatter_tensor(part, x.reshape(-1) * 3, op=dist.ReduceOp.MAX)
        return before, gathered, part, *listed

    agree_with_one_eager_rank(function, is_program=True)


@case
def collective_without_functional_form(rank: int) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        before = x * 2
        dist.all_to_all_single(x, x + 1)  # has no functional form
        return before, x + 1

    agree_with_one_eager_rank(function, is_program=False)


@case
def no_sync_in_a_step(rank: int) -> None:
    net = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))

    def step(x: torch.Tensor) -> torch.Tensor:
        net.zero_grad()
        with net.no_sync():
            net(x).square().sum().backward()
        loss = net(x * 2).square().sum()
        loss.backward()
        return loss

    agree_in_steps(net, step, step)


@case
def communication_hook_registered_after_recording(rank: int) -> None:
    net = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))

    def step(x: torch.Tensor) -> torch.Tensor:
        net.zero_grad()
        loss = net(x).square().sum()
        loss.backward()
        return loss

    compiled_step = dynaxla.compile_step(step)
    for _ in range(3):
        compiled_step(torch.ones(3, 4))
    before = net.module.weight.grad.clone()

    def halved(_, bucket):  # type: ignore[no-untyped-def]  # torch inspects annotations, and rejects strings
        arriving = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return arriving.then(lambda found: found.value()[0] / 4)

    net.register_comm_hook(None, halved)
    compiled_step(torch.ones(3, 4))
    assert_equal(net.module.weight.grad, before / 2)


@case
def buffers_are_broadcast_from_the_first_process(rank: int) -> None:
    net = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)))

    def step(x: torch.Tensor) -> torch.Tensor:
        net.zero_grad()
        loss = net(x * torch.arange(12.0).view(3, 4).cos() * (rank + 1)).pow(3).sum()
        loss.backward()
        return loss

    agree_in_steps(net, step, step)


@case
def an_unused_parameter_is_an_error(rank: int) -> None:
    layers = nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 2)])
    layers.forward = lambda x: layers[0](x)
    net = nn.parallel.DistributedDataParallel(layers)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = net(x).square().sum()
        loss.backward()
        return loss

    with pytest.raises(RuntimeError, match=r"2 parameters got no gradient .* among them 1\.weight;"):
        dynaxla.compile_step(step, fullgraph=True)(torch.ones(3, 4))


@case
def independent_collectives_run_in_one_order(rank: int) -> None:
    independent(rank, count=30, calls=10)


def independent(rank: int, count: int, calls: int) -> None:
    """Collectives run in the same order in all processes, even if their inputs are ready in another order.

    In different orders, they would add tensors that do not belong together, or of different sizes.
    """
    waits = random.Random(rank)

    @torch.library.custom_op("test_collectives::late", mutates_args=())
    def late(x: torch.Tensor) -> torch.Tensor:
        time.sleep(waits.random() / 2000)
        return x.clone()

    late.register_fake(torch.empty_like)

    def function(x: torch.Tensor) -> list[torch.Tensor]:
        return [fc.all_reduce(late(x[: 1 + number % 7] + number), "sum", dist.group.WORLD) for number in range(count)]

    torch.set_num_threads(4)
    run, before = compiled(function, fullgraph=True), dynaxla.metrics.snapshot()
    for call in range(calls):
        x = torch.arange(7.0) * (rank + 1) + call
        whole = torch.arange(7.0) * 3 + 2 * call
        assert_equal(run(x), [whole[: 1 + number % 7] + 2 * number for number in range(count)])
    torch.set_num_threads(1)
    assert dynaxla.metrics.snapshot()["calls"] - before.get("calls", 0) == calls, "the collectives are not in one program"


def many_independent(rank: int) -> None:
    """A longer case, which takes minutes."""
    independent(rank, count=100, calls=1000)


@case
def gradients_of_the_previous_step(rank: int) -> None:
    """A step reads the gradients that the previous call has left, here DTensors."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    found = []
    for run in (lambda step: step, lambda step: dynaxla.compile_step(step, fullgraph=True)):
        torch.manual_seed(0)
        net = parallelize_module(nn.Linear(4, 6), init_device_mesh("cpu", (WORLD,)), ColwiseParallel())

        def step(x: torch.Tensor, net: nn.Module = net) -> list[torch.Tensor]:
            before = [parameter.grad.to_local().clone() for parameter in net.parameters() if parameter.grad is not None]
            net.zero_grad()
            net(x).square().sum().backward()
            return before

        call = run(step)
        found.append([call(torch.full((3, 4), 1.0 + number)) for number in range(4)])
    assert_equal(found[1], found[0], tolerance=(1e-5, 1e-5))
