"""Recurrent networks in compiled training steps, compared with eager mode."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import dynaxla
from dynaxla.errors import CaptureError
from support.comparisons.compare import assert_equal

NETS: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: nn.LSTM(4, 6),
    "two layers, batch first": lambda: nn.LSTM(4, 6, 2, batch_first=True),
    "bidirectional": lambda: nn.LSTM(4, 6, 2, bidirectional=True),
    "no bias": lambda: nn.LSTM(4, 6, bias=False),
    "projection": lambda: nn.LSTM(4, 6, proj_size=3),
    "float64": lambda: nn.LSTM(4, 6).double(),
    "evaluation": lambda: nn.LSTM(4, 6).eval(),
    "gru": lambda: nn.GRU(4, 6, bidirectional=True),
    "rnn": lambda: nn.RNN(4, 6, nonlinearity="relu"),
}


def losses(step: Callable[..., torch.Tensor], *args: Any) -> list[torch.Tensor]:
    return [step(*args).detach().clone() for _ in range(4)]


def compare_steps(net: nn.Module, forward: Callable[..., torch.Tensor], *args: Any) -> None:
    """Compares the losses and the parameters of four compiled steps with eager mode's."""
    results = []
    for compiled in (False, True):
        model = copy.deepcopy(net)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

        def step(*args: Any, model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = forward(model, *args)
            loss.backward()
            optimizer.step()
            return loss

        step_losses = losses(dynaxla.compile_step(step) if compiled else step, *args)
        results.append((step_losses, [parameter.detach() for parameter in model.parameters()]))
    assert_equal(results[1], results[0], tolerance=(1e-4, 1e-5))


@pytest.mark.sample(usual=2)
@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("name", NETS)
def test_layers(name: str) -> None:
    torch.manual_seed(0)
    net = NETS[name]()

    def forward(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        out, state = net(x)
        return out.square().mean() + sum(item.sin().mean() for item in ((state,) if isinstance(state, torch.Tensor) else state))

    compare_steps(net, forward, torch.randn(3, 5, 4, dtype=next(net.parameters()).dtype))


def test_initial_states() -> None:
    torch.manual_seed(0)

    def forward(net: nn.Module, x: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        out, (_, last) = net(x, (h.tanh(), c))
        return out.sum() + last.square().sum()

    compare_steps(nn.LSTM(4, 6, batch_first=True), forward, torch.randn(2, 7, 4), torch.randn(1, 2, 6), torch.randn(1, 2, 6))


def test_gradients_of_inputs_and_states() -> None:
    torch.manual_seed(0)
    net = nn.LSTM(4, 6, bidirectional=True)

    def function(x: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, ...]:
        leaves = [item.detach().requires_grad_() for item in (x, h, c)]
        out, (_, cell) = net(leaves[0], (leaves[1], leaves[2]))
        return torch.autograd.grad(out.sin().sum() + cell.cos().sum(), [*leaves, *net.parameters()])

    args = torch.randn(5, 3, 4), torch.randn(2, 3, 6), torch.randn(2, 3, 6)
    step = dynaxla.compile_step(function)
    for _ in range(4):
        assert_equal(step(*args), function(*args), tolerance=(1e-4, 1e-5))


def test_packed_sequences() -> None:
    """Python must know the number of rows at each time step, so a recorded step cannot pack sequences."""
    net = nn.LSTM(4, 6, batch_first=True)
    lengths = torch.tensor([5, 3, 2])
    step = dynaxla.compile_step(lambda x: net(pack_padded_sequence(x, lengths, batch_first=True))[0].data.sum(), fullgraph=True)
    with pytest.raises(CaptureError, match="_pack_padded_sequence"):
        step(torch.randn(3, 5, 4))


def test_dropout_between_layers() -> None:
    """The dropped elements differ from eager mode's, but depend only on the seed."""
    torch.manual_seed(0)
    net = nn.LSTM(4, 6, 2, dropout=0.5)
    x = torch.randn(3, 5, 4)
    step = dynaxla.compile_step(lambda x: net(x)[0].sum())
    for _ in range(3):
        step(x)
    torch.manual_seed(1)
    first, other = step(x).item(), step(x).item()
    assert first != other
    torch.manual_seed(1)
    assert step(x).item() == first
