"""Cases for tests/training/test_fully_sharded.py: steps with FSDP2, recorded, or in eager mode because of a side effect."""

from __future__ import annotations

import os
import pickle
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import dynaxla
from cases.object_turns.processes import agree_in_turns
from cases.processes import parallelisms
from dynaxla.lowering.ops import collectives
from dynaxla.runtime import private_fsdp
from support.comparisons.compare import assert_equal

Case = Callable[[], None]
Net = Callable[[], nn.Module]
Step = Callable[[torch.Tensor], Any]
CASES: dict[str, Case] = {}
WORLD = 2
# torch 2.15 stores unreduced gradients for each parameter, in a dtype of their own.
HAS_UNSHARDED_GRAD_DTYPE = hasattr(FSDPParam, "unsharded_grad_dtype")
WIDTH = 6


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def case_with_unsharded_grad_dtype(function: Case) -> Case:
    """Adds a case for features that earlier releases of torch lack."""
    return case(function) if HAS_UNSHARDED_GRAD_DTYPE else function


def run(rank: int, rendezvous: str, results: str, names: list[str]) -> None:
    """Runs cases in one process of the group, and writes their errors to a file."""
    os.environ["DYNAXLA_CACHE"] = ""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=WORLD)
    found: dict[str, str] = {}
    for name in names:
        torch._dynamo.reset()
        try:
            CASES[name]()
            found[name] = ""
        except BaseException:
            found[name] = traceback.format_exc()
        dist.barrier()
    Path(f"{results}{rank}").write_bytes(pickle.dumps(found))
    dist.destroy_process_group()


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (WORLD,))


class Block(nn.Module):
    """A residual block. Two processes divide its parameters into unequal shards, and one of `scale` is empty."""

    def __init__(self, hidden: int = 5) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)
        self.scale = nn.Parameter(torch.ones(1, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x))) * self.scale


def blocks(outermost: Any = None, **settings: Any) -> nn.Sequential:
    """Returns a network of sharded blocks.

    Args:
        outermost: settings of the outermost module, if they differ from those of the blocks.
        settings: settings of the blocks.
    """
    net = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 3))
    for block in list(net)[:2]:
        fully_shard(block, mesh=mesh(), **settings)
    return fully_shard(net, mesh=mesh(), **(outermost or settings))


def mixed() -> nn.Sequential:
    precisions = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    outermost = {"mp_policy": MixedPrecisionPolicy(**precisions, output_dtype=torch.float32)}
    return blocks(outermost, mp_policy=MixedPrecisionPolicy(**precisions))


def plain_step(net: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = net(x).float().square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


def batch(number: int) -> torch.Tensor:
    return torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH) * (dist.get_rank() + 1) + number / 8


def state(net: nn.Module) -> list[Any]:
    """Returns this process's shards of parameters and gradients."""
    found: list[Any] = []
    for parameter in net.parameters():
        assert isinstance(parameter, (DTensor, nn.Parameter))
        for tensor in (parameter.detach(), parameter.grad):
            found.append((tensor.to_local(), tensor.placements) if isinstance(tensor, DTensor) else tensor)
    return found


