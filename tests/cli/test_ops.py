"""Tests of `dynaxla ops`."""

from __future__ import annotations

import pytest
import torch
from typer.testing import CliRunner

from dynaxla import cli
from dynaxla.cli import op_table
from support import internals


def test_ops_by_name() -> None:
    result = CliRunner().invoke(cli.app, ["ops", "cumsum*", "unique_dim"])
    assert result.exit_code == 0
    assert "aten.cumsum.default" in result.output
    assert "scans:" in result.output
    assert "kernel" in result.output
    missing = CliRunner().invoke(cli.app, ["ops", "no_such_op"])
    assert missing.exit_code == 2
    assert "no op matches" in missing.output


def test_option_platform_chooses_the_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    platforms: list[str] = []
    support = op_table.OpSupport(torch.ops.aten.cumsum.default, "kernel")
    internals.support_of_ops(monkeypatch, lambda platform: platforms.append(platform) or [support])
    named = CliRunner().invoke(cli.app, ["ops", "cumsum", "--platform", "tpu"]).output
    counted = CliRunner().invoke(cli.app, ["ops", "--platform", "rocm"]).output
    assert platforms == ["tpu", "rocm"]
    assert "aten.cumsum.default" in named
    assert "aten.cumsum.default" not in counted
    assert "total" in counted
