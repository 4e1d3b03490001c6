"""Tests of passes/joint/checkpointing.py: random ops that are recomputed draw the numbers of the forward pass."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from dynaxla.observe import metrics
from support.comparisons.compare import assert_equal
from support.comparisons.single_op import Call, run_ops

Region = Callable[[torch.Tensor], torch.Tensor]


@torch.library.custom_op("dynaxla_test::noise", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def noise(x: torch.Tensor) -> torch.Tensor:
    return torch.rand_like(x)


noise.register_fake(torch.empty_like)
noise.register_autograd(lambda ctx, grad: None)

# Each region returns scale * x ** 2 with random numbers `scale`, so its gradient is 2 * result / x.
DRAWS: dict[str, Region] = {
    "dropout": lambda x: F.dropout(x, 0.5).square(),
    "two dropouts": lambda x: F.dropout(x, 0.5) * F.dropout(x, 0.3),
    "rand": lambda x: torch.rand(x.shape) * x * x,
    "bernoulli": lambda x: torch.bernoulli(torch.full_like(x, 0.3)) * x.square(),
    "normal": lambda x: torch.randn_like(x).exp() * x.square(),
    "in place": lambda x: torch.empty_like(x).uniform_(1, 2) * x.square(),
    "attention": lambda x: (
        F.scaled_dot_product_attention(
            torch.zeros(1, 1, len(x), 8), torch.zeros(1, 1, len(x), 8), torch.eye(len(x)).expand(1, 1, -1, -1), dropout_p=0.4
        )[0, 0].sum(1, keepdim=True)
        * x.square()
    ),
    "no lowering": lambda x: noise(x.detach()) * x.square(),
}


def draw(region: Region, compiled: Callable[[Any], Any], rows: int, reentrant: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the region's result and gradient * x, which is 2 * result if the backward pass used the same random numbers."""
    x = torch.randn(rows, 8).abs().add(0.5).requires_grad_()
    result = compiled(lambda x: checkpoint(region, x, use_reentrant=reentrant))(x)
    result.sum().backward()
    return result.detach(), x.grad * x.detach()


@pytest.mark.sample(usual=3)
@pytest.mark.parametrize(("name", "reentrant"), [*((name, False) for name in DRAWS), ("two dropouts", True), ("attention", True)])
@pytest.mark.parametrize("options", [{}, {"exact_rng": True}], ids=["", "exact_rng"])
def test_recomputed_ops_draw_the_same_numbers(name: str, options: dict[str, Any], reentrant: bool) -> None:
    region = DRAWS[name]
    compiled = functools.partial(torch.compile, backend="dynaxla", fullgraph=True, options=options)
    result, twice = draw(region, compiled, 64, reentrant)
    torch.testing.assert_close(twice, 2 * result, rtol=1e-4, atol=1e-4)
    if options:
        torch.manual_seed(3)
        mine = draw(region, compiled, 64, reentrant)
        torch.manual_seed(3)
        assert_equal(mine, draw(region, lambda function: function, 64, reentrant), tolerance=(1e-4, 1e-4))


def test_dynamic_sizes_draw_new_numbers_in_each_call() -> None:
    function = torch.compile(
        lambda x: checkpoint(DRAWS["two dropouts"], x, use_reentrant=False), backend="dynaxla", fullgraph=True, dynamic=True
    )
    masks = []
    for rows in (16, 24, 16, 16):
        x = torch.full((rows, 8), 2.0, requires_grad=True)
        result = function(x)
        result.sum().backward()
        torch.testing.assert_close(x.grad * 2, 2 * result)
        masks.append(result.detach())
    assert not torch.equal(masks[0], masks[2])
    assert not torch.equal(masks[2], masks[3])
    assert 0.2 < (masks[0] > 0).float().mean() < 0.5, "the two draws of a call are independent: 0.5 * 0.7"


def test_same_seed_gives_same_mask() -> None:
    function = torch.compile(lambda x: checkpoint(DRAWS["dropout"], x, use_reentrant=False), backend="dynaxla")
    runs = []
    for _ in range(2):
        torch.manual_seed(5)
        runs.append(function(torch.ones(9, 9, requires_grad=True)).detach())
    assert torch.equal(*runs)


