"""Tests of the layouts that XLA chooses on a GPU: values in these layouts are read without copies, and results are correct."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from dynaxla.observe import metrics
from support.comparisons.compare import assert_equal

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU and a CUDA build of torch"),
]

TOLERANCE = {torch.float32: (1e-3, 1e-3), torch.bfloat16: (5e-2, 5e-2)}


def net(dtype: torch.dtype) -> nn.Module:
    """Returns a network of convolutions with and without a batch norm, with groups, and with a 1x1 kernel."""
    layers = [
        *(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1, groups=4), nn.ReLU()),
        *(nn.Conv2d(32, 64, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()),
        *(nn.Conv2d(64, 8, 3, stride=2), nn.Flatten(1), nn.Linear(8 * 49, 10)),
    ]
    return nn.Sequential(*layers).to("cuda", dtype)


def images(dtype: torch.dtype, channels_last: bool) -> torch.Tensor:
    x = torch.randn(8, 3, 32, 32, device="cuda", dtype=dtype)
    return x.to(memory_format=torch.channels_last) if channels_last else x


@pytest.fixture(autouse=True)
def full_precision() -> None:
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("channels_last", [False, True])
def test_frozen_weights_are_laid_out_once(dtype: torch.dtype, channels_last: bool) -> None:
    model = net(dtype).eval().requires_grad_(False)
    compiled = torch.compile(model, backend="dynaxla", fullgraph=True, options={"freeze": True})
    x = images(dtype, channels_last)
    compiled(x)
    for turn in range(3):
        if turn == 2:
            model[0].weight.mul_(2)
        metrics.reset()
        assert_equal(compiled(x), model(x), tolerance=TOLERANCE[dtype])
        assert metrics.snapshot().get("input_copies", 0) == 0
    batch = images(dtype, channels_last)[:3]
    assert_equal(compiled(batch), model(batch), tolerance=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("channels_last", [False, True])
def test_gradients_have_eager_modes_strides_and_saved_values_are_not_copied(dtype: torch.dtype, channels_last: bool) -> None:
    model = net(dtype)
    reference = copy.deepcopy(model)
    compiled = torch.compile(model, backend="dynaxla", fullgraph=True)
    x = images(dtype, channels_last)
    for _ in range(3):
        metrics.reset()
        for function, owner in ((compiled, model), (reference, reference)):
            owner.zero_grad()
            function(x).square().mean().backward()
        assert metrics.snapshot().get("input_copies", 0) == 0, "a value saved by the forward program was copied"
        for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            assert mine.grad is not None
            assert mine.grad.stride() == theirs.grad.stride()
            assert_equal(mine.grad, theirs.grad, tolerance=TOLERANCE[dtype])
