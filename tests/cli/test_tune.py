"""`dynaxla tune`: what the cache holds, and what to give."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

import dynaxla
from dynaxla import cli
from dynaxla.tuning import Measurement


def test_tune_says_what_to_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYNAXLA_CACHE", str(tmp_path))
    empty = CliRunner().invoke(cli.app, ["tune"])
    assert empty.exit_code == 0, empty.output
    assert "Nothing has been measured yet" in empty.output
    assert "dynaxla tune MODEL" in empty.output
    assert "resnet18" in empty.output
    measured = Measurement("convolution", "a problem", "a machine", {"xla": 1e-6, "onednn": 2e-6}, "onednn", "xla")
    store = dynaxla.config.Options().store("tuning")
    assert store is not None
    store.put("one", measured.encode())
    filled = CliRunner().invoke(cli.app, ["tune"])
    assert "a problem" in filled.output
    assert "dynaxla tune MODEL" in filled.output
    monkeypatch.setenv("DYNAXLA_CACHE", "")
    assert "dynaxla tune MODEL" in CliRunner().invoke(cli.app, ["tune"]).output
