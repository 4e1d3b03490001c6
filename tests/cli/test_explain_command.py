"""`dynaxla explain`: what it takes."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from dynaxla import cli
from dynaxla.cli.explain_command import split_arguments


@pytest.mark.parametrize(
    ("given", "mine", "scripts"),
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
def test_where_the_scripts_arguments_begin(given: list[str], mine: list[str], scripts: list[str]) -> None:
    assert split_arguments(given) == (mine, scripts)


def test_the_page_is_where_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "script.py"
    script.write_text("import os, sys\nos.mkdir('elsewhere')\nos.chdir('elsewhere')\nprint(sys.argv[1:])\nsys.exit(3)\n")
    result = CliRunner().invoke(cli.app, ["explain", "-o", "page.html", "script.py", "-o", "x"])
    assert result.exit_code == 3
    assert "['-o', 'x']" in result.output
    assert "page.html" in result.output
    assert (tmp_path / "page.html").read_text().startswith("<!DOCTYPE html>")


def test_what_cannot_be_is_refused_before_anything_runs(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit(9)")
    assert CliRunner().invoke(cli.app, ["explain", str(tmp_path / "none.py")]).exit_code == 2
    assert CliRunner().invoke(cli.app, ["explain", "-o", str(tmp_path / "no" / "page.html"), str(script)]).exit_code == 2
