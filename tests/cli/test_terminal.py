"""Tests of the terminal settings that all commands share."""

from __future__ import annotations

import pytest

from dynaxla.cli.terminal import console_for


def test_width_of_output_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "44")
    assert console_for(160).width == 44
    monkeypatch.delenv("COLUMNS")
    assert console_for(160).width == 160
