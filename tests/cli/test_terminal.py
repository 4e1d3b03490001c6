"""The help, the flags and the width that all commands share."""

from __future__ import annotations

import pytest

from dynaxla.cli.terminal import console_for


def test_the_width_of_output_that_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "44")
    assert console_for(160).width == 44
    monkeypatch.delenv("COLUMNS")
    assert console_for(160).width == 160
