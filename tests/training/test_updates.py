"""Tests of training/updates.py: updates that torch does in place at the end of a step, and their results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import dynaxla
from dynaxla.training.updates import InplaceUpdate
from support import internals
from support.models.training_steps import OPTIMIZERS, Make, Net, Step, assert_same, batches, graphs, plain, two

FUSED = {"SGD": "_fused_sgd_", "Adam": "_fused_adam_", "AdamW": "_fused_adamw_"}


@pytest.fixture
def inplace_ops(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns the names of the in-place ops that torch runs after programs, in order."""
    return internals.inplace_updates(monkeypatch)


@pytest.mark.sample(usual=1)
@pytest.mark.parametrize("name", ["SGD", "SGD momentum", "SGD foreach", "Adam", "Adam amsgrad", "AdamW", "AdamW foreach", "AdamW fused"])
def test_fused(name: str, inplace_ops: list[str]) -> None:
    """The first two steps run in eager mode; the others are one program."""
    eager_model, eager_optimizer, compiled_model, compiled_optimizer = two(OPTIMIZERS[name])
    eager, compiled = plain(eager_model, eager_optimizer), dynaxla.compile_step(plain(compiled_model, compiled_optimizer))
    for number, (x, y) in enumerate(batches(5)):
        before = graphs()
        eager(x, y), compiled(x, y)
        assert inplace_ops.count(FUSED[name.partition(" ")[0]]) == max(0, number - 1)
        assert [after - earlier for after, earlier in zip(graphs(), before, strict=True)] == [number == 2] * 2
        assert_same(eager_model, compiled_model, compiled_optimizer, eager_optimizer)


def _lerp_each(averages: list[torch.Tensor], parameters: list[torch.Tensor]) -> None:
    for average, parameter in zip(averages, parameters, strict=True):
        average.lerp_(parameter, 0.1)


def _lerp_foreach(averages: list[torch.Tensor], parameters: list[torch.Tensor]) -> None:
    torch._foreach_lerp_(averages, parameters, 0.1)


@pytest.mark.parametrize("move", [_lerp_each, _lerp_foreach])
def test_averages_of_parameters(move: Callable[[list[torch.Tensor], list[torch.Tensor]], None], inplace_ops: list[str]) -> None:
    """The averages read updated parameters. torch still updates the parameters, and then the averages."""

    def averaging(model: nn.Module, optimizer: torch.optim.Optimizer, averages: list[torch.Tensor]) -> Step:
        inner = plain(model, optimizer)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = inner(x, y)
            with torch.no_grad():
                move(averages, list(model.parameters()))
            return loss

        return step

    eager_model, eager_optimizer, compiled_model, compiled_optimizer = two(OPTIMIZERS["AdamW"])
    expected, found = ([parameter.detach() * 2 for parameter in model.parameters()] for model in (eager_model, compiled_model))
    eager, compiled = (
        averaging(eager_model, eager_optimizer, expected),
        dynaxla.compile_step(averaging(compiled_model, compiled_optimizer, found)),
    )
    for x, y in batches(4):
        eager(x, y), compiled(x, y)
    assert_same(eager_model, compiled_model, compiled_optimizer, eager_optimizer)
    torch.testing.assert_close(found, expected)
    assert inplace_ops.count("_fused_adamw_") == 2
    assert inplace_ops[-1].endswith("lerp_")


Read = Callable[[nn.Module, torch.optim.Optimizer], Any]


def _zeroed_through_out(model: nn.Module, _: torch.optim.Optimizer) -> torch.Tensor:
    gradient = model.second.weight.grad
    torch.mul(gradient, 0.0, out=gradient)
    return gradient.sum()


READS: dict[str, Read] = {
    "parameters": lambda model, _: [parameter.square().sum() for parameter in model.parameters()],
    "a view of a parameter": lambda model, _: model.first.weight[1:].sum(),
    "gradients": lambda model, _: [parameter.grad.sum() for parameter in model.parameters() if parameter.grad is not None],
    "state": lambda model, optimizer: next(iter(optimizer.state.values()))["exp_avg"].sum(),
    "writing": lambda model, _: model.second.weight.mul_(0.9).sum(),
    "writing to gradients": lambda model, _: model.second.weight.grad.mul_(0.9).sum(),
    "writing to gradients by a keyword": _zeroed_through_out,
    "another step": lambda _, optimizer: optimizer.step(),
}


@pytest.mark.sample(usual=1)
@pytest.mark.parametrize("read", READS.values(), ids=list(READS))
def test_reads_after_the_update(read: Read, inplace_ops: list[str]) -> None:
    eager_model, eager_optimizer, compiled_model, compiled_optimizer = two(OPTIMIZERS["AdamW"])

    def make_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
        def step(x: torch.Tensor, y: torch.Tensor) -> Any:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            with torch.no_grad():
                return read(model, optimizer)

        return step

    eager, compiled = make_step(eager_model, eager_optimizer), dynaxla.compile_step(make_step(compiled_model, compiled_optimizer))
    for x, y in batches(3):
        torch.testing.assert_close(compiled(x, y), eager(x, y), rtol=1e-4, atol=1e-5)
        assert_same(eager_model, compiled_model, compiled_optimizer, eager_optimizer)
    assert ("_fused_adamw_" in inplace_ops) == (read in (READS["gradients"], READS["another step"]))


