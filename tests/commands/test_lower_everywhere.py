"""A twentieth of `make lower-everywhere`, another one for each seed, and what it would find."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import pytest
import torch

from cases.conformance.trial import quiet
from commands.lower_everywhere import trial
from commands.lower_everywhere.__main__ import chosen
from commands.lower_everywhere.__main__ import main as command
from commands.lower_everywhere.capture import of_function
from commands.lower_everywhere.cases import PLATFORMS, Case, cases
from commands.lower_everywhere.expected import CANNOT
from commands.lower_everywhere.lower import DEVICES, calls, moved, stablehlo
from dynaxla.errors import UnsupportedOp

SEED, PART, GROUPS = 0, 20, 8


@functools.cache
def sample() -> Sequence[Case]:
    return chosen(part=PART, seed=SEED)


@pytest.fixture(autouse=True)
def quietly() -> Iterator[None]:
    """The database uses deprecated functions on purpose."""
    with warnings.catch_warnings():
        quiet()
        yield


@pytest.mark.sample(usual=2)
@pytest.mark.parametrize("group", range(GROUPS))
def test_a_part(group: int) -> None:
    wrong = [text for case in sample()[group::GROUPS] for text in trial.faults(case)]
    assert not wrong, "\n".join(wrong)


def test_the_part_has_models_and_operators() -> None:
    every = list(cases())
    assert len(every) == len(set(every)) > 1000
    assert {case.kind for case in sample()} == {"model", "op"}
    assert len(every) / PART <= len(sample()) <= len(every) / PART + 2
    assert chosen(part=PART, seed=SEED) == sample() != chosen(part=PART, seed=SEED + 1)


def _graph(function: Callable[..., Any], *args: torch.Tensor, platform: str = "cuda") -> torch.fx.GraphModule:
    (graph,) = of_function(function, args, platform)
    return graph


def test_graphs_are_moved() -> None:
    """Metadata of nodes, and arguments that name a device."""
    graph = moved(_graph(lambda x: torch.ones(3, device=x.device) + x[1:].t(), torch.ones(4, 3)), DEVICES["cuda"])
    values = [node.meta["val"] for node in graph.graph.nodes if isinstance(node.meta.get("val"), torch.Tensor)]
    assert {value.device for value in values} == {DEVICES["cuda"]}
    named = [value for node in graph.graph.nodes for value in node.kwargs.values() if isinstance(value, torch.device)]
    assert named == [DEVICES["cuda"]]


def test_calls_of_a_program() -> None:
    text = 'stablehlo.custom_call @cusolver_getrf_ffi(%0)\n stablehlo.custom_call @"__onednn$matmul"(%1)\n custom_call @Qr(%2)'
    assert calls(text) == {"cusolver_getrf_ffi", "__onednn$matmul", "Qr"}


def test_an_op_without_a_lowering_is_found() -> None:
    with pytest.raises(UnsupportedOp, match="linalg_ldl_factor"):
        stablehlo(_graph(torch.linalg.ldl_factor, torch.eye(3)), "cuda")


@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_call_of_another_platform_is_found(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def leaking(x: jax.Array) -> jax.Array:
        return jax.ffi.ffi_call("lapack_sgesdd_ffi", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    program = jax.jit(leaking).trace(jax.ShapeDtypeStruct((2,), "float32")).lower(lowering_platforms=(platform,)).as_text()
    monkeypatch.setattr(trial, "stablehlo", lambda graph, platform: program)
    case = Case("op", "sin", "float32")
    assert trial.faults(case) == [f"{case} for {name} calls lapack_sgesdd_ffi" for name in PLATFORMS]


def test_the_list_is_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CANNOT, "sin", "a reason")
    found = trial.faults(Case("op", "sin", "float32"))
    assert [text.partition(":")[0] for text in found] == [f"op/sin/float32 can be lowered for {name}" for name in PLATFORMS]
    monkeypatch.delitem(CANNOT, "nonzero")
    assert "DynamicOutputShapeException" in trial.faults(Case("op", "nonzero", "float32"))[0]


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["--match", "^op/(sin|nonzero)/float32"]) == 0
    assert "2 cases in" in capsys.readouterr().out
