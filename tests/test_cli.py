"""The command `dynaxla`."""

from __future__ import annotations

import importlib.metadata

from typer.testing import CliRunner

import dynaxla
from dynaxla import cli


def test_version() -> None:
    result = CliRunner().invoke(cli.app, ["--version"])
    assert result.exit_code == 0
    assert result.output.strip() == f"dynaxla {dynaxla.__version__}"
    assert dynaxla.__version__ == importlib.metadata.version("dynaxla")


def test_commands_are_listed() -> None:
    result = CliRunner().invoke(cli.app, ["--help"])
    assert result.exit_code == 0
    assert "bench" in result.output
    assert "doctor" in result.output


def test_an_unknown_model_is_an_error() -> None:
    result = CliRunner().invoke(cli.app, ["bench", "--models", "resnet19"])
    assert result.exit_code == 2
    assert "there are: resnet18" in result.output


def test_the_console_script_is_this_one() -> None:
    scripts = importlib.metadata.entry_points(group="console_scripts", name="dynaxla")
    assert next(iter(scripts)).load() is cli.main
