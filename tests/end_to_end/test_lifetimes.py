"""Tests that a compiled function keeps no more tensors and bytes alive after calls than AOTAutograd with eager mode does."""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from support.processes.scripts import run_script

# The size of each dimension of the weights.
SIDE = 4
Compile = Callable[..., Any]
Situation = Callable[[Compile], tuple[list[torch.Tensor], Any]]


def training(compiled: Compile) -> tuple[list[torch.Tensor], Any]:
    layer, x = nn.Linear(SIDE, SIDE), torch.ones(SIDE, SIDE)
    call = compiled(layer)
    call(x).sum().backward()
    return [x], (layer, call)


def training_of_a_deleted_model(compiled: Compile) -> tuple[list[torch.Tensor], Any]:
    layer, x = nn.Linear(SIDE, SIDE), torch.ones(SIDE, SIDE)
    compiled(layer)(x).sum().backward()
    return [x, layer.weight], None


def inference(compiled: Compile) -> tuple[list[torch.Tensor], Any]:
    layer, x = nn.Linear(SIDE, SIDE), torch.ones(SIDE, SIDE)
    call = compiled(layer)
    with torch.no_grad():
        call(x), call(x)
    return [x], (layer, call)


def no_backward_pass(compiled: Compile) -> tuple[list[torch.Tensor], Any]:
    layer, x = nn.Linear(SIDE, SIDE), torch.ones(SIDE, SIDE)
    call = compiled(layer)
    call(x)
    return [x, layer.weight], None


def several_sizes(compiled: Compile) -> tuple[list[torch.Tensor], Any]:
    layer, inputs = nn.Linear(SIDE, SIDE), [torch.ones(SIDE - less, SIDE) for less in (0, 1, 2)]
    call = compiled(layer, dynamic=True)
    for x in inputs:
        call(x).sum().backward()
    return inputs, (layer, call)


def a_graph_break(compiled: Compile) -> tuple[list[torch.Tensor], Any]:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x @ w
        torch._dynamo.graph_break()
        return y.sin()

    call, x, w = compiled(function), torch.ones(SIDE, SIDE), torch.ones(SIDE, SIDE, requires_grad=True)
    call(x, w).sum().backward()
    return [x, w], call


def a_call_that_fails(compiled: Compile) -> tuple[list[torch.Tensor], Any]:
    call, x = compiled(lambda x, i: nn.functional.embedding(i, x).sin()), torch.ones(SIDE, SIDE, requires_grad=True)
    call(x, torch.tensor([1])).sum().backward()
    with pytest.raises(IndexError):
        call(x, torch.tensor([SIDE]))
    return [x], call


def a_write_to_an_input(compiled: Compile) -> tuple[list[torch.Tensor], Any]:
    call, x, w = compiled(lambda x, w: (x.add_(1) * w).sum()), torch.ones(SIDE, SIDE), torch.ones(SIDE, SIDE, requires_grad=True)
    call(x, w).backward()
    return [x, w], call


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        raise ValueError("no gradient")


def a_backward_pass_that_is_not_reached(compiled: Compile) -> tuple[list[torch.Tensor], Any]:
    call, x, w = compiled(lambda x, w: x @ w), torch.ones(SIDE, SIDE), torch.ones(SIDE, SIDE, requires_grad=True)
    with pytest.raises(ValueError, match="no gradient"):
        Failing.apply(call(x, w)).sum().backward()
    return [x, w], call


def a_reset(compiled: Compile) -> tuple[list[torch.Tensor], Any]:
    layer, x = nn.Linear(SIDE, SIDE), torch.ones(SIDE, SIDE)
    call = compiled(layer)
    call(x).sum().backward()
    torch._dynamo.reset()
    return [x, layer.weight], None


SITUATIONS: list[Situation] = [
    training, training_of_a_deleted_model, inference, no_backward_pass, several_sizes, a_graph_break, a_call_that_fails,
    a_write_to_an_input, a_backward_pass_that_is_not_reached, a_reset,
]  # fmt: skip


def alive(situation: Situation, backend: str, options: dict[str, Any] | None = None) -> list[bool]:
    """Returns which of a situation's tensors are alive while only the situation's model and compiled function are referenced."""
    torch._dynamo.reset()

    def compiled(function: Any, **settings: Any) -> Any:
        return torch.compile(function, backend=backend, options=options, **settings)

    def make_references() -> tuple[list[weakref.ref[torch.Tensor]], Any]:
        tensors, kept_objects = situation(compiled)
        return [weakref.ref(tensor) for tensor in tensors], kept_objects

    weak_references, _references = make_references()
    gc.collect()
    return [reference() is not None for reference in weak_references]


@pytest.mark.quick
@pytest.mark.sample(quick=4)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # caused by TorchDynamo after a graph break
@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda situation: situation.__name__)
def test_no_tensor_is_kept_alive(situation: Situation) -> None:
    assert alive(situation, "dynaxla") == alive(situation, "aot_eager") == [False] * len(alive(situation, "aot_eager"))


@pytest.mark.parametrize("situation", [training, inference], ids=lambda situation: situation.__name__)
@pytest.mark.parametrize(
    ("backend", "options"), [("dynaxla_auto", None), ("dynaxla", {"compile": "background"}), ("dynaxla_retrace", None)], ids=str
)
def test_no_tensor_is_kept_alive_by_other_backends(situation: Situation, backend: str, options: dict[str, Any] | None) -> None:
    assert not any(alive(situation, backend, options))


MIB = 2**20


def resident() -> int:
    """Returns the bytes of this process's memory, without free memory of the C library's heap."""
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def mebibytes_kept(situation: Situation, compiled: Compile, times: int = 3) -> float:
    """Returns the MiB that a repetition of a situation adds while all results are referenced. The first run fills compilers' heaps."""
    kept_objects = [situation(compiled)[1]]
    before = resident()
    for _ in range(times):
        kept_objects.append(situation(compiled)[1])
    return (resident() - before) / times / MIB


# Prints the MiB that each situation adds with each backend. A weight has 16 MiB.
BYTES = """
import json, warnings
import torch
import test_lifetimes

warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")
torch.set_num_threads(1)
test_lifetimes.SIDE = 2048
ways = {"aot_eager": None, "dynaxla": None, "dynaxla_auto": None, "dynaxla, in the background": {"compile": "background"}}
found = {}
for way, options in ways.items():
    for situation in test_lifetimes.SITUATIONS:
        torch._dynamo.reset()

        def compiled(function, **settings):
            return torch.compile(function, backend=way.partition(",")[0], options=options, **settings)

        found[f"{situation.__name__}: {way}"] = test_lifetimes.mebibytes_kept(situation, compiled)
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_kept_bytes() -> None:
    """`pytest -m slow tests/end_to_end/test_lifetimes.py -s` prints the table."""
    mebibytes = json.loads(run_script(BYTES))
    for situation in SITUATIONS:
        row = {way.partition(": ")[2]: kept for way, kept in mebibytes.items() if way.startswith(f"{situation.__name__}: ")}
        print(f"{situation.__name__:36}", *(f"{way} {kept:6.1f}" for way, kept in row.items()))
        reference = row.pop("aot_eager")
        for way, kept in row.items():
            assert kept < reference + 8, f"{situation.__name__}: {way} keeps {kept:.0f} MiB, AOTAutograd alone {reference:.0f}"