class Convolution(nn.Module):
    """A model with a channels-last weight."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(2, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.last = nn.Linear(4 * 6, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.convolution(x.reshape(-1, 1, 2, 3).expand(-1, 2, -1, -1)).relu().flatten(1))


# Eager mode warns of the strides that this test is about.
@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract")
@pytest.mark.parametrize("name", ["SGD momentum", "AdamW"])
def test_gradient_with_other_strides_prevents_fused_update(name: str, inplace_ops: list[str]) -> None:
    """torch's fused kernels for the CPU assume that a parameter and its gradient have equal strides, so they are not used here."""
    eager_model, eager_optimizer, compiled_model, compiled_optimizer = two(OPTIMIZERS[name], Convolution)
    for model in (eager_model, compiled_model):
        weight = model.convolution.weight
        weight.grad = torch.zeros(weight.shape)
        assert weight.grad.stride() != weight.stride()

    def make_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
        def step(x: torch.Tensor, y: torch.Tensor) -> None:
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

        return step

    eager, compiled = make_step(eager_model, eager_optimizer), dynaxla.compile_step(make_step(compiled_model, compiled_optimizer))
    for x, y in batches(3):
        eager(x, y), compiled(x, y)
        assert_same(eager_model, compiled_model, compiled_optimizer, eager_optimizer)
    assert not any(name.startswith("_fused") for name in inplace_ops)


def parameters_in_one_buffer(make: Make) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    memory = torch.linspace(-1, 1, 14)
    parameters = nn.ParameterList([nn.Parameter(memory[:6].view(2, 3)), nn.Parameter(memory[6:].view(2, 4).t())])
    return list(parameters), make(parameters)


@pytest.mark.parametrize("name", ["SGD momentum", "AdamW"])
def test_parameters_in_one_buffer(name: str) -> None:
    (expected, eager), (actual, compiled) = parameters_in_one_buffer(OPTIMIZERS[name]), parameters_in_one_buffer(OPTIMIZERS[name])

    def make_step(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> Step:
        def step(x: torch.Tensor) -> None:
            optimizer.zero_grad()
            (x @ parameters[0] @ (parameters[1] @ torch.ones(2, 3)).t()[:, :3].t()).square().sum().backward()
            optimizer.step()

        return step

    steps = make_step(expected, eager), dynaxla.compile_step(make_step(actual, compiled))
    for seed in range(3):
        x = torch.randn(5, 2, generator=torch.Generator().manual_seed(seed))
        for step in steps:
            step(x)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_learning_rate_in_a_tensor(kind: type[torch.optim.Optimizer]) -> None:
    eager_model, eager_optimizer, compiled_model, compiled_optimizer = two(
        lambda model: kind(model.parameters(), lr=torch.tensor(0.01), fused=True)
    )
    eager, compiled = plain(eager_model, eager_optimizer), dynaxla.compile_step(plain(compiled_model, compiled_optimizer))
    for number, (x, y) in enumerate(batches(3)):
        for optimizer in (eager_optimizer, compiled_optimizer):
            optimizer.param_groups[0]["lr"].fill_(0.01 * (number + 1))
        eager(x, y), compiled(x, y)
        assert_same(eager_model, compiled_model, compiled_optimizer, eager_optimizer)


def test_parameter_that_gets_momentum_later() -> None:
    eager_model, eager_optimizer, compiled_model, compiled_optimizer = two(OPTIMIZERS["SGD momentum"])
    eager, compiled = plain(eager_model, eager_optimizer), dynaxla.compile_step(plain(compiled_model, compiled_optimizer))
    for number, (x, y) in enumerate(batches(5)):
        if number == 2:
            for model in (eager_model, compiled_model):
                assert isinstance(model, Net)
                model.frozen.requires_grad_(True)
        eager(x, y), compiled(x, y)
        assert_same(eager_model, compiled_model, compiled_optimizer, eager_optimizer)


@pytest.mark.parametrize("name", ["SGD momentum", "AdamW fused"])
def test_half_types(name: str) -> None:
    """The reference is not fused: torch's fused SGD is wrong for half types on the CPU, and is not used for them."""
    eager_model, _, compiled_model, compiled_optimizer = two(OPTIMIZERS[name], lambda: nn.Linear(6, 32).bfloat16())
    eager_optimizer = OPTIMIZERS[name.removesuffix(" fused")](eager_model)
    eager, compiled = plain(eager_model, eager_optimizer), dynaxla.compile_step(plain(compiled_model, compiled_optimizer))
    for x, _ in batches(3):
        for step in (eager, compiled):
            step(x.bfloat16(), torch.ones(5, 32, dtype=torch.bfloat16))
    torch.testing.assert_close(dict(compiled_model.state_dict()), dict(eager_model.state_dict()), rtol=1e-2, atol=1e-2)


def test_gradients_of_other_strides() -> None:
    """autograd.grad may return other strides than fake tensors have, and kernels on the CPU do not check strides."""
    parameters = [nn.Parameter(torch.arange(12.0).view(3, 4)) for _ in range(2)]

    def make_step(parameter: nn.Parameter) -> Step:
        optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)

        def step(x: torch.Tensor, index: torch.Tensor) -> None:
            y = parameter.index_fill(0, index, 0.0)
            (parameter.grad,) = torch.autograd.grad((torch.cat([y.t(), torch.zeros(4, 3)], 1) * x).sum(), parameter)
            optimizer.step()
            optimizer.zero_grad()

        return step

    eager, compiled = make_step(parameters[0]), dynaxla.compile_step(make_step(parameters[1]))
    for number in range(3):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(number))
        for step in (eager, compiled):
            step(x, torch.tensor([1]))
        torch.testing.assert_close(parameters[1], parameters[0])


