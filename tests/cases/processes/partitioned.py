"""Cases for the processes of `test_partitioning.py`: graphs with DTensors whose collectives XLA chooses (distributed="spmd").

The reference is one device with the whole model and batch, in float64. Placements are compared with those of DTensors in eager mode.
"""

from __future__ import annotations

import datetime
import functools
import os
import pickle
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel, parallelize_module

import dynaxla
from cases.processes import parallelisms
from dynaxla.engine.executable import recorded_runs

XLA: dict[str, Any] = {"distributed": "spmd"}
DTYPE = torch.float64
QUICK: dict[str, Callable[[int], None]] = {}
SLOW: dict[str, Callable[[int], None]] = {}
FOUR: dict[str, Callable[[int], None]] = {}


def quick(function: Callable[[int], None]) -> Callable[[int], None]:
    QUICK[function.__name__] = function
    return function


def slow(function: Callable[[int], None]) -> Callable[[int], None]:
    SLOW[function.__name__] = function
    return function


def four_processes(function: Callable[[int], None]) -> Callable[[int], None]:
    FOUR[function.__name__] = function
    return function


def run(rank: int, world: str, rendezvous: str, results: str, *names: str) -> None:
    """Runs cases in one process of the group, and writes their errors to a file."""
    os.environ["DYNAXLA_CACHE"] = ""
    torch.set_num_threads(1)
    warnings.filterwarnings("error", message=".*unwaited.*")
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=int(world), timeout=datetime.timedelta(seconds=100)
    )
    found: dict[str, str] = {}
    for name in names:
        torch._dynamo.reset()
        torch.manual_seed(0)
        try:
            (QUICK | SLOW | FOUR)[name](rank)
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


@contextmanager
def counted(partitioned: int, left: int = 0) -> Iterator[None]:
    """Checks the number of partitioned ATen graphs, and of Dynamo graphs left to distributed="xla", in this context."""
    before = count("partitioned"), count("not_partitioned")
    yield
    found = count("partitioned") - before[0], count("not_partitioned") - before[1]
    assert found == (partitioned, left), f"{found[0]} are partitioned and {found[1]} left, not {partitioned} and {left}"


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def world_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


class Megatron(nn.Sequential):
    """Pairs of layers; the first is divided by columns, the second by rows."""

    def __init__(self, pairs: int = 2, width: int = 8) -> None:
        layers: list[nn.Module] = []
        for _ in range(pairs):
            layers += [nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)]
        super().__init__(*layers)
        self.to(DTYPE)

    def divide(self, mesh: DeviceMesh) -> None:
        names = [str(index) for index, layer in enumerate(self) if isinstance(layer, nn.Linear)]
        parallelize_module(self, mesh, {name: (RowwiseParallel if index % 2 else ColwiseParallel)() for index, name in enumerate(names)})


class Attention(nn.Module):
    """A block of a transformer; each process has some of the heads."""

    def __init__(self, width: int = 16, heads: int = 4, *, spelled_out: bool = False) -> None:
        super().__init__()
        self.spelled_out = spelled_out
        self.norm = nn.LayerNorm(width)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.head = width // heads
        self.to(DTYPE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        q, k, v = (layer(y).unflatten(-1, (-1, self.head)).transpose(1, 2) for layer in (self.wq, self.wk, self.wv))
        if self.spelled_out:  # the only attention of DTensors that eager mode has on the CPU
            found = (q @ k.transpose(2, 3) / self.head**0.5).softmax(-1) @ v
        else:
            found = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.wo(found.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.silu(self.up(x)))

    def divide(self, mesh: DeviceMesh) -> None:
        plan = {name: ColwiseParallel() for name in ("wq", "wk", "wv", "up")}
        parallelize_module(self, mesh, {**plan, "wo": RowwiseParallel(), "down": RowwiseParallel()})


def fully_sharded(module: nn.Module, mesh: DeviceMesh) -> None:
    """Distributes all parameters as Shard(0)."""
    for part in list(module.modules()):
        for name, parameter in list(part.named_parameters(recurse=False)):
            setattr(part, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))


