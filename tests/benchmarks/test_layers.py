"""Tests of the benchmark of first calls of many equal layers."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import generation, layers
from dynaxla.cli import app
from dynaxla.observe import metrics


def test_table_of_bench_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {("plain", 12): (5.0, 1.0), ("plain", 48): (16.0, 1.25), ("region", 12): (4.0, 0.5), ("region", 48): (6.0, 0.75)}
    bytecodes = set()

    def measure(kind: str, count: int, bytecode: str) -> dict[str, float]:
        bytecodes.add(bytecode)
        return dict(zip(("cpu", "after"), seconds[kind, count], strict=True))

    monkeypatch.setattr(layers, "measure", measure)
    result = CliRunner().invoke(app, ["bench-cpu", "layers", "--output", str(tmp_path)])
    assert result.exit_code == 0, result.output
    lines = (tmp_path / "cpu.md").read_text().splitlines()
    assert "| plain | 5.00 | 16.00 | 3.20 | 1.00 | 1.25 | 1.25 |" in lines
    assert "| region | 4.00 | 6.00 | 1.50 | 0.50 | 0.75 | 1.50 |" in lines
    assert len(bytecodes) == 1


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [layers.PLAIN, layers.REGION])
def test_measurement_of_small_layers(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(generation, "WIDTH", 64)
    monkeypatch.setattr(generation, "HEADS", 2)
    monkeypatch.setattr(generation, "CACHED_HEADS", 1)
    monkeypatch.setenv("DYNAXLA_CACHE", str(tmp_path))
    monkeypatch.setattr(layers, "LENGTH", 8)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    try:
        measured = layers._measure(3, kind)
    finally:
        metrics.use_clock(time.perf_counter)
    assert 0 < measured["after"] < measured["cpu"]


def test_regions_give_the_results_of_the_layers() -> None:
    model = generation.decoder(4, layers=2).eval()
    (token,) = generation.tokens(1, torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(layers._of_regions(model)(token), model(token))