def test_restrided_arguments() -> None:
    """The op runs on a copy with the strides that it assumes. The result is written to the tensor itself."""
    graph = torch.fx.Graph()
    node = graph.placeholder("x")
    update = InplaceUpdate(node, torch.ops.aten.zero_, (node,), {}, {node: (1, 3)}, [node])
    x = torch.ones(3, 4)
    result = update.run(lambda _: x)
    assert result.stride() == (1, 3)
    assert not x.any()


@pytest.mark.parametrize("fails", [False, True])
def test_counts_after_a_failed_program(fails: bool) -> None:
    """One kernel adds to all counts, without waiting for a tensor's value."""
    graph = torch.fx.Graph()
    counts = [graph.placeholder(f"count_{index}") for index in range(3)]
    node = graph.call_function(torch.ops.aten._foreach_add_.Scalar, (counts, 2))
    values = {count: torch.tensor(float(index)) for index, count in enumerate(counts)}
    update = InplaceUpdate(node, torch.ops.aten._foreach_add_, (counts, 2), {}, {}, counts)
    ops: list[str] = []

    class OpRecorder(TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            ops.append(str(op))
            return op(*args, **(kwargs or {}))

    with OpRecorder():
        update.run(values.__getitem__, torch.tensor(float(fails)))
    assert [value.item() for value in values.values()] == ([0, 1, 2] if fails else [2, 3, 4])
    assert ops.count("aten._foreach_add_.Tensor") == 1
    assert not {"aten.clone.default", "aten.copy_.default", "aten._local_scalar_dense.default"} & set(ops)


def test_batch_norm_counts_in_one_call(inplace_ops: list[str]) -> None:
    def make_model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.BatchNorm1d(8))

    model, optimizer, eager_model, eager_optimizer = two(OPTIMIZERS["SGD"], make_model)
    eager, step = plain(eager_model, eager_optimizer), dynaxla.compile_step(plain(model, optimizer))
    for x, y in batches(3):
        inplace_ops.clear()
        step(x, y)
        eager(x, y)
    assert inplace_ops.count("_foreach_add_") == 1
    assert "add_" not in inplace_ops
    assert [module.num_batches_tracked.item() for module in model if isinstance(module, nn.BatchNorm1d)] == [3, 3, 3]
    assert_same(model, eager_model, optimizer, eager_optimizer)


def test_tensor_as_setting_is_refused() -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1, weight_decay=torch.tensor(0.1))

    @dynaxla.compile_step(fullgraph=True)
    def step() -> None:
        parameter.sum().backward()
        optimizer.step()

    with pytest.raises(dynaxla.errors.CaptureError, match="setting is a tensor"):
        step()


def test_optimizer_gets_no_new_attributes() -> None:
    _, _, model, optimizer = two(OPTIMIZERS["SGD"])
    before = set(vars(optimizer))
    step = dynaxla.compile_step(plain(model, optimizer))
    for x, y in batches(2):
        step(x, y)
    assert set(vars(optimizer)) == before


@pytest.mark.parametrize("name", ["SGD momentum", "Adam"])
def test_no_update_after_a_failed_program(name: str, inplace_ops: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, only the device knows of the failure."""
    model, optimizer, eager_model, eager_optimizer = two(OPTIMIZERS[name], lambda: nn.Linear(6, 8))
    eager, step = plain(eager_model, eager_optimizer), dynaxla.compile_step(plain(model, optimizer))
    for number, (x, y) in enumerate(batches(5)):
        fails = number == 3
        internals.failed_checks(monkeypatch, fails)
        inplace_ops.clear()
        step(x, y)
        assert (FUSED[name.partition(" ")[0]] in inplace_ops) == (number >= 2)
        if not fails:
            eager(x, y)
        assert_same(model, eager_model, optimizer, eager_optimizer)