def two_copies(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    copies = []
    for _ in range(2):
        torch.manual_seed(0)
        copies.append(make())
    return copies[0], copies[1]


def check_training(
    alone: nn.Module,
    divided: nn.Module,
    batches: list[tuple[torch.Tensor, torch.Tensor]],
    placed: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
    options: dict[str, Any] = XLA,
    loss_in_graph: bool = False,
) -> list[dict[str, int]]:
    """Trains with SGD, and returns the collectives of each program of the last step.

    Losses agree with one device within 1e-9 and parameters within 1e-6, and gradients have the placements of their parameters.

    The loss outside of a graph is not `mse_loss`, because with DTensors its gradient is N times too large in eager mode (torch 2.13).
    """

    def losses(net: nn.Module, place: Callable[[torch.Tensor], torch.Tensor], is_compiled: bool) -> list[float]:
        def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return nn.functional.mse_loss(net(x), y)

        model = compiled(loss_of if loss_in_graph else net, options) if is_compiled else net
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        found = []
        for x, y in batches:
            optimizer.zero_grad()
            with recorded_runs() as seen:
                if loss_in_graph and is_compiled:
                    loss = model(place(x), place(y))
                else:
                    loss = (model(place(x)) - place(y)).square().sum() / y.numel()
                loss.backward()
            collectives[:] = [collectives_of(ran.program.text()) for ran in seen if ran.program is not None]
            for parameter in net.parameters():
                if isinstance(parameter, DTensor):
                    assert parameter.grad.placements == parameter.placements
            optimizer.step()
            found.append(float(whole(loss)))
        return found

    collectives: list[dict[str, int]] = []
    expected, found = losses(alone, lambda x: x, False), losses(divided, placed, True)
    torch.testing.assert_close(torch.tensor(found, dtype=DTYPE), torch.tensor(expected, dtype=DTYPE), rtol=1e-9, atol=1e-9)
    for (name, mine), theirs in zip(divided.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(whole(mine), theirs.detach(), rtol=1e-6, atol=1e-8, msg=lambda text, name=name: f"{name}: {text}")
    return collectives


def batches(*shape: int, out: int | None = None) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    last = shape[-1] if out is None else out
    return [
        (torch.randn(shape, generator=generator, dtype=DTYPE), torch.randn(*shape[:-1], last, generator=generator, dtype=DTYPE))
        for _ in range(3)
    ]


KINDS = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")


def collectives_of(text: str) -> dict[str, int]:
    """Returns the number of collectives of each kind in a compiled program."""
    return {kind: number for kind in KINDS if (number := text.count(f" {kind}("))}


def collectives_of_call(call: Callable[[], object]) -> list[dict[str, int]]:
    """Returns the number of collectives of each kind in the programs that a call runs."""
    with recorded_runs() as seen:
        call()
    return [collectives_of(ran.program.text()) for ran in seen if ran.program is not None]


@quick
def a_megatron_mlp(rank: int) -> None:
    """The forward pass has one all-reduce for each pair of layers, the backward pass one for each pair but the first."""
    alone, divided = two_copies(Megatron)
    divided.divide(world_mesh())
    x = batches(6, 8)[0][0]
    model = compiled(divided)
    with counted(1), torch.no_grad():
        torch.testing.assert_close(model(x), alone(x), rtol=1e-9, atol=1e-9)
        assert collectives_of_call(lambda: model(x)) == [{"all-reduce": 2}]
    with counted(2):
        assert check_training(alone, divided, batches(6, 8)) == [{"all-reduce": 2}, {"all-reduce": 1}]


@slow
def unsupported_graph_is_reported(rank: int) -> None:
    """A graph that cannot be partitioned has the values of eager mode, is counted, and raises an error with fallback="error"."""
    mesh = world_mesh()
    divided = Megatron(1)
    divided.divide(mesh)
    x = torch.ones(3, 8, dtype=DTYPE)

    def noisy(x: torch.Tensor) -> torch.Tensor:
        return divided(x) + torch.rand(1) * 0

    with counted(0, 1), torch.no_grad():
        torch.testing.assert_close(compiled(noisy)(x), divided(x))
    with pytest.raises(dynaxla.errors.CaptureError, match="draws random numbers"), torch.no_grad():
        compiled(noisy, {**XLA, "fallback": "error"})(x)


@slow
def attention(rank: int) -> None:
    """A block has two all-reduces in the forward pass, and two in the backward pass."""
    alone, divided = two_copies(Attention)
    divided.divide(world_mesh())
    x = batches(2, 6, 16)[0][0]
    model = compiled(divided)
    with counted(1), torch.no_grad():
        torch.testing.assert_close(model(x), alone(x), rtol=1e-9, atol=1e-9)
        assert collectives_of_call(lambda: model(x)) == [{"all-reduce": 2}]
    with counted(2):
        assert check_training(alone, divided, batches(2, 6, 16)) == [{"all-reduce": 2}, {"all-reduce": 2}]


@slow
def fsdp_placements(rank: int) -> None:
    """Parameters and batch are Shard(0). Placements of results are those of eager mode."""
    mesh = world_mesh()
    place = functools.partial(distribute_tensor, device_mesh=mesh, placements=[Shard(0)])
    for make in (Megatron, lambda: Attention(spelled_out=True)):
        alone, divided = two_copies(make)
        fully_sharded(divided, mesh)
        shape = (8, 8) if make is Megatron else (4, 6, 16)
        x = batches(*shape)[0][0]
        model = compiled(divided)
        torch._dynamo.reset()
        with counted(1), torch.no_grad():
            found = model(place(x))
            torch.testing.assert_close(found.full_tensor(), alone(x), rtol=1e-9, atol=1e-9)
            assert found.placements == divided(place(x)).placements
        for loss_in_graph in (False, True):
            alone, divided = two_copies(make)
            fully_sharded(divided, mesh)
            torch._dynamo.reset()
            with counted(2):
                check_training(alone, divided, batches(*shape), place, loss_in_graph=loss_in_graph)


@slow
def gathered_by_a_parametrization(rank: int) -> None:
    """The model gathers its parameters itself, each process has a batch of its own, and gradients are averaged."""
    alone, divided = two_copies(lambda: Megatron(1))
    _, index, size = parallelisms.parametrized_fsdp(divided)
    model = compiled(divided)
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.01) for net in (alone, divided)]
    with counted(2):
        for x, y in batches(8, 8):
            losses = []
            for net, optimizer in zip((alone, model), optimizers, strict=True):
                optimizer.zero_grad()
                parts = (x, y) if net is alone else (x.chunk(size)[index], y.chunk(size)[index])
                loss = nn.functional.mse_loss(net(parts[0]), parts[1])
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
            dist.all_reduce(losses[1])
            torch.testing.assert_close(losses[1] / size, losses[0], rtol=1e-9, atol=1e-9)
    for name, theirs in alone.named_parameters():
        head, _, last = name.rpartition(".")
        mine = divided.get_parameter(f"{head}.parametrizations.{last}.original")
        assert mine.grad.placements == (Shard(0),)
        torch.testing.assert_close(whole(mine), theirs.detach(), rtol=1e-6, atol=1e-8)


