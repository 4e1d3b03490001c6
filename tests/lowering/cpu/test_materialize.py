"""Values with several readers are computed once."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from support.comparisons.compare import assert_equal
from support.forced_implementations import backend_with


class Residual(nn.Module):
    def __init__(self, is_convolutional: bool, depth: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(32, 32, 3, padding=1) if is_convolutional else nn.Linear(256, 256) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.relu(x + layer(x))
        return x


def test_gradients_are_unchanged(tmp_path: Path) -> None:
    torch.manual_seed(0)
    mine, theirs = Residual(True), Residual(True)
    theirs.load_state_dict(mine.state_dict())
    x = torch.randn(2, 32, 16, 16)
    torch.compile(mine, backend="dynaxla", fullgraph=True)(x).square().sum().backward()
    theirs(x).square().sum().backward()
    for parameter, other in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert parameter.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-3, atol=1e-3 * float(other.grad.abs().max()))


class Block(nn.Module):
    """1x1 convolutions, each followed by a norm and an activation, as in mobile networks."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(16, 32, 1, bias=False), nn.Conv2d(32, 16, 1, bias=False)
        self.norms = nn.ModuleList([norm(32), norm(16)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.silu(self.norms[0](self.first(x)))
        return F.silu(self.norms[1](self.second(x)))


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, functools.partial(nn.GroupNorm, 8)], ids=["batch", "group"])
def test_gradients_are_not_recomputed(norm: Callable[[int], nn.Module], tmp_path: Path) -> None:
    """Neither for each sum of a norm, nor for each gradient of a convolution."""
    torch.manual_seed(0)
    mine, theirs = Block(norm), Block(norm)
    theirs.load_state_dict(mine.state_dict())
    x = torch.randn(4, 16, 40, 40).to(memory_format=torch.channels_last)
    torch.compile(mine, backend="dynaxla", fullgraph=True, options={"dump": tmp_path})(x).square().sum().backward()
    theirs(x).square().sum().backward()
    for parameter, other in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert_equal(parameter.grad, other.grad, tolerance=(1e-3, 1e-3 * float(other.grad.abs().max())))
    (program,) = tmp_path.glob("*backward*.hlo.txt")
    lines = program.read_text().splitlines()
    assert sum(" exponential(" in line for line in lines) == 2, "one for each activation"
    large = [line for line in lines if " fusion(" in line and any(shape in line for shape in ("f32[4,40,40,", "f32[6400,"))]
    assert len(large) == 4, "the gradients of two activations and two norms"
    assert max(line.partition(" fusion(")[2].partition(")")[0].count("%") for line in large) <= 7, (
        "the gradient of a norm reads that of the activation"
    )


def test_only_the_slice_that_is_read_is_computed(tmp_path: Path) -> None:
    x = torch.randn(64, 1000)
    function = torch.compile(lambda x: (x.abs() * x)[-1:] + 1, backend=backend_with({"graph": "xla"}), options={"dump": tmp_path})
    assert_equal(function(x), (x.abs() * x)[-1:] + 1, tolerance=(1e-5, 1e-6))
    (program,) = tmp_path.glob("*.hlo.txt")
    assert not re.search(r"fusion\S* = f32\[64,1000\]", program.read_text())