def agree(
    build: Net = blocks,
    make: Callable[[nn.Module, torch.optim.Optimizer], Step] = plain_step,
    *,
    calls: int = 3,
    recorded: bool = True,
    between: Callable[[nn.Module, int], object] = lambda net, number: None,
    tolerance: tuple[float, float] = (1e-4, 1e-5),
    modes: tuple[str, ...] = ("recorded", "printing"),
) -> None:
    """Losses, parameters and gradients of each mode are those of eager mode.

    Args:
        build: makes the network.
        make: makes the step.
        calls: the number of calls.
        recorded: True if the step can be recorded.
        between: called before each call, with the network and the number of the call.
        tolerance: the relative and absolute tolerance.
        modes: "recorded"; "printing" (a side effect keeps the step in eager mode); "by ranks" (recorded on rank 0, "printing" elsewhere).
    """
    found = []
    for mode in ("eager", *modes):
        torch.manual_seed(0)
        net = build()
        step = make(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
        printed: list[int] = []

        def printing(x: torch.Tensor, step: Step = step, printed: list[int] = printed) -> Any:
            printed.append(len(printed))  # a side effect, so the step stays in eager mode
            return step(x)

        is_recorded = mode == "recorded" or (mode == "by ranks" and dist.get_rank() == 0)
        compiled = dynaxla.compile_step(step, fullgraph=recorded) if is_recorded else dynaxla.compile_step(printing)
        call = step if mode == "eager" else compiled
        before, results = dynaxla.metrics.snapshot().get("steps", 0), []
        for number in range(calls):
            between(net, number)
            results.append((call(batch(number)).detach(), state(net)))
        found.append(results)
        assert mode != "recorded" or not recorded or dynaxla.metrics.snapshot()["steps"] - before == calls
    for results in found[1:]:
        assert_equal(results, found[0], tolerance=tolerance)


@case
def unequal_shards() -> None:
    agree(modes=("recorded", "printing", "by ranks"))


@case
def models_in_turns() -> None:
    agree_in_turns(blocks)


@case
def only_the_whole_model_is_sharded() -> None:
    agree(lambda: fully_shard(nn.Sequential(Block(), nn.Linear(WIDTH, 3)), mesh=mesh()))


@case
def a_step_that_one_process_cannot_record() -> None:
    """This process calls the collectives of the other process's program."""

    def make(net: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
        step, seen = plain_step(net, optimizer), list[int]()

        def unequal(x: torch.Tensor) -> torch.Tensor:
            if dist.get_rank() == 0:
                seen.append(len(seen))
            return step(x)

        return unequal

    agree(make=make, recorded=False, modes=("recorded",))


@case
def mixed_precision() -> None:
    agree(mixed, tolerance=(3e-2, 1e-2))


@case
def mixed_precision_of_parameters_only() -> None:
    agree(lambda: blocks(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)), tolerance=(3e-2, 1e-2))


def accumulating(net: Any, optimizer: torch.optim.Optimizer) -> Step:
    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        total = torch.zeros(())
        for index, part in enumerate(x.chunk(2)):
            net.set_requires_gradient_sync(index == 1)
            loss = net(part).square().mean()
            loss.backward()
            total += loss.detach()
        optimizer.step()
        return total

    return step


@case
def gradients_accumulate_in_a_step() -> None:
    agree(make=accumulating, modes=("recorded", "printing", "by ranks"))


@case
def gradients_accumulate_in_another_precision() -> None:
    agree(mixed, accumulating, tolerance=(3e-2, 1e-2))


@case
def gathered_parameters_stay_while_gradients_accumulate() -> None:
    def make(net: Any, optimizer: torch.optim.Optimizer) -> Step:
        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            for index, part in enumerate(x.chunk(2)):
                net.set_requires_gradient_sync(index == 1)
                net.set_reshard_after_backward(index == 1)
                loss = net(part).square().mean()
                loss.backward()
            optimizer.step()
            return loss

        return step

    agree(make=make)
    agree(lambda: blocks(reshard_after_forward=False), make)


def without_an_optimizer(net: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """Returns a step that accumulates gradients and does not use them."""

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = net(x).square().mean()
        loss.backward()
        return loss

    return step


@case
def gradients_accumulate_over_steps() -> None:
    """Every second step reduces gradients, including those of the step before."""

    def between(net: Any, number: int) -> None:
        net.set_requires_gradient_sync(number % 2 == 1)

    agree(make=without_an_optimizer, calls=6, between=between)


@case
def step_with_and_without_gradient_sync() -> None:
    """The step has one program without reduction of gradients and one with it; the second one reduces the gradients of the first."""

    def between(net: Any, number: int) -> None:
        net.set_requires_gradient_sync(number == 1)

    agree(lambda: fully_shard(nn.Linear(WIDTH, 3), mesh=mesh()), without_an_optimizer, calls=2, between=between, modes=("recorded",))


@case
def eager_passes_between_steps() -> None:
    """An evaluation leaves the outermost parameters gathered, and a backward pass leaves unreduced gradients to the step."""

    def between(net: Any, number: int) -> None:
        with torch.no_grad():
            net(batch(7))
        if number == 2:
            net.set_requires_gradient_sync(False)
            net(batch(5)).sum().backward()
            net.set_requires_gradient_sync(True)

    agree(make=without_an_optimizer, calls=4, between=between)


@case
def unreduced_gradients_pass_between_steps_and_eager_mode() -> None:
    """An eager backward pass reduces the gradients of a step; then a step reduces those of a step and of an eager backward pass."""

    def make(net: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
        def step(x: torch.Tensor) -> torch.Tensor:
            loss = net(x).float().square().mean()
            loss.backward()
            return loss

        return step

    def between(net: Any, number: int) -> None:
        if number % 2:
            net.set_requires_gradient_sync(number == 1)
            net(batch(5)).float().sum().backward()
        net.set_requires_gradient_sync(number % 2 == 1)

    agree(make=make, calls=4, between=between)
    agree(mixed, make, calls=4, between=between, tolerance=(3e-2, 1e-2))


@case
def gradients_are_summed_in_the_dtype_of_eager_mode() -> None:
    """The sum of the two gradients is exact in float32, and not in bfloat16."""

    def make(net: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
        value = 2.0 ** (-8 * dist.get_rank())

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = net(x[:1] * 0 + value).sum()
            loss.backward()
            return loss * 0

        return step

    for names in (["param_dtype"], ["reduce_dtype"], ["param_dtype", "reduce_dtype"]):
        policy = MixedPrecisionPolicy(**dict.fromkeys(names, torch.bfloat16))
        agree(lambda policy=policy: fully_shard(nn.Linear(WIDTH, 1), mesh=mesh(), mp_policy=policy), make, calls=2, tolerance=(0, 0))


class TwoDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(WIDTH, 5), nn.Linear(5, 5, dtype=torch.bfloat16), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.second(self.first(x).bfloat16()).float())  # type: ignore[no-any-return]


@case_with_unsharded_grad_dtype
def parameters_of_two_dtypes_in_one_group() -> None:
    """torch requires one dtype for the parameters trained in the first pass, but accepts parameters of another dtype later."""

    def build() -> nn.Module:
        net = TwoDtypes()
        net.second.requires_grad_(False)
        sharded = fully_shard(net, mesh=mesh())
        sharded(batch(0))
        sharded.reshard()
        return sharded.requires_grad_(True)

    agree(build, tolerance=(3e-2, 1e-2))
    agree(build, accumulating, tolerance=(3e-2, 1e-2))


def replicated(shape: tuple[int, int]) -> nn.Module:
    net = nn.Sequential(Block(), nn.Linear(WIDTH, 3))
    device_mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    fully_shard(net[0], mesh=device_mesh)
    return fully_shard(net, mesh=device_mesh)


@case
def replicas() -> None:
    agree(lambda: replicated((WORLD, 1)))
    agree(lambda: replicated((1, WORLD)))


@case
def replicas_all_reduce_gradients_later() -> None:
    def make(net: Any, optimizer: torch.optim.Optimizer) -> Step:
        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            for index, part in enumerate(x.chunk(2)):
                net.set_requires_all_reduce(index == 1)
                loss = net(part).square().mean()
                loss.backward()
            optimizer.step()
            return loss

        return step

    agree(lambda: replicated((WORLD, 1)), make)


class EitherBlock(nn.Module):
    """A module that calls one of its two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block(4)
        self.uses_first = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.first if self.uses_first else self.second)(x)  # type: ignore[no-any-return]


@case_with_unsharded_grad_dtype
def replicas_all_reduce_gradients_of_other_parameters_later() -> None:
    """Gradients not yet reduced over replicas are stored for each parameter, in a step and between steps and eager passes."""

    def build() -> nn.Module:
        return fully_shard(EitherBlock(), mesh=init_device_mesh("cpu", (WORLD, 1), mesh_dim_names=("replicate", "shard")))

    def in_a_step(net: Any, optimizer: torch.optim.Optimizer) -> Step:
        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            for index in range(3):
                net.set_requires_all_reduce(index == 2)
                net.uses_first = index == 1
                loss = net(x).square().mean()
                loss.backward()
            optimizer.step()
            return loss  # type: ignore[no-any-return]

        return step

    def in_several(net: Any, optimizer: torch.optim.Optimizer) -> Step:
        def step(x: torch.Tensor) -> torch.Tensor:
            loss = net(x).square().mean()
            loss.backward()
            return loss  # type: ignore[no-any-return]

        return step

    def between(net: Any, number: int) -> None:
        if number % 2:
            net.uses_first = False
            net.set_requires_all_reduce(number == 3)
            net(batch(5)).sum().backward()
        net.set_requires_all_reduce(number % 2 == 1)
        net.uses_first = True

    agree(build, in_a_step)
    agree(build, in_several, calls=5, between=between)


@case_with_unsharded_grad_dtype
def backward_pass_finalized_later() -> None:
    """`finalize_backward` reduces gradients that a step has left, after the step and within it."""

    def build() -> nn.Module:
        net: Any = blocks()
        net.set_manual_backward_finalization(True)
        return net  # type: ignore[no-any-return]

    def between(net: Any, number: int) -> None:
        net.set_requires_gradient_sync(True)
        if number:
            net.finalize_backward()
        net.set_requires_gradient_sync(False)

    agree(build, without_an_optimizer, between=between)
    for is_synced in (False, True):

        def with_finalization(net: Any, optimizer: torch.optim.Optimizer, is_synced: bool = is_synced) -> Step:
            step = without_an_optimizer(net, optimizer)

            def longer(x: torch.Tensor) -> torch.Tensor:
                net.set_requires_gradient_sync(is_synced)
                loss = step(x)
                net.set_requires_gradient_sync(True)
                net.finalize_backward()
                return loss  # type: ignore[no-any-return]

            return longer

        agree(build, with_finalization, modes=("printing",))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.block = nn.Embedding(7, WIDTH), Block()
        self.head = nn.Linear(WIDTH, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.embedding((x * 10).long() % 7)))  # type: ignore[no-any-return]


@case
def tied_parameters() -> None:
    def build() -> nn.Module:
        net = Tied()
        fully_shard(net.block, mesh=mesh())
        return fully_shard(net, mesh=mesh())

    agree(build)


@case
def modules_in_one_group() -> None:
    def build() -> nn.Module:
        net = Tied()
        fully_shard(net.block, mesh=mesh())
        fully_shard([net.embedding, net.head], mesh=mesh())
        return fully_shard(net, mesh=mesh())

    agree(build)


@case
def sharded_along_the_last_dimension() -> None:
    def build() -> nn.Module:
        net = nn.Sequential(Block(8), nn.Linear(WIDTH, 4))
        fully_shard(net[0], mesh=mesh(), shard_placement_fn=lambda parameter: Shard(parameter.ndim - 1))
        return fully_shard(net, mesh=mesh())

    agree(build)


@case
def frozen_and_ignored_parameters() -> None:
    def build() -> nn.Module:
        net = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 3))
        net[0].requires_grad_(False)
        net[1].up.bias.requires_grad_(False)
        fully_shard(net[0], mesh=mesh())
        fully_shard(net[1], mesh=mesh(), ignored_params={net[1].scale})
        return fully_shard(net, mesh=mesh(), ignored_params={net[1].scale})

    agree(build)


class UnusedParameters(nn.Module):
    """A module with a parameter and a block that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused, self.spare = Block(), Block(), nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)  # type: ignore[no-any-return]


@case
def parameters_without_gradients() -> None:
    def build() -> nn.Module:
        net = UnusedParameters()
        fully_shard(net.used, mesh=mesh())
        fully_shard(net.unused, mesh=mesh())
        return fully_shard(net, mesh=mesh())

    agree(build)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(self.block(x).sin())  # type: ignore[no-any-return]


@case
def a_module_that_runs_twice() -> None:
    def build() -> nn.Module:
        net = Twice()
        fully_shard(net.block, mesh=mesh())
        return fully_shard(net, mesh=mesh())

    agree(build)


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)  # type: ignore[no-any-return]


@case
def checkpoints() -> None:
    for reentrant in (False, True):
        for outside in (False, True):

            def build(reentrant: bool = reentrant, outside: bool = outside) -> nn.Module:
                net = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Checkpointed(Block(), reentrant) for _ in range(2)))
                for part in list(net)[1:]:
                    fully_shard(part.inner if outside else part, mesh=mesh())
                return fully_shard(net, mesh=mesh())

            agree(build)


