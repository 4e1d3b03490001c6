"""Tests of passes/aten/random_hoisting.py (option exact_rng): the numbers and the final generator state are eager mode's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dynaxla
from dynaxla.errors import OptionError
from dynaxla.passes.aten.random_hoisting import hoist

OPTIONS = {"exact_rng": True}

FUNCTIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "rand": lambda x, p: torch.rand(3, 4) + torch.rand(3, 4),
    "randn_like": lambda x, p: torch.randn_like(x) * x,
    "randn_like transposed": lambda x, p: torch.randn_like(x.t()),
    "randint": lambda x, p: torch.randint(0, 9, (5,)),
    "randperm": lambda x, p: torch.randperm(7),
    "bernoulli of p": lambda x, p: torch.bernoulli(x, 0.3),
    "in place": lambda x, p: (torch.empty(5).exponential_(2.0), torch.empty(4).normal_(1, 2)),
    "dropout": lambda x, p: F.dropout(x, 0.4),
    "dropout of nothing": lambda x, p: (F.dropout(x, 0.0), F.dropout(x, 1.0), F.dropout(x[:0], 0.5)),
    "dropout, transposed": lambda x, p: F.dropout(x.t(), 0.4),
    "dropout of channels": lambda x, p: F.dropout2d(x[None, :, None], 0.5),
    "alpha dropout": lambda x, p: F.alpha_dropout(x, 0.2),
    "bernoulli of probabilities": lambda x, p: torch.bernoulli(p),
    "multinomial": lambda x, p: torch.multinomial(p, 2),
    "normal": lambda x, p: torch.normal(x, p),
    "rrelu": lambda x, p: F.rrelu(x, training=True),
    "attention": lambda x, p: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.5),
    "in order": lambda x, p: (torch.rand(3), torch.bernoulli(p), torch.rand(3), F.dropout(x), torch.poisson(p), torch.randn(2)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_draws(name: str) -> None:
    function = FUNCTIONS[name]
    x, p = torch.randn(6, 8), torch.rand(6, 8)
    compiled = torch.compile(function, backend="dynaxla", fullgraph=True, options=OPTIONS)
    for seed in (1, 2):
        torch.manual_seed(seed)
        expected = function(x, p), torch.rand(1)
        torch.manual_seed(seed)
        torch.testing.assert_close((compiled(x, p), torch.rand(1)), expected)


@pytest.mark.parametrize("dynamic", [False, True])
def test_training(dynamic: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.3), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 4))
    other = copy.deepcopy(model)
    compiled = torch.compile(other, backend="dynaxla", fullgraph=True, options=OPTIONS, dynamic=dynamic)
    for size in (3, 3, 5):
        x = torch.randn(size, 8)
        torch.manual_seed(size)
        expected = model(x)
        expected.sum().backward()
        torch.manual_seed(size)
        actual = compiled(x)
        actual.sum().backward()
        torch.testing.assert_close(actual, expected)
        for parameter, other_parameter in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(other_parameter.grad, parameter.grad)


def test_step() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.3), nn.Linear(32, 4))
    other = copy.deepcopy(model)

    def make_step(net: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return step

    eager, compiled = make_step(model), dynaxla.compile_step(make_step(other), options=OPTIONS, fullgraph=True)
    batches = [torch.randn(5, 8) for _ in range(3)]
    torch.manual_seed(1)
    expected = [eager(batch).detach() for batch in batches]
    torch.manual_seed(1)
    torch.testing.assert_close([compiled(batch) for batch in batches], expected)


def test_wrong_option() -> None:
    with pytest.raises(OptionError, match="exact_rng is True or False"):
        torch.compile(torch.exp, backend="dynaxla", options={"exact_rng": 1})(torch.ones(1))


def test_copied_graph_keeps_output_descriptions() -> None:
    """`written_inputs` reads the descriptions. Without them, programs on a GPU would not guard writes to inputs."""
    graph = torch.fx.Graph()
    graph.output((graph.placeholder("x"),)).meta["desc"] = ("a description",)
    copied, drawn = hoist(torch.fx.GraphModule({}, graph))
    assert copied.graph is not graph
    assert copied.graph.output_node().meta["desc"] == ("a description",)
    assert not drawn
