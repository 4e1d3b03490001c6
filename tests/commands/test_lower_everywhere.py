"""Tests of `make lower-everywhere`: a twentieth of its cases, and the faults that it reports."""

from __future__ import annotations

import functools
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import pytest
import torch

from cases.conformance.trial import quiet
from commands.lower_everywhere import expected, tpu_compiler, trial
from commands.lower_everywhere.__main__ import chosen
from commands.lower_everywhere.__main__ import main as command
from commands.lower_everywhere.capture import of_function
from commands.lower_everywhere.cases import PLATFORMS, Case, cases
from commands.lower_everywhere.expected import ABORTS, CANNOT, COMPILING, LOWERING
from commands.lower_everywhere.lower import DEVICES, calls, moved, stablehlo
from commands.lower_everywhere.trial import Outcome
from commands.tpu_programs import libtpu
from dynaxla.errors import UnsupportedOp

SEED, PART, GROUPS = 0, 20, 8


@functools.cache
def sample() -> Sequence[Case]:
    return chosen(part=PART, seed=SEED)


@pytest.fixture(autouse=True)
def without_warnings() -> Iterator[None]:
    """Ignores warnings about deprecated functions, which the database uses on purpose."""
    with warnings.catch_warnings():
        quiet()
        yield


@pytest.mark.sample(usual=2)
@pytest.mark.parametrize("group", range(GROUPS))
def test_sampled_cases_have_no_faults(group: int) -> None:
    faults = [text for case in sample()[group::GROUPS] for text in trial.faults(case)]
    assert not faults, "\n".join(faults)


def test_sample_has_models_and_operators() -> None:
    all_cases = list(cases())
    assert len(all_cases) == len(set(all_cases)) > 1000
    assert {case.kind for case in sample()} == {"model", "op"}
    assert len(all_cases) / PART <= len(sample()) <= len(all_cases) / PART + 2
    assert chosen(part=PART, seed=SEED) == sample() != chosen(part=PART, seed=SEED + 1)


def _graph(function: Callable[..., Any], *args: torch.Tensor, platform: str = "cuda") -> torch.fx.GraphModule:
    (graph,) = of_function(function, args, platform)
    return graph


def test_moved_changes_metadata_and_device_arguments() -> None:
    graph = moved(_graph(lambda x: torch.ones(3, device=x.device) + x[1:].t(), torch.ones(4, 3)), DEVICES["cuda"])
    values = [node.meta["val"] for node in graph.graph.nodes if isinstance(node.meta.get("val"), torch.Tensor)]
    assert {value.device for value in values} == {DEVICES["cuda"]}
    named = [value for node in graph.graph.nodes for value in node.kwargs.values() if isinstance(value, torch.device)]
    assert named == [DEVICES["cuda"]]


def test_calls_of_a_program() -> None:
    text = 'stablehlo.custom_call @cusolver_getrf_ffi(%0)\n stablehlo.custom_call @"__onednn$matmul"(%1)\n custom_call @Qr(%2)'
    assert calls(text) == {"cusolver_getrf_ffi", "__onednn$matmul", "Qr"}


def test_op_without_a_lowering_is_refused() -> None:
    with pytest.raises(UnsupportedOp, match="linalg_ldl_factor"):
        stablehlo(_graph(torch.linalg.ldl_factor, torch.eye(3)), "cuda")


