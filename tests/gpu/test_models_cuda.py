"""Tests of small models of different kinds on a GPU: inference and gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from support.comparisons.gpu_comparison import MARKS, assert_close, assert_close_together
from support.comparisons.gpu_comparison import full_precision as full_precision

pytestmark = [
    *MARKS,
    pytest.mark.usefixtures("full_precision"),
    # torch's own RNN layers warn in eager mode: after a deepcopy, and in bfloat16, for which torch does not flatten their weights.
    pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk of memory"),
]

DEVICE = "cuda"


class Residual(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.body(x))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle = nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.up, self.last = nn.ConvTranspose2d(8, 8, 2, stride=2), nn.Conv2d(11, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.gelu(self.down(x))
        y = F.interpolate(F.max_pool2d(F.gelu(self.middle(y)), 2), scale_factor=2.0, mode="bilinear") + y
        return self.last(torch.cat([x, self.up(y)], 1))


class Attention(nn.Module):
    """A block of a GPT model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.qkv, self.out = nn.Embedding(50, 32), nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 50)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        return self.out(x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layers, self.out = kind(16, 24, num_layers=2, batch_first=True, bidirectional=True), nn.Linear(48, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.layers(x)[0][:, -1])


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.out = nn.EmbeddingBag(50, 16, mode="mean"), nn.Linear(16, 5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.log_softmax(self.out(self.bag(tokens)), -1)


def convolutions(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 5))


def numbers(*shape: int) -> Callable[[], torch.Tensor]:
    return lambda: torch.randn(*shape)


def tokens() -> torch.Tensor:
    return torch.randint(0, 50, (2, 16))


PICTURES = numbers(2, 3, 16, 16)
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "perceptron": (lambda: nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 5), nn.Softmax(-1)), numbers(4, 16)),
    "residual": (
        lambda: convolutions(nn.BatchNorm2d(8), Residual(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)))),
        PICTURES,
    ),
    "depthwise": (
        lambda: convolutions(nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.BatchNorm2d(8), nn.Hardswish(), nn.Conv2d(8, 8, 1)),
        PICTURES,
    ),
    "groups": (lambda: convolutions(nn.GroupNorm(4, 8), nn.SiLU(), nn.Conv2d(8, 8, 3, dilation=2, groups=2)), PICTURES),
    "unet": (UNet, PICTURES),
    "volumes": (
        lambda: nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.InstanceNorm3d(4), nn.ELU(), nn.Conv3d(4, 4, 2, stride=2)),
        numbers(1, 1, 8, 8, 8),
    ),
    "gpt": (Attention, tokens),
    "transformer": (lambda: nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True), numbers(2, 12, 32)),
    "lstm": (lambda: Recurrent(nn.LSTM), numbers(2, 7, 16)),
    "gru": (lambda: Recurrent(nn.GRU), numbers(2, 7, 16)),
    "bags": (Bags, tokens),
}


# Models with graph breaks: TorchDynamo leaves their recurrent layers to eager mode.
WITH_GRAPH_BREAKS = ("lstm", "gru")


def model_and_input(name: str, dtype: torch.dtype) -> tuple[nn.Module, torch.Tensor]:
    model, inputs = MODELS[name]
    torch.manual_seed(0)
    x = inputs()
    return model().to(DEVICE, dtype), x.to(DEVICE, dtype if x.is_floating_point() else x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_inference(name: str, dtype: torch.dtype) -> None:
    model, x = model_and_input(name, dtype)
    model.eval()
    compiled = torch.compile(model, backend="dynaxla", fullgraph=name not in WITH_GRAPH_BREAKS)
    with torch.no_grad():
        for _ in range(2):
            assert_close(compiled(x), model(x))


@pytest.mark.parametrize("name", MODELS)
def test_gradients(name: str) -> None:
    """In training mode, so that the buffers of batch norms are compared, too."""
    model, x = model_and_input(name, torch.float32)
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, backend="dynaxla")
    for _ in range(2):
        results = [net(x) for net in (compiled, eager)]
        assert_close(*results)
        for result in results:
            result.square().mean().backward()
    gradients = ([parameter.grad for parameter in net.parameters()] for net in (model, eager))
    assert_close_together(*gradients, 1e-3)
    assert_close(list(model.buffers()), list(eager.buffers()))


@pytest.mark.parametrize("name", ["residual", "depthwise", "unet"])
def test_channels_last(name: str) -> None:
    model, x = model_and_input(name, torch.float32)
    model, x = model.eval().to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    compiled = torch.compile(model, backend="dynaxla", fullgraph=True)
    with torch.no_grad():
        assert_close(compiled(x), model(x))


@pytest.mark.parametrize("name", ["perceptron", "unet", "gpt"])
def test_dynamic_sizes(name: str) -> None:
    model, x = model_and_input(name, torch.float32)
    compiled = torch.compile(model.eval(), backend="dynaxla", dynamic=True)
    with torch.no_grad():
        for count in (2, 5, 3):
            batch = x[:1].repeat(count, *[1] * (x.dim() - 1))
            assert_close(compiled(batch), model(batch))


@pytest.mark.parametrize("name", ["perceptron", "residual", "gpt"])
def test_autocast(name: str) -> None:
    model, x = model_and_input(name, torch.float32)
    compiled = torch.compile(model.eval(), backend="dynaxla", fullgraph=True)
    with torch.no_grad(), torch.autocast(DEVICE, torch.bfloat16):
        assert_close(compiled(x), model(x), 4e-2)


@pytest.mark.parametrize("name", ["perceptron", "residual"])
def test_change_of_frozen_parameters(name: str) -> None:
    model, x = model_and_input(name, torch.float32)
    compiled = torch.compile(model.eval(), backend="dynaxla", fullgraph=True, options={"freeze": True})
    with torch.no_grad():
        for _ in range(3):
            assert_close(compiled(x), model(x))
            next(model.parameters()).mul_(1.5)
