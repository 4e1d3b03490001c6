"""Checkpointed regions in a compiled step: random numbers, state that a region reads, side effects."""

from __future__ import annotations

import types
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import dynaxla

# Each region returns scale * w ** 2 with random numbers `scale`, so its gradient is 2 * result / w.
REGIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dropout": lambda w: F.dropout(w, 0.5).square(),
    "two dropouts": lambda w: F.dropout(w, 0.5) * F.dropout(w, 0.3),
    "rand": lambda w: torch.rand(w.shape) * w * w,
    "written after it was drawn": lambda w: torch.rand(w.shape).mul_(2) * w * w,
    "bernoulli of values": lambda w: torch.bernoulli(w.detach().sigmoid()) * w * w,
    "attention": lambda w: (
        F.scaled_dot_product_attention(
            w.detach().view(1, 1, 8, 8), w.detach().view(1, 1, 8, 8), torch.ones(1, 1, 8, 8), dropout_p=0.4
        ).flatten()
        * w
        * w
    ),
}


@pytest.mark.sample(usual=2)
@pytest.mark.parametrize(("name", "reentrant"), [*((name, False) for name in REGIONS), ("dropout", True), ("bernoulli of values", True)])
def test_recomputed_region_draws_the_same_numbers(name: str, reentrant: bool) -> None:
    w = torch.nn.Parameter(torch.rand(64) + 0.5)

    def step() -> torch.Tensor:
        w.grad = None
        outside = torch.rand(64)
        result = checkpoint(REGIONS[name], w, use_reentrant=reentrant)
        (result.sum() + outside.sum() * 0).backward()
        return result.detach()

    state = torch.get_rng_state()
    compiled = dynaxla.compile_step(step)
    results = []
    for _ in range(3):
        results.append(compiled())
        torch.testing.assert_close(w.grad * w.detach(), 2 * results[-1])
    assert not torch.equal(results[0], results[1])
    torch.set_rng_state(state)
    torch.testing.assert_close(dynaxla.compile_step(step)(), results[0])


def test_exact_rng_draws_eager_modes_numbers() -> None:
    w = torch.nn.Parameter(torch.rand(64) + 0.5)

    def step() -> torch.Tensor:
        w.grad = None
        result = checkpoint(REGIONS["two dropouts"], w, use_reentrant=False)
        result.sum().backward()
        return torch.cat([result.detach(), w.grad])

    runs = []
    for call in (step, dynaxla.compile_step(step, options={"exact_rng": True})):
        torch.manual_seed(0)
        runs.append([call() for _ in range(3)])
    torch.testing.assert_close(runs[1], runs[0])


def test_restored_generator_with_other_values_is_refused() -> None:
    """The result of bernoulli depends on its argument, which differs in the second call."""
    x = torch.full((8,), 0.5)

    def step() -> torch.Tensor:
        state = torch.get_rng_state()
        first = torch.bernoulli(x)
        torch.set_rng_state(state)
        return first + torch.bernoulli(x * 0.5)

    with pytest.raises(dynaxla.errors.CaptureError, match=r"restores the state|Generator.get_state"):
        dynaxla.compile_step(step, fullgraph=True)()


def test_restored_generator_with_overwritten_values_is_refused() -> None:
    """The argument of the second draw is the same tensor, but a write has changed its values."""
    x = torch.full((8,), 0.5)

    def step() -> torch.Tensor:
        state = torch.get_rng_state()
        first = torch.bernoulli(x)
        x.mul_(0.5)
        torch.set_rng_state(state)
        return first + torch.bernoulli(x)

    with pytest.raises(dynaxla.errors.CaptureError, match=r"restores the state|Generator.get_state"):
        dynaxla.compile_step(step, fullgraph=True)()


def test_region_whose_operand_is_overwritten() -> None:
    """The region is computed again from other values than before, as in eager mode."""
    w, p = torch.nn.Parameter(torch.ones(64)), torch.full((64,), 0.9)

    def step() -> torch.Tensor:
        w.grad = None
        p.fill_(0.9)
        result = checkpoint(lambda w: torch.bernoulli(p) * w * w, w, use_reentrant=False)
        p.mul_(0.2)
        result.sum().backward()
        return w.grad

    compiled = dynaxla.compile_step(step, options={"exact_rng": True})
    for _ in range(3):
        torch.manual_seed(0)
        expected = step().clone()
        torch.manual_seed(0)
        torch.testing.assert_close(compiled(), expected)


def test_failed_recording_restores_the_generator() -> None:
    def step() -> torch.Tensor:
        raise KeyError("after a draw", torch.rand(3))

    state = torch.get_rng_state()
    with pytest.raises(KeyError):
        dynaxla.compile_step(step, fullgraph=True)()
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("reentrant", [False, True])
def test_state_that_only_a_region_reads(reentrant: bool) -> None:
    w, settings = torch.nn.Parameter(torch.ones(8)), types.SimpleNamespace(scale=1.0)

    def region(w: torch.Tensor) -> torch.Tensor:
        return w * settings.scale

    def step() -> torch.Tensor:
        w.grad = None
        result = checkpoint(region, w, use_reentrant=reentrant)
        result.sum().backward()
        return result.detach()

    compiled = dynaxla.compile_step(step, fullgraph=True)
    for scale in (1.0, 1.0, 1.0, 3.0, 3.0):
        settings.scale = scale
        torch.testing.assert_close(compiled(), torch.full((8,), scale))
        torch.testing.assert_close(w.grad, torch.full((8,), scale))


def test_region_that_prints_is_refused() -> None:
    w = torch.nn.Parameter(torch.ones(8))

    def region(w: torch.Tensor) -> torch.Tensor:
        print("region")
        return w * 2

    def step() -> torch.Tensor:
        w.grad = None
        checkpoint(region, w, use_reentrant=False).sum().backward()
        return w.grad.sum()

    with pytest.raises(dynaxla.errors.CaptureError, match=r"builtins\.print at .*, in region"):
        dynaxla.compile_step(step, fullgraph=True)()
