"""Which tensors a compiled function keeps alive after calls: none that AOTAutograd alone, around eager mode, does not keep."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

Compile = Callable[..., Any]
Situation = Callable[[Compile], tuple[list[torch.Tensor], Any]]


def training(compiled: Compile) -> tuple[list[torch.Tensor], Any]:
    layer, x = nn.Linear(4, 4), torch.ones(1, 4)
    call = compiled(layer)
    call(x).sum().backward()
    return [x], (layer, call)


def training_of_a_model_that_is_gone(compiled: Compile) -> tuple[list[torch.Tensor], Any]:
    layer, x = nn.Linear(4, 4), torch.ones(1, 4)
    compiled(layer)(x).sum().backward()
    return [x, layer.weight], None


def inference(compiled: Compile) -> tuple[list[torch.Tensor], Any]:
    layer, x = nn.Linear(4, 4), torch.ones(1, 4)
    call = compiled(layer)
    with torch.no_grad():
        call(x), call(x)
    return [x], (layer, call)


def no_backward_pass(compiled: Compile) -> tuple[list[torch.Tensor], Any]:
    layer, x = nn.Linear(4, 4), torch.ones(1, 4)
    call = compiled(layer)
    call(x)
    return [x, layer.weight], None


def several_sizes(compiled: Compile) -> tuple[list[torch.Tensor], Any]:
    layer, inputs = nn.Linear(4, 4), [torch.ones(count, 4) for count in (1, 3, 5)]
    call = compiled(layer, dynamic=True)
    for x in inputs:
        call(x).sum().backward()
    return inputs, (layer, call)


def a_graph_break(compiled: Compile) -> tuple[list[torch.Tensor], Any]:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x @ w
        torch._dynamo.graph_break()
        return y.sin()

    call, x, w = compiled(function), torch.ones(4, 4), torch.ones(4, 4, requires_grad=True)
    call(x, w).sum().backward()
    return [x, w], call


def a_call_that_fails(compiled: Compile) -> tuple[list[torch.Tensor], Any]:
    call, x = compiled(lambda x, i: nn.functional.embedding(i, x).sin()), torch.ones(4, 4, requires_grad=True)
    call(x, torch.tensor([1])).sum().backward()
    with pytest.raises(IndexError):
        call(x, torch.tensor([9]))
    return [x], call


def a_write_to_an_input(compiled: Compile) -> tuple[list[torch.Tensor], Any]:
    call, x, w = compiled(lambda x, w: (x.add_(1) * w).sum()), torch.ones(4), torch.ones(4, requires_grad=True)
    call(x, w).backward()
    return [x, w], call


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        raise ValueError("no gradient")


def a_backward_pass_that_does_not_come(compiled: Compile) -> tuple[list[torch.Tensor], Any]:
    call, x, w = compiled(lambda x, w: x @ w), torch.ones(4, 4), torch.ones(4, 4, requires_grad=True)
    with pytest.raises(ValueError, match="no gradient"):
        Failing.apply(call(x, w)).sum().backward()
    return [x, w], call


SITUATIONS: list[Situation] = [
    training, training_of_a_model_that_is_gone, inference, no_backward_pass, several_sizes, a_graph_break, a_call_that_fails,
    a_write_to_an_input, a_backward_pass_that_does_not_come,
]  # fmt: skip


def alive(situation: Situation, backend: str, options: dict[str, Any] | None = None) -> list[bool]:
    """Which of a situation's tensors are alive when only the situation's model and compiled function are kept."""
    torch._dynamo.reset()

    def compiled(function: Any, **settings: Any) -> Any:
        return torch.compile(function, backend=backend, options=options, **settings)

    def references() -> tuple[list[weakref.ref[torch.Tensor]], Any]:
        tensors, kept = situation(compiled)
        return [weakref.ref(tensor) for tensor in tensors], kept

    found, _kept = references()
    gc.collect()
    return [reference() is not None for reference in found]


@pytest.mark.quick
@pytest.mark.sample(quick=4)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # TorchDynamo, behind a graph break
@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda situation: situation.__name__)
def test_what_is_kept(situation: Situation) -> None:
    assert alive(situation, "dynaxla") == alive(situation, "aot_eager") == [False] * len(alive(situation, "aot_eager"))


@pytest.mark.parametrize("situation", [training, inference], ids=lambda situation: situation.__name__)
@pytest.mark.parametrize(
    ("backend", "options"), [("dynaxla_auto", None), ("dynaxla", {"compile": "background"}), ("dynaxla_retrace", None)], ids=str
)
def test_other_ways(situation: Situation, backend: str, options: dict[str, Any] | None) -> None:
    assert not any(alive(situation, backend, options))
