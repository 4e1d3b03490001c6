"""Tests of the command that compiles for a GPU on a machine without one: figures, budgets, page, interrupted runs. Nothing is compiled."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from commands.compiled_programs import budgets, results
from commands.compiled_programs.hlo import Figures, Module
from commands.gpu_programs import __main__ as command
from commands.gpu_programs import guard, report, runner
from commands.gpu_programs.errors import GpuProgramsError
from commands.gpu_programs.models import BUDGETS, LIMITS, Cell, GptBlock, cells

PROGRAM = """HloModule jit_program, is_scheduled=true, entry_computation_layout={(f32[8,4]{1,0})->f32[4,8]{1,0}}

%fused_transpose (param_0: f32[8,4]) -> bf16[4,8] {
  %param_0 = f32[8,4]{1,0} parameter(0)
  %convert = bf16[8,4]{1,0} convert(%param_0)
  ROOT %transpose = bf16[4,8]{1,0} transpose(%convert), dimensions={1,0}
}

%fused_add (param_0.1: f32[8,4]) -> f32[8,4] {
  %param_0.1 = f32[8,4]{1,0} parameter(0)
  %copy.9 = f32[8,4]{0,1} copy(%param_0.1)
  ROOT %add = f32[8,4]{1,0} add(%copy.9, %copy.9)
}

%command_buffer (p: f32[8,4]) -> (f32[8,4], /*index=1*/f32[8,4]) {
  %p = f32[8,4]{1,0} parameter(0)
  %fusion.2 = f32[8,4]{1,0} fusion(%p), kind=kLoop, calls=%fused_add
  %copy.3 = f32[8,4]{1,0} copy(%p)
  ROOT %tuple.2 = (f32[8,4]{1,0}, /*index=1*/f32[8,4]{1,0}) tuple(%fusion.2, %copy.3)
}

ENTRY %main (arg: f32[8,4]) -> bf16[4,8] {
  %arg = f32[8,4]{1,0} parameter(0), metadata={op_name="x = y("}
  %call = (f32[8,4]{1,0}, /*index=1*/f32[8,4]{1,0}) call(%arg), to_apply=%command_buffer
  %gte = f32[8,4]{1,0} get-tuple-element(%call), index=0
  %cudnn = (f32[8,4]{1,0}, u8[16]{0}) custom-call(%gte), custom_call_target="__cudnn$convForward", backend_config={"a":{}}
  %bitcast = f32[32]{0} bitcast(%gte)
  %start = ((f32[8,4]{1,0}), f32[8,4]{1,0}, u32[]) copy-start(%gte)
  %done = f32[8,4]{1,0} copy-done(%start)
  ROOT %wrapped_transpose = bf16[4,8]{1,0} fusion(%done), kind=kInput, calls=%fused_transpose
}
"""


def test_figures_of_a_program() -> None:
    """Five launches: a fusion and a copy in the called computation, cuDNN, the asynchronous copy, and the transpose."""
    assert Figures.of(PROGRAM) == Figures(kernels=5, moves=3, calls={"__cudnn$convForward": 1})


def test_fusion_that_computes_does_not_count_as_a_move() -> None:
    module = Module.parse(PROGRAM)
    moves = {item.name: module.moves(item) for item in module.launched}
    assert moves == {"fusion.2": False, "copy.3": True, "cudnn": False, "start": True, "wrapped_transpose": True}


def test_text_without_a_program_is_refused() -> None:
    with pytest.raises(ValueError, match="no entry computation"):
        Module.parse("HloModule nothing\n")


FIGURES = {"kernels": 10, "moves": 2, "memory_mib": 100.0, "calls": {"__cublas$gemm": 1}}
CELL = "resnet18 float32 NCHW"


def _found(**changes: Any) -> results.Results:
    return {CELL: {"programs": {"inference": FIGURES | changes}, "seconds": 1.0}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, None),
        ({"kernels": 9, "moves": 0, "memory_mib": 1.0, "calls": {}}, None),
        ({"memory_mib": 102.0, "calls": {"__cublas$gemm": 7}}, None),
        ({"kernels": 11}, "kernels is 11, and at most 10"),
        ({"moves": 3}, "moves is 3, and at most 2"),
        ({"memory_mib": 103.0}, "memory_mib is 103.0"),
        ({"calls": {"xla_ffi_python_gpu_callback": 1}}, "it calls xla_ffi_python_gpu_callback"),
    ],
)
def test_figures_above_the_budget_are_reported(changes: dict[str, Any], message: str | None) -> None:
    lines = list(LIMITS.exceeded(_found(**changes), _found()))
    assert len(lines) == (message is not None)
    assert message is None or message in lines[0]


def test_missing_budget_and_failed_cell_are_reported() -> None:
    assert list(LIMITS.exceeded(_found(), {})) == [f"{CELL} inference: it has no budget"]
    failed: results.Results = {CELL: {"error": "Traceback\nUnsupportedOp: no lowering", "seconds": 1.0}}
    assert list(LIMITS.exceeded(failed, _found())) == [f"{CELL}: UnsupportedOp: no lowering"]


def test_save_keeps_the_budgets_of_other_cells(tmp_path: Path) -> None:
    path = tmp_path / "budgets.json"
    budgets.save(_found(), path)
    budgets.save({"vgg16 float32 NCHW": {"programs": {"forward": FIGURES}, "seconds": 1.0}, "alexnet float32 NCHW": {"error": "no"}}, path)
    saved = budgets.load(path)
    assert list(saved) == [CELL, "vgg16 float32 NCHW"]
    assert list(LIMITS.exceeded(_found(), saved)) == []


def test_all_budgets_belong_to_cells() -> None:
    assert set(budgets.load(BUDGETS)) <= {str(cell) for cell in cells()}


def test_page_has_each_program() -> None:
    error = "Traceback (most recent call last):\n  File x, line 1\nUnsupportedOp: no lowering\n\nThe above exception was\nOther: so"
    results_by_cell = _found() | {"bert_base bfloat16": {"error": error, "seconds": 1.0}}
    page = report.page(results_by_cell)
    assert "\n## resnet18\n\n| | program |" in page
    assert "| float32 NCHW | inference | 10 | 2 | 100.0 | 1 `__cublas$gemm` |" in page
    assert "| bfloat16 | | | | | failed: UnsupportedOp: no lowering |" in page


def test_number_of_cells() -> None:
    """Nine models of images in two layouts, three BERTs, and a block of GPT, each in two precisions."""
    every = list(cells())
    assert len(every) == len(set(every)) == (9 * 2 + 4) * 2
    assert Cell("bert_base", "bfloat16") in every
    assert Cell("vit_base_patch16_224", "float32", "channels-last") in every


def test_gpt_block_is_causal() -> None:
    x = torch.randn(2, 5, 16)
    block = GptBlock(16, 2)
    assert block(x).shape == x.shape
    assert torch.allclose(block(x)[:, :3], block(x[:, :3]), atol=1e-5), "the block must be causal"


STUB = """
import json, os, sys
path, *names = sys.argv[1:]
for name in names:
    if "alexnet" in name and "bfloat16" in name:
        os.abort()
    with open(path, "a") as file:
        file.write(json.dumps({"cell": name, "programs": {}, "seconds": 0.0, "pid": os.getpid()}) + "\\n")
