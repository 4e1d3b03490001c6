"""Functions and modules that a process compiles ahead of time and another process calls. `main` is the program of the second process."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dynaxla.observe import metrics

library = torch.library.Library("dynaxla_artifact_test", "FRAGMENT")
library.define("thrice(Tensor x) -> Tensor")
library.impl("thrice", lambda x: x * 3, "CompositeExplicitAutograd")


@dataclass(frozen=True)
class Case:
    """A function or a module, and its inputs.

    Attributes:
        make: Returns a function, or a module whose forward method is compiled.
        trains: True if gradients are computed.
    """

    make: Callable[[], Any]
    inputs: Callable[[], tuple[Tensor, ...]]
    options: dict[str, Any] = field(default_factory=dict)
    trains: bool = False

    def run(self, owner: Any, function: Callable[..., Any]) -> list[Tensor]:
        """Returns all tensors that two calls affect: results, gradients, inputs and buffers.

        Args:
            owner: The function or module that `make` returned.
            function: Called with the inputs, and with a module as the first argument.
        """
        torch.manual_seed(1)
        inputs = self.inputs()
        args = (owner, *inputs) if isinstance(owner, torch.nn.Module) else inputs
        tensors: list[Tensor] = []
        with torch.set_grad_enabled(self.trains):
            for _ in range(2):
                result = function(*args)
                results = list(result) if isinstance(result, tuple) else [result]
                if self.trains:
                    results[0].square().sum().backward()
                tensors += [tensor.detach().clone() for tensor in (*results, *inputs)]
        if isinstance(owner, torch.nn.Module):
            tensors += [tensor.detach() for tensor in owner.state_dict().values()]
            tensors += [parameter.grad for parameter in owner.parameters() if parameter.grad is not None]
        return tensors


class Counting(torch.nn.Module):
    """A module that writes to its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("rows", torch.zeros(64, 512))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.count.add_(1)
        self.rows.index_copy_(0, torch.tensor([3]), x.sum() + torch.zeros(1, 512))
        return self.linear(x).relu() * self.count, self.rows.sum()


class Convolutions(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = torch.nn.Conv2d(3, 16, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(16)
        self.linear = torch.nn.Linear(16 * 16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.nn.functional.max_pool2d(self.norm(self.convolution(x)).relu(), 2).flatten(1))


class Layers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.nn.functional.gelu(self.first(x)))


class Blocks(torch.nn.Module):
    """Equal blocks, which are compiled once."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(8))
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(16) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + norm(torch.nn.functional.gelu(layer(x)).softmax(-1) * 2)
        return x


def gelus(x: Tensor) -> Tensor:
    return torch.nn.functional.gelu(x @ x.t()).softmax(-1) + torch.tensor([1.5])


def views(x: Tensor) -> tuple[Tensor, ...]:
    return x.t(), x[1:].view(-1), (x + 1).t(), x.to(torch.bfloat16).sum(0)


def writes(x: Tensor) -> Tensor:
    x.mul_(2)
    return x.sum()


CASES = {
    "function": Case(lambda: gelus, lambda: (torch.randn(8, 8),)),
    "views": Case(lambda: views, lambda: (torch.randn(3, 4),)),
    "written input": Case(lambda: writes, lambda: (torch.randn(3, 4),)),
    "buffers": Case(lambda: Counting().eval(), lambda: (torch.randn(2, 4),)),
    "equal blocks": Case(lambda: Blocks().eval(), lambda: (torch.randn(3, 16),)),
    "convolutions": Case(lambda: Convolutions().eval(), lambda: (torch.randn(2, 3, 8, 8),)),
    "frozen": Case(lambda: Convolutions().eval(), lambda: (torch.randn(2, 3, 8, 8),), {"freeze": True}),
    "background": Case(lambda: gelus, lambda: (torch.randn(7, 7),), {"compile": "background"}),
    "torch's kernel": Case(lambda: lambda x: torch.ops.dynaxla_artifact_test.thrice(x) + 1, lambda: (torch.randn(3, 4),)),
    "exact random numbers": Case(lambda: lambda x: torch.rand_like(x) + x, lambda: (torch.randn(3, 4),), {"exact_rng": True}),
    "training": Case(Layers, lambda: (torch.randn(3, 4),), trains=True),
    "training with statistics": Case(Convolutions, lambda: (torch.randn(2, 3, 8, 8),), trains=True),
}  # fmt: skip


def made(case: Case) -> Any:
    torch.manual_seed(0)
    return case.make()


def compiled(case: Case, owner: Any) -> Any:
    """Compiles ahead of time for the case's inputs. The result takes a module as its first argument."""
    torch._dynamo.reset()
    function = torch.compile(owner, fullgraph=True, backend="dynaxla", options=case.options)
    function = function.forward if isinstance(owner, torch.nn.Module) else function
    with torch.set_grad_enabled(case.trains):
        return function.aot_compile((case.inputs(), {}))


def main(folder: str) -> None:
    """Prints, for each case, the difference from eager mode if there is one, and the counters of repeated work."""
    torch.set_num_threads(1)
    report = {}
    for name, case in CASES.items():
        metrics.reset()
        try:
            with Path(folder, name).open("rb") as file:
                loaded = torch.compiler.load_compiled_function(file, f_globals=globals())
            actual = case.run(made(case), loaded)
            eager_owner = made(case)
            expected = case.run(eager_owner, type(eager_owner).forward if isinstance(eager_owner, torch.nn.Module) else eager_owner)
            torch.testing.assert_close(actual, expected)
            assert [tensor.stride() for tensor in actual] == [tensor.stride() for tensor in expected]
            problem = ""
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        report[name] = {"wrong": problem, **{phase: metrics.snapshot().get(phase, 0) for phase in ("capture", "trace", "calls")}}
    print(json.dumps(report))
