"""`python -m benchmarks overhead`: the cost of a call besides XLA's own execution.

A perceptron of narrow layers, so that hardly anything is computed, is called in several ways, interleaved in one process:

eager, inductor, dynaxla    the whole call
capture                     TorchDynamo's guards and AOTAutograd's wrapper around a graph that returns at once
program                     dynaxla's part: the graph's inputs as torch tensors in, its outputs as torch tensors out
executable                  XLA's part: the bare executable on arrays prepared in advance, and the wait for its result
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch._dynamo.backends.common import aot_autograd

from dynaxla.capture.decompositions import decompositions
from dynaxla.capture.graph import AtenGraph
from dynaxla.config import Options
from dynaxla.engine.unit import CompilationUnit
from dynaxla.engine.xla import CompiledGraph

# Allowed for one call beyond the bare executable, in microseconds: a fixed part, and a part for each input.
ALLOWED_MICROSECONDS = 30.0
ALLOWED_MICROSECONDS_PER_INPUT = 0.6


@dataclass(frozen=True)
class Overhead:
    """Microseconds of wall time for one call, by way of calling; the docstring of the module lists the ways.

    Attributes:
        layers: the number of layers.
        inputs: the number of tensors that the executable takes.
        minimum: the minimum over the rounds, by way.
        median: the median over the rounds, by way.
    """

    layers: int
    inputs: int
    minimum: dict[str, float]
    median: dict[str, float]

    @property
    def beyond_the_executable(self) -> float:
        return self.median["program"] - self.median["executable"]

    @property
    def allowed(self) -> float:
        return ALLOWED_MICROSECONDS + ALLOWED_MICROSECONDS_PER_INPUT * self.inputs


def perceptron(layers: int, width: int) -> nn.Sequential:
    return nn.Sequential(*[module for _ in range(layers) for module in (nn.Linear(width, width), nn.ReLU())]).eval()


def _boxed(run: Callable[[list[Any]], list[Any]]) -> Callable[[list[Any]], list[Any]]:
    """Marks a function as boxed: it takes its arguments as one list, which it may clear, as functions of a backend do."""
    run._boxed_call = True  # type: ignore[attr-defined]  # mypy knows no attributes of functions
    return run


def measure(layers: int, width: int = 32, batch: int = 1, rounds: int = 60, calls: int = 100, seed: int = 0) -> Overhead:
    """Measures a perceptron. Each round times every way once, with `calls` calls together."""
    torch.manual_seed(seed)
    x = torch.randn(batch, width)
    programs: list[CompiledGraph] = []
    arguments: list[list[Any]] = []

    def remember(module: torch.fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        programs.append(CompiledGraph(CompilationUnit(AtenGraph("overhead", module, tuple(range(1, 2 * layers))), Options())))

        def run(args: list[Any]) -> list[Any]:
            arguments.append(list(args))
            return programs[-1](args)

        return _boxed(run)

    result = torch.empty(batch, width)

    def return_at_once(_module: torch.fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
        def run(args: list[Any]) -> list[Any]:
            args.clear()
            return [result]

        return _boxed(run)

    # Each way has a model of its own, because TorchDynamo keeps all compiled code of a module in one list.
    torch._dynamo.reset()
    models = {name: perceptron(layers, width) for name in ("eager", "inductor", "dynaxla", "capture", "remember")}
    table = decompositions("cpu")
    ways: dict[str, Callable[[], Any]] = {}
    with torch.no_grad():
        compiled = {
            "eager": models["eager"],
            "inductor": torch.compile(models["inductor"]),
            "dynaxla": torch.compile(models["dynaxla"], backend="dynaxla"),
            "capture": torch.compile(models["capture"], backend=aot_autograd(fw_compiler=return_at_once)),
        }
        ways.update({name: functools.partial(model, x) for name, model in compiled.items()})
        remembering = torch.compile(models["remember"], backend=aot_autograd(fw_compiler=remember, decompositions=table))
        for _ in range(3):
            remembering(x)
        program, args = programs[-1], arguments[-1]
        executable = program.executables()[0]
        arrays = executable.binding.arrays(executable.take(list(args)))
        assert executable.program is not None
        call = executable.program.call
        ways["program"] = lambda: program(list(args))
        ways["executable"] = lambda: [array.block_until_ready() for array in call(arrays)]
        times = _interleaved(ways, rounds, calls)
    return Overhead(
        layers,
        len(arrays),
        {name: min(values) for name, values in times.items()},
        {name: statistics.median(values) for name, values in times.items()},
    )


def _interleaved(ways: dict[str, Callable[[], Any]], rounds: int, calls: int) -> dict[str, list[float]]:
    """Returns microseconds per call by way, one number for each round."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            for _ in range(calls // 10):
                way()
            start = time.perf_counter()
            for _ in range(calls):
                way()
            times[name].append((time.perf_counter() - start) / calls * 1e6)
    return times


def show(layers: Sequence[int], width: int, batch: int, rounds: int) -> bool:
    """Measures perceptrons with these numbers of layers, and prints a table. Returns: True if dynaxla adds no more than is allowed."""
    torch.set_num_threads(1)
    results = [measure(count, width, batch, rounds) for count in layers]
    names = list(results[0].median)
    table = Table(title=f"Microseconds per call, median (minimum) of {rounds} rounds; width {width}, batch {batch}, one thread")
    table.add_column("layers (inputs)")
    for name in names:
        table.add_column(name, justify="right")
    table.add_column("beyond the executable", justify="right")
    table.add_column("dynaxla / inductor", justify="right")
    for item in results:
        cells = [f"{item.median[name]:.0f} ({item.minimum[name]:.0f})" for name in names]
        beyond = f"{item.beyond_the_executable:.0f}, allowed {item.allowed:.0f}"
        ratio = f"{item.median['dynaxla'] / item.median['inductor']:.2f} ({item.minimum['dynaxla'] / item.minimum['inductor']:.2f})"
        table.add_row(f"{item.layers} ({item.inputs})", *cells, beyond, ratio)
    console = Console()
    (console if console.is_terminal else Console(width=200)).print(table)
    return all(item.beyond_the_executable <= item.allowed for item in results)