"""


def _plugin(folder: Path) -> Path:
    (folder / "jax_plugins").mkdir(parents=True)
    return folder


def test_run_continues_with_stored_results_and_after_a_crash(tmp_path: Path) -> None:
    wanted = [cell for cell in cells() if cell.model in ("resnet18", "alexnet")]
    path, command = tmp_path / "results.jsonl", (sys.executable, "-c", STUB)
    path.write_text(json.dumps({"cell": str(wanted[0]), "programs": {}, "seconds": 0.0, "pid": 0}) + '\n{"cell": "vgg')
    results_by_cell = runner.compile_all(wanted, path, _plugin(tmp_path / "plugin"), command)
    assert [name for name, result in results_by_cell.items() if "error" in result] == [
        "alexnet bfloat16 NCHW",
        "alexnet bfloat16 channels-last",
    ]
    processes = {name: result.get("pid") for name, result in results_by_cell.items()}
    assert processes[str(wanted[0])] == 0, "the stored result was not used"
    assert processes["resnet18 bfloat16 NCHW"] == processes["resnet18 bfloat16 channels-last"] != processes["alexnet float32 NCHW"]


def test_missing_plugin_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(GpuProgramsError, match="make gpu-programs"):
        runner.environment(tmp_path)


def test_only_the_child_skips_the_check_for_a_driver(tmp_path: Path) -> None:
    assert runner.environment(_plugin(tmp_path))[runner.UNCHECKED] == "1"
    assert runner.UNCHECKED not in runner.os.environ


def test_missing_or_failing_compiler_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(GpuProgramsError, match="no C\\+\\+ compiler \\(no-such-compiler\\)"):
        guard._library(tmp_path)
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(GpuProgramsError, match="does not compile"):
        guard._library(tmp_path)


def test_guard_refuses_to_load_after_torch() -> None:
    with pytest.raises(GpuProgramsError, match=r"import commands\.gpu_programs\.fakes first"):
        guard.load()


def test_match_without_check_or_accept_is_refused() -> None:
    with pytest.raises(SystemExit, match="has all models"):
        command.main(["--match", "resnet18"])
