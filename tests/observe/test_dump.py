"""Dumps, TORCH_LOGS and profiler regions."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch


def test_dump_writes_every_stage(tmp_path: Path) -> None:
    directory = tmp_path / "made" / "here"
    compiled = torch.compile(lambda x: (x * 2).relu(), backend="dynaxla", options={"dump": str(directory)}, dynamic=True)
    compiled(torch.randn(3))
    compiled(torch.randn(4))
    names = sorted(path.name.split(".", 1)[1] for path in directory.iterdir())
    assert names == sorted(["aten.txt", "stablehlo.mlir", "hlo.txt"] * 2), "one set per executable"
    assert any("aten.relu" in path.read_text() for path in directory.glob("*.aten.txt"))
    assert any("stablehlo.multiply" in path.read_text() for path in directory.glob("*.stablehlo.mlir"))
    assert any("HloModule" in path.read_text() for path in directory.glob("*.hlo.txt"))


def test_dump_from_the_environment(tmp_path: Path) -> None:
    script = 'import torch; torch.compile(lambda x: x * 2, backend="dynaxla")(torch.ones(3))'
    environment = {**os.environ, "DYNAXLA_DUMP": str(tmp_path)}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment)
    assert len(list(tmp_path.iterdir())) == 3


def test_torch_logs() -> None:
    script = 'import torch; torch.compile(lambda x: x * 2, backend="dynaxla")(torch.ones(3))'
    result = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True, env={**os.environ, "TORCH_LOGS": "+dynaxla"}
    )
    for part in ("aten.mul", "stablehlo.multiply", "HloModule"):
        assert part in result.stderr, part
    without = {name: value for name, value in os.environ.items() if name != "TORCH_LOGS"}
    quiet = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, env=without)
    assert "stablehlo" not in quiet.stderr
    assert quiet.stderr == "", "nothing is printed unless it is asked for"


def test_profiler_names_the_compiled_region() -> None:
    compiled = torch.compile(lambda x: x * 2, backend="dynaxla")
    compiled(torch.randn(3))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        compiled(torch.randn(3))
    assert any(event.key.startswith("dynaxla_") for event in profile.key_averages())
