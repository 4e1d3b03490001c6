"""Tests of `dynaxla tune`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from dynaxla import cli
from dynaxla.config import Options
from dynaxla.tuning import Measurement
from support.fakes import tiny_benchmark

MEASURED = Measurement("convolution", "a problem", "a machine", {"xla": 1e-6, "onednn": 2e-6}, "onednn", "xla")


def test_tune_without_model_shows_the_cache_and_the_usage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYNAXLA_CACHE", str(tmp_path))
    empty = CliRunner().invoke(cli.app, ["tune"])
    assert empty.exit_code == 0, empty.output
    assert "Nothing has been measured yet" in empty.output
    assert "dynaxla tune MODEL" in empty.output
    assert "resnet18" in empty.output
    store = Options().store("tuning")
    assert store is not None
    store.put("one", MEASURED.encode())
    filled = CliRunner().invoke(cli.app, ["tune"])
    assert "a problem" in filled.output
    assert "dynaxla tune MODEL" in filled.output
    monkeypatch.setenv("DYNAXLA_CACHE", "")
    nowhere = CliRunner().invoke(cli.app, ["tune"]).output
    assert "There is no cache directory" in nowhere
    assert "dynaxla tune MODEL" in nowhere
    monkeypatch.setenv("DYNAXLA_CACHE", "/dev/null/here")
    refused = CliRunner().invoke(cli.app, ["tune"])
    assert refused.exit_code == 2
    assert "cannot be used" in refused.output


def test_clear_empties_the_cache_before_models_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compilations: list[Any] = []

    def compile(model: Any, **settings: Any) -> Any:
        compilations.append((torch.get_num_threads(), settings))
        return model

    monkeypatch.setenv("DYNAXLA_CACHE", str(tmp_path))
    store = Options().store("tuning")
    assert store is not None
    store.put("one", MEASURED.encode())
    tiny_benchmark.add_model(monkeypatch)
    monkeypatch.setattr(torch, "compile", compile)
    tiny_benchmark.measured_implementations(monkeypatch, [MEASURED])
    before = torch.get_num_threads()
    try:
        result = CliRunner().invoke(cli.app, ["tune", "tiny", "--clear", "--threads", "2"])
    finally:
        torch.set_num_threads(before)
    assert result.exit_code == 0, result.output
    assert compilations == [(2, {"backend": "dynaxla", "options": {"tune": True}})]
    assert "a problem" in result.output
    assert "dynaxla tune MODEL" not in result.output
    assert list(store) == []