@slow
def sequence_parallel(rank: int) -> None:
    """Activations are divided along the sequence between the blocks."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
            self.to(DTYPE)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(nn.functional.gelu(self.up(self.norm(x))))

    mesh = world_mesh()
    alone, divided = two_copies(Net)
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(divided, mesh, plan)
    parallelize_module(divided, mesh, PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),)))
    with counted(3):  # the preparation of the input is a graph of its own
        check_training(alone, divided, batches(2, 8, 8))


@slow
def outputs_have_placements_of_eager_mode(rank: int) -> None:
    mesh = world_mesh()
    size = mesh.size()
    x = distribute_tensor(torch.randn(4 * size, 8, generator=torch.Generator().manual_seed(0)), mesh, [Shard(0)])
    w = distribute_tensor(torch.randn(8, 4 * size, generator=torch.Generator().manual_seed(1)), mesh, [Shard(1)])

    def function(x: DTensor, w: DTensor) -> tuple[Any, ...]:
        y = x @ w
        return (
            y, y.sum(), y.mean(0), y.amax(), w.sum(1), x.redistribute(placements=[Replicate()]), x * 2, (x > 0).to(torch.int32),
            x.redistribute(placements=[Shard(1)]), x.to_local().sum(), x.argmax(1), (x > 0).sum(), x.round().half().sum(0),
        )  # fmt: skip

    with counted(1):
        for mine, theirs in zip(compiled(function)(x, w), function(x, w), strict=True):
            assert type(mine) is type(theirs)
            if isinstance(theirs, DTensor):
                assert (mine.placements, mine.shape, mine.stride(), mine.dtype) == (
                    theirs.placements,
                    theirs.shape,
                    theirs.stride(),
                    theirs.dtype,
                )
                assert mine._local_tensor.shape == theirs._local_tensor.shape
            torch.testing.assert_close(whole(mine), whole(theirs), rtol=1e-5, atol=1e-5)


@slow
def gradients_of_inputs(rank: int) -> None:
    """Gradients of local tensors and DTensors, for outputs of both kinds."""
    mesh = world_mesh()
    size = mesh.size()
    own = torch.randn(4, 6, generator=torch.Generator().manual_seed(rank), dtype=DTYPE)
    w = torch.randn(6, 2 * size, generator=torch.Generator().manual_seed(9), dtype=DTYPE)

    def function(x: torch.Tensor, w: DTensor) -> tuple[Any, ...]:
        y = DTensor.from_local(x.sin(), mesh, [Shard(0)]) @ w
        summed = DTensor.from_local(x.cos() * (x.shape[0] + 1), mesh, [Partial()]).redistribute(placements=[Shard(1)])
        gathered = w.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        return y, summed if size == 2 else y * 2, (x @ gathered).square(), y.sum()

    results = []
    for call in (function, compiled(function)):
        x = own.clone().requires_grad_()
        weight = distribute_tensor(w, mesh, [Shard(1)]).requires_grad_()
        outputs = call(x, weight)
        total = sum((whole_sum(item.sin()) for item in outputs), torch.zeros((), dtype=DTYPE))
        total.backward()
        assert weight.grad.placements == (Shard(1),)
        results.append((total.detach(), x.grad, weight.grad.full_tensor()))
    torch.testing.assert_close(results[1], results[0], rtol=1e-9, atol=1e-9)


def whole_sum(tensor: torch.Tensor) -> torch.Tensor:
    found = tensor.sum()
    return found.full_tensor() if isinstance(found, DTensor) else found


@slow
def reasons_against_partitioning(rank: int) -> None:
    """Graphs that cannot be partitioned have the values of eager mode, by distributed="xla". Errors state the reason."""
    mesh = world_mesh()
    size = mesh.size()
    x = distribute_tensor(torch.randn(2 * size, 6, generator=torch.Generator().manual_seed(0)), mesh, [Shard(0)])
    odd = distribute_tensor(torch.randn(2 * size + 1, 6, generator=torch.Generator().manual_seed(0)), mesh, [Shard(0)])
    partial = DTensor.from_local(torch.ones(3) * rank, mesh, [Partial()])

    def averaged(x: DTensor) -> DTensor:
        return DTensor.from_local(x.to_local().cumsum(0), mesh, [Partial("avg")]).redistribute(placements=[Replicate()])

    def writes(x: DTensor) -> DTensor:
        x.mul_(1)
        return x + 1

    cases: list[tuple[Any, Any, str]] = [
        (lambda x: x * 2, odd, "cannot be divided into"),
        (lambda x: x * 2, partial, "an input has the placements"),
        (writes, x, "writes to an input|returns an input"),
        (lambda x: (twice := x.to_local() * 2, twice[1:]), x, "share memory"),
        (lambda x: (x * 2).t(), x, "is not contiguous"),
        (lambda x: (x.sum(0).to_local(), x + 1), x, "to_local on a partial tensor"),
        (lambda x: nn.functional.dropout(x.to_local(), 0.5) * 0, x, "random"),
        (averaged, x, "from_local"),
    ]  # fmt: skip
    for function, argument, reason in cases:
        torch._dynamo.reset()
        with counted(0, 1):
            found, expected = compiled(function)(argument), function(argument)
        for mine, theirs in zip(torch.utils._pytree.tree_leaves(found), torch.utils._pytree.tree_leaves(expected), strict=True):
            torch.testing.assert_close(whole(mine), whole(theirs))
        torch._dynamo.reset()
        with pytest.raises(dynaxla.errors.CaptureError, match=reason):
            compiled(function, {**XLA, "fallback": "error"})(argument)
    torch._dynamo.reset()
    with pytest.raises(dynaxla.errors.CaptureError, match="is a dynamic size or a number"):
        compiled(lambda x: x * 2, {**XLA, "fallback": "error"}, dynamic=True)(x)


@slow
def local_tensors_differ_between_processes(rank: int) -> None:
    """Sizes, slices, sorts and running sums of a local tensor are computed from this process's tensor only."""
    mesh = world_mesh()
    x = distribute_tensor(torch.randn(4 * mesh.size(), 6, generator=torch.Generator().manual_seed(0)), mesh, [Shard(0)])

    def function(x: DTensor, own: torch.Tensor) -> tuple[Any, ...]:
        mine = x.to_local()
        found = mine.cumsum(0)[:3].flip(0) / mine.shape[0] + mine.sort(0).values[1:] + own.softmax(0) + mine.amax()
        table = torch.arange(3.0)[:, None] * mine[:3]
        return found, DTensor.from_local(table.sort(0).values, mesh, [Shard(1)]), (mine * 2).reshape(3, 8), torch.cat([own, mine]).var()

    own = torch.randn(3, 6, generator=torch.Generator().manual_seed(rank))
    with counted(1):
        for mine, theirs in zip(compiled(function)(x, own), function(x, own), strict=True):
            torch.testing.assert_close(whole(mine), whole(theirs))