@pytest.mark.parametrize("platform", PLATFORMS)
def test_call_of_a_function_of_another_platform_is_a_fault(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def call_lapack(x: jax.Array) -> jax.Array:
        return jax.ffi.ffi_call("lapack_sgesdd_ffi", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    program = jax.jit(call_lapack).trace(jax.ShapeDtypeStruct((2,), "float32")).lower(lowering_platforms=(platform,))
    monkeypatch.setattr(trial, "lowered", lambda graph, platform, device: program)
    case = Case("op", "sin", "float32")
    assert trial.faults(case) == [f"{case} for {name} calls lapack_sgesdd_ffi" for name in PLATFORMS]


def test_outcome_that_differs_from_the_expected_one_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CANNOT, "sin", "a reason")
    faults = trial.faults(Case("op", "sin", "float32"))
    assert [text.partition(":")[0] for text in faults] == [f"op/sin/float32 can be lowered for {name}" for name in PLATFORMS]
    monkeypatch.delitem(CANNOT, "nonzero")
    assert "DynamicOutputShapeException" in trial.faults(Case("op", "nonzero", "float32"))[0]


def test_command_reports_its_number_of_cases(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["--match", "^op/(sin|nonzero)/float32"]) == 0
    assert "2 cases in" in capsys.readouterr().out


# Compilation for TPUs. These tests do not use libtpu: programs are compiled for the CPU, or by a stub.

SIN = Case("op", "sin", "float32")


def test_case_is_compiled_for_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX must compile and lower for the same platform, so the test lowers for the CPU, too."""
    lowered = trial.lowered
    monkeypatch.setitem(DEVICES, "cpu", torch.device("cpu"))
    monkeypatch.setattr(trial, "lowered", lambda graph, platform, device: lowered(graph, "cpu", device))
    assert trial.outcome(SIN, "tpu", jax.devices("cpu")[0]) == Outcome()


def test_error_of_the_compiler_is_an_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise RuntimeError("UNIMPLEMENTED:\n sines")

    monkeypatch.setattr(trial, "lowered", lambda *_: types.SimpleNamespace(as_text=lambda: "custom_call @Qr(%1)", compile=refuse))
    assert trial.outcome(SIN, "tpu") == Outcome(calls=("Qr",)), "without a device, the case is only lowered"
    assert trial.outcome(SIN, "tpu", jax.devices("cpu")[0]) == Outcome(COMPILING, "RuntimeError: UNIMPLEMENTED: sines", ("Qr",))


@pytest.mark.parametrize("kind", [LOWERING, COMPILING, ABORTS])
def test_unexpected_outcome_of_compilation_is_a_fault(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = Outcome(kind, "its message")
    assert trial.fault(SIN, "tpu", failed, is_compiled=True) == f"{SIN} for tpu {kind}: its message"
    reasons = {LOWERING: expected.CANNOT_ON, COMPILING: expected.NOT_COMPILED, ABORTS: expected.ENDS}[kind]
    monkeypatch.setitem(reasons["tpu"], "sin/float32", "its reason")
    assert trial.fault(SIN, "tpu", failed, is_compiled=True) == ""
    assert "take it off the list of expected.py, which says: its reason" in trial.fault(SIN, "tpu", Outcome(), is_compiled=True)
    assert trial.fault(SIN, "cuda", Outcome()) == ""
    assert trial.fault(Case("op", "sin", "bfloat16"), "tpu", Outcome(), is_compiled=True) == ""
    assert bool(trial.fault(SIN, "tpu", Outcome())) == (kind == LOWERING), "a case that is not compiled cannot fail to compile"
    other = LOWERING if kind != LOWERING else ABORTS
    assert trial.fault(SIN, "tpu", Outcome(other, "another message"), is_compiled=True).endswith("another message")


def test_all_expected_failures_belong_to_cases() -> None:
    names = {case.name for case in cases()} | {f"{case.name}/{case.dtype}" for case in cases()}
    lists = [CANNOT, *expected.CANNOT_ON.values(), *expected.NOT_COMPILED.values(), *expected.ENDS.values()]
    assert [name for reasons in lists for name in reasons if name not in names] == []


STUB = """
import json, os, sys
path, *names = sys.argv[1:]
for name in names:
    if name == "op/cos/float32":
        for line in ("E1129 15:53:26.6 24855 a.cc:1] this", "F1129 15:53:26.6   24855 shape.h:843] Check failed: p ", "    @ 0x7f"):
            print(line, file=sys.stderr, flush=True)
        os.abort()
    with open(path, "a") as file:
        file.write(json.dumps({"cell": name, "outcomes": {"tpu": {"kind": "", "text": "", "calls": ["Qr"]}}}) + "\\n")
"""


def _libtpu(folder: Path) -> Path:
    (folder / "libtpu").mkdir()
    (folder / "libtpu-9.8.dist-info").mkdir()
    (folder / "libtpu" / "libtpu.so").touch()
    return folder


def test_case_that_ends_its_process(tmp_path: Path) -> None:
    wanted = [Case("op", name, "float32") for name in ("sin", "cos", "tan")]
    outcomes = list(tpu_compiler.compile_all(wanted, tmp_path / "results" / "r.jsonl", _libtpu(tmp_path), (sys.executable, "-c", STUB)))
    aborted = Outcome(ABORTS, "its process ended with -6: shape.h:843] Check failed: p")
    assert outcomes == [
        (wanted[0], {"tpu": Outcome(calls=("Qr",))}),
        (wanted[1], {"tpu": aborted}),
        (wanted[2], {"tpu": Outcome(calls=("Qr",))}),
    ]


def test_missing_or_broken_libtpu_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="make tpu-programs"):
        command(["--match", "^op/sin/float32", "--compile", "tpu", "--libtpu", str(tmp_path), "--results", str(tmp_path / "r.jsonl")])
    child = (sys.executable, "-c", "raise ValueError('old\\n  hint: get another')")
    with pytest.raises(libtpu.LibtpuError, match=r"\(1\): ValueError: old hint: get another$"):
        list(tpu_compiler.compile_all([SIN], tmp_path / "r.jsonl", _libtpu(tmp_path), child))


def test_results_file_is_named_by_the_version_of_libtpu(tmp_path: Path) -> None:
    path = tpu_compiler.results_file(_libtpu(tmp_path))
    assert tpu_compiler.results_file(tmp_path) == path
    assert path.name.startswith("libtpu-9.8-")
