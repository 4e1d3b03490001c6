"""Tests of dumps, TORCH_LOGS and profiler regions."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from dynaxla.observe import dump
from support.processes.scripts import completed, run_script


def test_dump_writes_all_stages(tmp_path: Path) -> None:
    directory = tmp_path / "made" / "here"
    compiled = torch.compile(lambda x: (x * 2).relu(), backend="dynaxla", options={"dump": str(directory)}, dynamic=True)
    compiled(torch.randn(3))
    compiled(torch.randn(4))
    names = sorted(path.name.split(".", 1)[1] for path in directory.iterdir())
    assert names == sorted([*["aten.txt", "stablehlo.mlir", "hlo.txt"] * 2, "passes.txt"]), (
        "a set of files for each executable, and one file of the graph's passes"
    )
    assert any("aten.relu" in path.read_text() for path in directory.glob("*.aten.txt"))
    assert any("stablehlo.multiply" in path.read_text() for path in directory.glob("*.stablehlo.mlir"))
    assert any("HloModule" in path.read_text() for path in directory.glob("*.hlo.txt"))


def test_dump_from_the_environment(tmp_path: Path) -> None:
    script = 'import torch; torch.compile(lambda x: x * 2, backend="dynaxla")(torch.ones(3))'
    run_script(script, DYNAXLA_DUMP=str(tmp_path))
    assert len(list(tmp_path.iterdir())) == 4


def test_torch_logs() -> None:
    script = 'import torch; torch.compile(lambda x: x * 2, backend="dynaxla")(torch.ones(3))'
    result = completed(script, TORCH_LOGS="+dynaxla")
    assert result.returncode == 0, result.stderr
    for part in ("aten.mul", "stablehlo.multiply", "HloModule"):
        assert part in result.stderr, part
    for part in ("FileNames", "StackFrames", "stack_frame_id", "function_name_id", "metadata=", "interpreter.py"):
        assert part not in result.stderr, part
    quiet = completed(script)
    assert (quiet.returncode, quiet.stderr) == (0, ""), "something is printed without TORCH_LOGS"


def test_log_omits_metadata_that_the_files_have(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "dynaxla"):
        torch.compile(lambda x: (x.sin() @ x).cos(), backend="dynaxla", options={"dump": str(tmp_path)})(torch.randn(10, 10))
    (file_text,) = [path.read_text() for path in tmp_path.glob("*.hlo.txt")]
    (logged,) = [record.getMessage() for record in caplog.records if "hlo.txt" in record.getMessage()]
    assert "FileNames" in file_text
    assert "stack_frame_id" in file_text
    logged_instructions, file_instructions = (
        [line.partition(" = ")[0] for line in text.splitlines() if " = " in line] for text in (logged, file_text)
    )
    assert logged_instructions == file_instructions, "the log omits an instruction"
    assert "HloModule" in logged
    assert "\nENTRY" in logged


def test_readable_omits_metadata_and_long_constants() -> None:
    assert dump.readable('a = f32[] add(b, c), metadata={op_name="x{y}\\"z}" stack_frame_id=3}, calls=d') == "a = f32[] add(b, c), calls=d"
    assert dump.readable('HloModule m\n\nFileNames\n1 "a"\n\nStackFrames\n1 {b}\n\n\n%f (x)') == "HloModule m\n\n%f (x)"
    assert dump.readable('dense<"0x' + "0A" * 1000 + '">') == 'dense<"0x' + "0A" * 16 + '...">'


def test_profiler_names_the_compiled_region() -> None:
    compiled = torch.compile(lambda x: x * 2, backend="dynaxla")
    compiled(torch.randn(3))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        compiled(torch.randn(3))
    assert any(event.key.startswith("dynaxla_") for event in profile.key_averages())
