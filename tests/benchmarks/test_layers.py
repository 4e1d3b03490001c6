"""First calls of many equal layers: what is counted, in which process, and how it is shown."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import generation, layers
from dynaxla.cli import app
from dynaxla.observe import metrics


def test_the_part_of_bench_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {("plain", 12): (5.0, 1.0), ("plain", 48): (16.0, 1.25), ("region", 12): (4.0, 0.5), ("region", 48): (6.0, 0.75)}
    read = set()

    def measure(kind: str, count: int, bytecode: str) -> dict[str, float]:
        read.add(bytecode)
        return dict(zip(("cpu", "after"), seconds[kind, count], strict=True))

    monkeypatch.setattr(layers, "measure", measure)
    done = CliRunner().invoke(app, ["bench-cpu", "layers", "--output", str(tmp_path)])
    assert done.exit_code == 0, done.output
    lines = (tmp_path / "cpu.md").read_text().splitlines()
    assert "| plain | 5.00 | 16.00 | 3.20 | 1.00 | 1.25 | 1.25 |" in lines
    assert "| region | 4.00 | 6.00 | 1.50 | 0.50 | 0.75 | 1.50 |" in lines
    assert len(read) == 1


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [layers.PLAIN, layers.REGION])
def test_a_measurement(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of small layers. Regions give what the layers give."""
    monkeypatch.setattr(generation, "WIDTH", 64)
    monkeypatch.setattr(generation, "HEADS", 2)
    monkeypatch.setattr(generation, "CACHED_HEADS", 1)
    monkeypatch.setenv("DYNAXLA_CACHE", str(tmp_path))
    monkeypatch.setattr(layers, "LENGTH", 8)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    try:
        found = layers._measure(3, kind)
    finally:
        metrics.use_clock(time.perf_counter)
    assert 0 < found["after"] < found["cpu"]


def test_regions_are_the_layers() -> None:
    model = generation.decoder(4, layers=2).eval()
    (token,) = generation.tokens(1, torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(layers._of_regions(model)(token), model(token))
