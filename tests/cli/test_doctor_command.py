"""Tests of `dynaxla doctor`: the findings are shown, and the exit code says if one is broken."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from dynaxla import cli, doctor
from dynaxla.doctor import Status
from support import internals


@pytest.mark.parametrize("status", Status)
def test_only_broken_findings_set_the_exit_code(status: Status, monkeypatch: pytest.MonkeyPatch) -> None:
    finding = doctor.Finding("topic", "what was found", "its value", status, "how to fix it")
    good = doctor.Finding("topic", "something else", "works", Status.GOOD)
    gpu_arguments: list[bool] = []
    internals.findings_of_doctor(monkeypatch, lambda gpu: gpu_arguments.append(gpu) or [finding, good])
    result = CliRunner().invoke(cli.app, ["doctor"])
    CliRunner().invoke(cli.app, ["doctor", "--gpu"])
    assert gpu_arguments == [False, True]
    assert result.exit_code == (1 if status is Status.BROKEN else 0)
    assert "what was found" in result.output
    assert ("how to fix it" in result.output) == (status in (Status.DOUBT, Status.BROKEN))
    assert "something else" in result.output