@slow
def layers_on_local_tensors(rank: int) -> None:
    """Layers between to_local and from_local, and layers on other local tensors, have the values and gradients of eager mode."""
    mesh = world_mesh()
    torch.manual_seed(rank)
    w = distribute_tensor(torch.randn(4 * mesh.size(), 6, generator=torch.Generator().manual_seed(0), dtype=DTYPE), mesh, [Shard(0)])
    images, labels, logits = torch.randn(2, 6, 5, 5, dtype=DTYPE), torch.tensor([0, 2, -100, 1]), torch.randn(4, 3, dtype=DTYPE)
    layers = nn.ModuleList([nn.Conv2d(6, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Embedding(7, 6), nn.LSTM(6, 4)]).to(DTYPE)
    index, mask = torch.randint(0, 6, (4, 3)), torch.rand(4, 6) > 0.5

    def convolutions(mine: torch.Tensor) -> torch.Tensor:
        found = layers[1](layers[0](images + mine.mean(0)[:, None, None]))
        return nn.functional.max_pool2d(found, 2, stride=1).relu() + nn.functional.interpolate(found, size=(4, 4)).tanh()

    def losses(mine: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(logits * mine.mean(), labels, label_smoothing=0.1)
        return loss + nn.functional.smooth_l1_loss(mine, mine.roll(1, 0)) + (mine.log_softmax(1) * mine.softmax(0)).sum()

    def indexing(mine: torch.Tensor) -> torch.Tensor:
        found = mine.gather(1, index) + mine[index[:, 0] % 4, :3] + layers[2](index[:, 0])[:, :3] + mine.topk(3, dim=1).values
        found = found.scatter_add(1, index % 3, found.sin()).masked_fill(mask[:, :3], 2.0)
        return torch.where(mask, mine, mine.flip(1)).cumsum(1)[:, :3] + found + torch.einsum("ab,cb->ac", found, mine[:3, :3])

    def in_place(mine: torch.Tensor) -> torch.Tensor:
        found = mine * 1
        found[1:] += mine[:-1]
        found[:, ::2].mul_(own.exp()[:, ::2])
        found.relu_()
        return torch.cat([found.unfold(1, 3, 1).amax(2), found.var(0, keepdim=True)[:, :4]]).pow(2)

    own = torch.randn(4, 6, dtype=DTYPE, requires_grad=True)
    for layer in (convolutions, losses, indexing, in_place):
        results = []
        torch._dynamo.reset()
        for call in (layer, compiled(lambda w, layer=layer: layer(w.to_local()))):
            weight = w.detach().requires_grad_()
            own.grad = None
            layers.zero_grad()
            before = count("partitioned")
            found = call(weight.to_local() if call is layer else weight)
            (found * torch.arange(float(found.numel()), dtype=DTYPE).view_as(found)).sum().backward()
            gradients = [parameter.grad for parameter in (own, *layers.parameters())]
            results.append((found.detach(), weight.grad.full_tensor(), gradients))
            assert call is layer or count("partitioned") - before == 2, layer.__name__
        torch.testing.assert_close(results[1], results[0], rtol=1e-9, atol=1e-9)


@slow
def autocast_and_modes(rank: int) -> None:
    """Autocast and no_grad have the same effect in a partitioned graph as in eager mode."""
    mesh = world_mesh()
    x = distribute_tensor(torch.randn(4 * mesh.size(), 8, generator=torch.Generator().manual_seed(0)), mesh, [Shard(0)])
    w = distribute_tensor(torch.randn(8, 8, generator=torch.Generator().manual_seed(1)), mesh, [Replicate()]).requires_grad_()

    def function(x: DTensor, w: DTensor) -> tuple[DTensor, DTensor, torch.Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = x @ w
            z = y.to_local() @ y.to_local().t()
        with torch.no_grad():
            fixed = w.sin()
        return y, x @ fixed, z

    with counted(1):
        found = compiled(function)(x, w)
    for mine, theirs in zip(found, function(x, w), strict=True):
        assert mine.dtype == theirs.dtype
        assert mine.requires_grad == theirs.requires_grad
        torch.testing.assert_close(whole(mine), whole(theirs), rtol=0.02, atol=0.1)


@slow
def explain_and_report(rank: int) -> None:
    """`dynaxla.explain` shows the graphs, and the reason why a graph is not partitioned; `sharding.report` shows the collectives."""
    mesh = world_mesh()
    divided = Megatron(1)
    divided.divide(mesh)
    x = torch.ones(4, 8, dtype=DTYPE)
    explanation = dynaxla.explain(torch.compile(divided, backend="dynaxla", options=XLA), x)
    assert [graph.phase for captured in explanation.captured for graph in captured.graphs][:1] == ["forward"]
    torch._dynamo.reset()
    noisy = dynaxla.explain(torch.compile(lambda x: divided(x) + torch.rand(1), backend="dynaxla", options=XLA), x)
    assert any("draws random numbers" in way for way in noisy.step_modes)
    torch._dynamo.reset()
    model = compiled(divided)
    with torch.no_grad():
        model(x)
        report = dynaxla.sharding.report(lambda: model(x))
    assert [(item.kind, item.axes, item.count, item.bytes) for item in report.collectives] == [("all-reduce", "m0", 1, 4 * 8 * 8)]


@slow
def index_checks(rank: int) -> None:
    """An index out of range is an error on all processes, and later calls are correct."""
    mesh = world_mesh()
    table = distribute_tensor(torch.randn(6, 4 * mesh.size(), generator=torch.Generator().manual_seed(0)), mesh, [Shard(1)])
    call = compiled(lambda table, index: nn.functional.embedding(DTensor.from_local(index, mesh, [Replicate()]), table))
    with counted(1):
        good = call(table, torch.tensor([0, 5, 2]))
        with pytest.raises(IndexError, match="out of"):
            call(table, torch.tensor([0, 6, 2]))
        torch.testing.assert_close(whole(good), whole(table)[torch.tensor([0, 5, 2])])
        torch.testing.assert_close(whole(call(table, torch.tensor([1, 1, 1]))), whole(table)[torch.tensor([1, 1, 1])])


@slow
def different_programs_are_a_mismatch(rank: int) -> None:
    """If programs or options differ, all processes raise an error before a program runs. Later calls are correct."""
    mesh = world_mesh()
    x = distribute_tensor(torch.ones(2 * mesh.size(), 3), mesh, [Shard(0)])
    factor = 2.0 if rank == 0 else 3.0
    with pytest.raises(dynaxla.errors.CollectiveMismatch, match="partitioned_program"):
        compiled(lambda x: (x * factor).sum(0))(x)
    torch._dynamo.reset()
    with pytest.raises(dynaxla.errors.CollectiveMismatch):
        compiled(lambda x: x.sum(0).redistribute(placements=[Replicate()]), XLA if rank == 0 else {"distributed": "xla"})(x)
    torch._dynamo.reset()
    torch.testing.assert_close(whole(compiled(lambda x: x.sum(0) * 2)(x)), torch.full((3,), 4.0 * mesh.size()))


@slow
def dtypes_and_sizes(rank: int) -> None:
    """Half types, integers and bools; tensors of rank 0 or without elements; two programs of one function for two sizes."""
    mesh = world_mesh()
    size = mesh.size()
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.bool):
        torch._dynamo.reset()
        x = distribute_tensor((torch.arange(4 * size * 3).view(4 * size, 3) % 5).to(dtype), mesh, [Shard(0)])

        def function(x: DTensor) -> tuple[Any, ...]:
            everywhere = x.redistribute(placements=[Replicate()])
            return x.sum(0).redistribute(placements=[Replicate()]), everywhere.to_local(), x[:, :2].clone()

        call = compiled(function)
        with counted(1):
            for mine, theirs in zip(call(x), (whole(x).sum(0), whole(x), whole(x)[:, :2]), strict=True):
                torch.testing.assert_close(whole(mine), theirs)
    torch._dynamo.reset()
    empty, number = (distribute_tensor(tensor, mesh, [Replicate()]) for tensor in (torch.empty(0, 3), torch.tensor(2.0)))
    torch.testing.assert_close(whole(compiled(lambda x, y: (x + 1) * y)(empty, number)), torch.empty(0, 3))
    torch._dynamo.reset()
    call = compiled(lambda x: x.sum().redistribute(placements=[Replicate()]), dynamic=False)
    with counted(2):
        for rows in (size, 2 * size, size):
            assert float(whole(call(distribute_tensor(torch.ones(rows, 3), mesh, [Shard(0)])))) == 3 * rows


@four_processes
def a_mesh_of_two_dimensions(rank: int) -> None:
    """The batch is divided along one dimension of the mesh, the model along the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    alone, divided = two_copies(lambda: Megatron(1))
    layouts = {"0.weight": [Replicate(), Shard(0)], "0.bias": [Replicate(), Shard(0)], "2.weight": [Replicate(), Shard(1)]}
    for name, parameter in list(divided.named_parameters()):
        part, _, last = name.rpartition(".")
        placed = nn.Parameter(distribute_tensor(parameter.detach(), mesh, layouts.get(name, [Replicate(), Replicate()])))
        setattr(divided.get_submodule(part), last, placed)
    with counted(2):
        check_training(alone, divided, batches(8, 8), lambda x: distribute_tensor(x, mesh, [Shard(0), Replicate()]), loss_in_graph=True)
    both = distribute_tensor(torch.arange(64.0).view(8, 8), mesh, [Shard(0), Shard(0)])
    crossed = distribute_tensor(torch.arange(64.0).view(8, 8), mesh, [Shard(1), Shard(0)])

    def function(x: DTensor, y: DTensor) -> tuple[Any, ...]:
        mine, other = x.to_local(), y.to_local()
        return (
            mine.cumsum(0),
            other.cumsum(1),
            DTensor.from_local(other * 2, mesh, [Shard(1), Shard(0)]),
            x @ y.redistribute(placements=[Replicate()] * 2),
        )

    with counted(1):
        for mine, theirs in zip(compiled(function)(both, crossed), function(both, crossed), strict=True):
            torch.testing.assert_close(whole(mine), whole(theirs))


@four_processes
def submesh_of_two_processes(rank: int) -> None:
    """Each half of the processes has its own program."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"]
    alone, divided = two_copies(Megatron)
    divided.divide(mesh)
    with counted(2):
        check_training(alone, divided, batches(6, 8))
