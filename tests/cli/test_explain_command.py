"""Tests of `dynaxla explain`: its arguments and its page."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from dynaxla import cli
from dynaxla.cli.explain_command import split_arguments


@pytest.mark.parametrize(
    ("arguments", "own", "script_arguments"),
    [
        (["a.py"], ["a.py"], []),
        (["a.py", "--output", "b"], ["a.py"], ["--output", "b"]),
        (["--output", "b.html", "a.py", "-x", "--", "--help"], ["--output", "b.html", "a.py"], ["-x", "--", "--help"]),
        (["-o", "b.html", "a.py"], ["-o", "b.html", "a.py"], []),
        (["--output=b.html", "a.py", "c"], ["--output=b.html", "a.py"], ["c"]),
        (["--help"], ["--help"], []),
        (["--output"], ["--output"], []),
    ],
)
def test_split_arguments_of_the_command_and_the_script(arguments: list[str], own: list[str], script_arguments: list[str]) -> None:
    assert split_arguments(arguments) == (own, script_arguments)


def test_page_path_is_relative_to_the_initial_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "script.py"
    script.write_text("import os, sys\nos.mkdir('elsewhere')\nos.chdir('elsewhere')\nprint(sys.argv[1:])\nsys.exit(3)\n")
    result = CliRunner().invoke(cli.app, ["explain", "-o", "page.html", "script.py", "-o", "x"])
    assert result.exit_code == 3
    assert "['-o', 'x']" in result.output
    assert "page.html" in result.output
    assert (tmp_path / "page.html").read_text().startswith("<!DOCTYPE html>")


def test_missing_script_and_folder_are_refused_before_the_script_runs(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit(9)")
    assert CliRunner().invoke(cli.app, ["explain", str(tmp_path / "none.py")]).exit_code == 2
    assert CliRunner().invoke(cli.app, ["explain", "-o", str(tmp_path / "no" / "page.html"), str(script)]).exit_code == 2
