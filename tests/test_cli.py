"""The command `dynaxla`."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

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


def test_the_console_script_is_this_one() -> None:
    scripts = importlib.metadata.entry_points(group="console_scripts", name="dynaxla")
    assert next(iter(scripts)).load() is cli.main


LIGHT = """
import sys
from typer.testing import CliRunner
from dynaxla import cli

for arguments, code in [
    (["--help"], 0), (["--version"], 0), ([], 2), (["nothing"], 2), (["explain", "/nowhere/at/all.py"], 2),
    *[([command.name, "--help"], 0) for command in cli.app.registered_commands],
]:
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == code, (arguments, result.output)
    heavy = {"torch", "jax", "jaxlib", "numpy"} & sys.modules.keys()
    assert not heavy, (arguments, heavy)
import dynaxla
assert dynaxla.__version__ and "compile_step" in dir(dynaxla) and not hasattr(dynaxla, "nothing")
assert not {"torch", "jax"} & sys.modules.keys()
"""


def test_help_imports_neither_torch_nor_jax() -> None:
    subprocess.run([sys.executable, "-c", LIGHT], check=True)