def test_attention_without_dropout_does_not_advance_generator() -> None:
    def region(x: torch.Tensor) -> torch.Tensor:
        y = x.view(1, 2, -1, 8)
        return F.scaled_dot_product_attention(y, y, y, is_causal=True).reshape(x.shape)

    runs = []
    for call in (region, torch.compile(region, backend="dynaxla", fullgraph=True, options={"fallback": "error"})):
        torch.manual_seed(0)
        x = torch.randn(8, 8, requires_grad=True)
        state = torch.get_rng_state()
        result = checkpoint(call, x, use_reentrant=False) if call is region else call(x)
        result.sum().backward()
        assert torch.equal(torch.get_rng_state(), state)
        runs.append([result.detach(), x.grad])
    assert_equal(runs[1], runs[0])
    function = torch.compile(lambda x: checkpoint(region, x, use_reentrant=False), backend="dynaxla", fullgraph=True)
    x = x.detach().requires_grad_()
    state = torch.get_rng_state()
    result = function(x)
    result.sum().backward()
    assert torch.equal(torch.get_rng_state(), state)
    assert_equal([result.detach(), x.grad], runs[0])


def test_lowered_random_ops_do_not_split_the_graph() -> None:
    metrics.reset()
    function = torch.compile(lambda x: checkpoint(DRAWS["two dropouts"], x, use_reentrant=False), backend="dynaxla")
    function(torch.ones(4, 8, requires_grad=True)).sum().backward()
    assert metrics.snapshot()["graphs"] == 2


def test_nested_regions() -> None:
    def inner(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.3)

    def outer(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(inner, F.dropout(x, 0.3), use_reentrant=False) * x

    result, twice = draw(outer, functools.partial(torch.compile, backend="dynaxla", fullgraph=True), 32, False)
    torch.testing.assert_close(twice, 2 * result)


@pytest.mark.parametrize("policy", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE, CheckpointPolicy.PREFER_RECOMPUTE])
def test_selective_checkpointing(policy: CheckpointPolicy) -> None:
    """Products have one policy. All other ops, dropout among them, have the other one."""
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    other = CheckpointPolicy.PREFER_RECOMPUTE if policy is not CheckpointPolicy.PREFER_RECOMPUTE else CheckpointPolicy.MUST_SAVE

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(lambda _, op, *__, **___: policy if op in products else other)

    def region(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.5) * (x @ torch.eye(8))

    x = torch.full((16, 8), 2.0, requires_grad=True)
    function = torch.compile(lambda x: checkpoint(region, x, use_reentrant=False, context_fn=contexts), backend="dynaxla", fullgraph=True)
    result = function(x)
    result.sum().backward()
    torch.testing.assert_close(x.grad.sum(1) * 2, 2 * result.detach().sum(1))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, dropout=0.2, batch_first=True)
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + F.dropout(self.attention(x, x, x, need_weights=False)[0], 0.1, self.training)
        return x + F.dropout(self.second(F.gelu(self.first(x))), 0.1, self.training)


@pytest.mark.sample(usual=1)
@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
def test_checkpointed_transformer_equals_plain_transformer(reentrant: bool) -> None:
    """With exact_rng, the compiled function draws eager mode's numbers."""
    blocks = nn.ModuleList(Block() for _ in range(2))

    def plain(x: torch.Tensor) -> torch.Tensor:
        for block in blocks:
            x = block(x)
        return x.square().mean()

    def checkpointed(x: torch.Tensor) -> torch.Tensor:
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=reentrant)
        return x.square().mean()

    runs = []
    for function in (plain, checkpointed, torch.compile(checkpointed, backend="dynaxla", options={"exact_rng": True})):
        torch.manual_seed(0)
        blocks.zero_grad()
        x = torch.randn(3, 5, 16, requires_grad=True)
        loss = function(x)
        loss.backward()
        runs.append([loss.detach(), x.grad, *(parameter.grad.clone() for parameter in blocks.parameters())])
    assert_equal(runs[1], runs[0])
    assert_equal(runs[2], runs[0], tolerance=(1e-4, 1e-5))


@pytest.mark.usefixtures("quick_xla")
def test_backward_pass_does_not_update_running_statistics() -> None:
    """The backward pass recomputes the region with the old statistics, and does not update them again, as in other backends."""
    runs = []
    for compile_model in (lambda model: model, functools.partial(torch.compile, backend="dynaxla", fullgraph=True)):
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh()).double()
        function = layers if not runs else lambda x, layers=layers: checkpoint(layers, x, use_reentrant=False)
        run = compile_model(function)
        for _ in range(2):
            run(torch.linspace(-1, 2, 24, dtype=torch.float64).view(6, 4).square()).square().sum().backward()
        runs.append([*(parameter.grad for parameter in layers.parameters()), *layers.buffers()])
    for plain, mine in zip(*runs, strict=True):
        torch.testing.assert_close(mine, plain)


def test_each_draw_has_its_own_key() -> None:
    random_key, device = torch.ops.dynaxla.random_key.default, {"device": torch.device("cpu")}
    draws = [Call(random_key, (number,), device, expected=torch.zeros(2, dtype=torch.int32)) for number in range(2)]
    first, second = run_ops(draws)
    assert first.shape == (2,)
    assert not torch.equal(first, second)