@case
def no_reshard_after_forward() -> None:
    agree(lambda: blocks(reshard_after_forward=False))


@case
def reshard_to_fewer_processes_after_forward() -> None:
    agree(lambda: blocks(reshard_after_forward=1))


@case
def gradient_divide_factor() -> None:
    def build() -> nn.Module:
        net: Any = blocks(mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float64))
        net.set_gradient_divide_factor(3.0)
        for block in list(net)[:2]:
            block.set_gradient_divide_factor(5.0)
        return net  # type: ignore[no-any-return]

    agree(build)


@case
def clipped_gradients() -> None:
    def make(net: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            optimizer.step()
            return norm.full_tensor() + loss  # type: ignore[operator]

        return step

    agree(make=make)


@case
def tensor_parallel_and_fully_sharded() -> None:
    """Unreduced gradients are DTensors whose placements differ from those of the parameters."""

    def build() -> nn.Module:
        device_mesh = init_device_mesh("cpu", (1, WORLD), mesh_dim_names=("fsdp", "tp"))
        net = nn.Sequential(Block(8), nn.Linear(WIDTH, 3))
        del net[0].scale
        net[0].scale = 1.0
        parallelize_module(net[0], device_mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(net[0], mesh=device_mesh["fsdp"])
        return fully_shard(net, mesh=device_mesh["fsdp"])

    def same_batch(net: Any, optimizer: torch.optim.Optimizer) -> Step:
        step = accumulating(net, optimizer)
        return lambda x: step(x / (dist.get_rank() + 1))

    agree(build, same_batch, modes=("recorded",))


class Method(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x).cos()  # type: ignore[no-any-return]


@case
def registered_forward_method() -> None:
    def build() -> nn.Module:
        net = fully_shard(Method(), mesh=mesh())
        register_fsdp_forward_method(net, "encode")
        return net

    def make(net: Any, optimizer: torch.optim.Optimizer) -> Step:
        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = net.encode(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss  # type: ignore[no-any-return]

        return step

    agree(build, make)


@case
def without_gradients() -> None:
    def make(net: Any, optimizer: torch.optim.Optimizer) -> Step:
        def step(x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                before = net(x)
            after = net(x)
            net.reshard()  # eager mode would leave the outermost parameters gathered
            return before + after  # type: ignore[no-any-return]

        return step

    agree(make=make)


@case
def explicit_unshard_and_reshard() -> None:
    def make(net: Any, optimizer: torch.optim.Optimizer) -> Step:
        def step(x: torch.Tensor) -> torch.Tensor:
            net[0].unshard()
            total = net[0].up.weight.detach().sum()
            net[0].reshard()
            net[1].unshard(async_op=True)
            return total + plain_step(net, optimizer)(x)

        return step

    agree(make=make)


@case
def failed_recording_restores_sharded_parameters() -> None:
    net = blocks()
    parts = list(net.parameters())

    def fail(*_: Any) -> None:
        raise LookupError("planted")

    hook = net[2].register_forward_hook(fail)
    step = plain_step(net, torch.optim.SGD(net.parameters(), lr=0.1))
    with pytest.raises(LookupError, match="planted"):
        dynaxla.compile_step(step, fullgraph=True)(batch(0))
    assert all(one is other for one, other in zip(net.parameters(), parts, strict=True))
    hook.remove()
    expected = net(batch(0)).square().mean().detach()
    assert_equal(dynaxla.compile_step(step, fullgraph=True)(batch(0)), expected, tolerance=(1e-5, 1e-6))


@case
def unsupported_hook_is_reported() -> None:
    def build() -> Any:
        net: Any = blocks()
        net.set_all_reduce_hook(lambda gradient: gradient.mul_(2))
        return net

    net = build()
    with pytest.raises(dynaxla.errors.CaptureError, match="module of fully_shard with a hook for all-reduces"):
        dynaxla.compile_step(plain_step(net, torch.optim.SGD(net.parameters(), lr=0.1)), fullgraph=True)(batch(0))
    agree(build, recorded=False)


@case
def unknown_internals_of_torch_run_eagerly() -> None:
    """The backend checks all internals that it needs before it uses any of them."""
    for names in ("_IN_STATE", "_IN_GROUP", "_IN_PARAMETER", "_FUNCTIONS"):
        before = getattr(private_fsdp, names)
        for function in (private_fsdp._missing_function, private_fsdp._reported):
            function.cache_clear()
        setattr(private_fsdp, names, (*before, "torch.renamed"))
        try:
            agree(recorded=False, calls=2)
            net = blocks()
            step = plain_step(net, torch.optim.SGD(net.parameters(), lr=0.1))
            with pytest.raises(dynaxla.errors.CaptureError, match="module of fully_shard with internals that this version of torch"):
                dynaxla.compile_step(step, fullgraph=True)(batch(0))
        finally:
            setattr(private_fsdp, names, before)
            private_fsdp._missing_function.cache_clear()


@case
def changed_setting_makes_another_program() -> None:
    def between(net: Any, number: int) -> None:
        net.set_requires_gradient_sync(number != 1)
        net.set_gradient_divide_factor(2.0 if number < 4 else WORLD * 2.0)

    agree(
        lambda: blocks(mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float64)),
        calls=6,
        between=between,
    )


class CollectiveCounter:
    """Counts the collectives that programs call, and the elements of their results."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.elements: Counter[str] = Counter()

    def __enter__(self) -> CollectiveCounter:
        self._before = dict(collectives._STARTS)
        for name, function in self._before.items():
            collectives._STARTS[name] = self._counting(name.partition("::")[2], function)
        return self

    def __exit__(self, *_: object) -> None:
        collectives._STARTS.update(self._before)

    def _counting(self, name: str, start: Callable[..., Any]) -> Callable[..., Any]:
        def counting(group: Any, outputs: Any, inputs: Any, *settings: Any) -> Any:
            self.calls[name] += 1
            self.elements[name] += sum(output.numel() for output in outputs)
            return start(group, outputs, inputs, *settings)

        return counting


@case
def collectives_of_a_step() -> None:
    """Each group is gathered once in the forward pass and once in the backward pass (not the outermost one), and reduced once."""
    torch.manual_seed(0)
    net = nn.Sequential(Block(8), Block(8), nn.Linear(WIDTH, 4))
    whole = sum(parameter.numel() for parameter in net.parameters())
    for block in list(net)[:2]:
        fully_shard(block, mesh=mesh(), shard_placement_fn=lambda parameter: Shard(parameter.ndim - 1))
    fully_shard(net, mesh=mesh())
    step = dynaxla.compile_step(plain_step(net, torch.optim.SGD(net.parameters(), lr=0.1)), fullgraph=True)
    with CollectiveCounter() as counter:
        step(batch(0))
    assert counter.calls == {"all_gather_into_tensor": 5, "reduce_scatter_tensor": 3}
    assert counter.elements["reduce_scatter_tensor"] == whole / WORLD
    assert counter.elements["all_gather_into_tensor"] <= 2 * whole


@case
def compiled_model_gathers_again_in_backward() -> None:
    """The backward graph gathers parameters again; autograd saves only activations and this process's shards."""
    net = nn.Sequential(*(Block(8) for _ in range(3)))
    parameters = {name: parameter.numel() for name, parameter in net.named_parameters()}
    parallelisms.parametrized_fsdp(net)
    model = torch.compile(net, backend="dynaxla")
    saved: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(0 if isinstance(tensor, DTensor) else tensor.numel())
        return tensor

    with CollectiveCounter() as counter:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(batch(0)).square().mean()
        assert counter.calls == {"all_gather_into_tensor": len(parameters)}
        loss.backward()
    # The first layer's input needs no gradient, and biases are not needed.
    again = sum(not name.endswith("bias") for name in parameters) - 1
    assert counter.calls == {"all_gather_into_tensor": len(parameters) + again, "reduce_scatter_tensor": len(parameters)}
    rows = len(batch(0))
    assert sum(saved) <= sum(parameters.values()) / WORLD * 1.2 + rows * 3 * (2 * WIDTH + 8), saved
