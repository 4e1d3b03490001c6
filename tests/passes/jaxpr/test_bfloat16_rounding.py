"""Tests of passes/jaxpr/bfloat16_rounding.py: bfloat16 on the CPU is computed in float32, and equals eager mode's results bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from support import internals

BF16 = torch.bfloat16


@pytest.fixture(params=[False, True], ids=["short", "wide"], autouse=True)
def wide_vectors(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """True if the processor seems to have 512-bit vectors."""
    internals.processor(monkeypatch, wide_vectors=request.param)
    is_wide: bool = request.param
    return is_wide


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(function, backend="dynaxla", fullgraph=True, options={"fallback": "error", **options})


def assert_same(result: torch.Tensor, expected: torch.Tensor) -> None:
    assert result.dtype == expected.dtype
    torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)


def test_rounding() -> None:
    """Rounds float32 values of all kinds but subnormal numbers: ties, the largest numbers, infinities, NaNs."""
    bits = np.random.default_rng(0).integers(0, 2**32, 1 << 20, dtype=np.uint32)
    # Powers of two of both signs, and infinities. Adding the constants below gives ties, their neighbors and NaNs.
    edges = np.array([[exponent << 23, sign << 31] for exponent in range(256) for sign in range(2)], np.uint32).sum(1, dtype=np.uint32)
    ties = (edges[:, None] + np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0x17FFF, 0x18000, 0x7FFFFF], np.uint32)).ravel()
    x = torch.from_numpy(np.concatenate([bits, ties]).view(np.float32))
    # XLA replaces subnormal numbers by zeros, so the test has 1 or -1 in place of each.
    x = torch.where(x.abs() < torch.finfo(torch.float32).tiny, x.sign(), x)
    assert_same(compiled(lambda x: x.bfloat16())(x), x.bfloat16())
    assert_same(compiled(lambda x: x.bfloat16().float() + 1)(x), x.bfloat16().float() + 1)


FUNCTIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "sums": lambda x, y: x + y + x + y,
    "products": lambda x, y: x * y * x - y,
    "quotient": lambda x, y: (x / y) * 3,
    "relu": lambda x, y: F.relu(x + y),
    "clamp": lambda x, y: (x * y).clamp(-0.25, 0.75) + 0.125,
    "maximum": lambda x, y: torch.maximum(x * 1.1, -(y * 0.9)),
    "where": lambda x, y: torch.where(x + y > x * y, x * 1.01, y),
    "comparisons": lambda x, y: (x + y == y + x, x * 1.001 == x, x - y < 0.01),
    "read twice": lambda x, y: ((x + y), (x + y) * 2, (x + y).relu()),
    "to float32 and back": lambda x, y: (x.float() * 1.001).bfloat16().float() - x.float() + y,
    "to integers": lambda x, y: (y * 37.5).to(torch.int32),
    "to float16": lambda x, y: (x * 1.01).to(torch.float16) + y,
    "views": lambda x, y: (x * 1.01).t().reshape(-1)[3:50].unsqueeze(0).expand(3, -1) + 1,
    "a scalar": lambda x, y: x * y.sum().relu() + y[0, 0] * 1.01,
    "sum": lambda x, y: (x * 1.01).sum(0),
    "amax and amin": lambda x, y: (x * 1.01).amax(1) - y.amin(1),
    "squares": lambda x, y: (x * 1.01).square() + y.abs(),
    "in place": lambda x, y: x.clone().mul_(1.01).add_(y).relu_(),
}


@pytest.mark.sample(usual=6)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name: str) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(16, 24, dtype=BF16), torch.randn(16, 24, dtype=BF16)
    x[0, :4] = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0], dtype=BF16)
    results, expected = compiled(FUNCTIONS[name])(x, y), FUNCTIONS[name](x, y)
    for result, wanted in zip(*([item] if isinstance(item, torch.Tensor) else item for item in (results, expected)), strict=True):
        if name in ("sum", "a scalar"):  # the order of additions differs
            torch.testing.assert_close(result, wanted, equal_nan=True, rtol=1e-2, atol=1e-2)
        else:
            assert_same(result, wanted)


def test_gradients() -> None:
    torch.manual_seed(0)
    compiled_inputs = [torch.randn(8, 8, dtype=BF16, requires_grad=True) for _ in range(2)]
    eager_inputs = [tensor.detach().clone().requires_grad_() for tensor in compiled_inputs]
    for run, tensors in ((compiled(FUNCTIONS["clamp"]), compiled_inputs), (FUNCTIONS["clamp"], eager_inputs)):
        run(*tensors).backward(torch.full((8, 8), 1.5, dtype=BF16))
    for tensor, other in zip(compiled_inputs, eager_inputs, strict=True):
        assert tensor.grad is not None
        assert other.grad is not None
        assert_same(tensor.grad, other.grad)


def test_control_flow() -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: (x * 1.25).relu(), lambda x: x - 0.25, (x * 1.125,)) + 1

    for x in (torch.ones(5, dtype=BF16), -torch.ones(5, dtype=BF16)):
        assert_same(compiled(run)(x), run(x))


def test_clamp_needs_no_rounding_of_its_own(wide_vectors: bool, tmp_path: Path) -> None:
    x = torch.randn(64, 64, dtype=BF16)
    compiled(lambda x: (x * 1.5).clamp(0, 6), dump=tmp_path)(x)
    (program,) = tmp_path.glob("*.stablehlo.mlir")
    text = program.read_text()
    # The product is rounded once: by bit arithmetic on wide vectors, otherwise by XLA.
    assert (text.count("bitcast_convert"), text.count("reduce_precision")) == ((2, 0) if wide_vectors else (0, 1))
