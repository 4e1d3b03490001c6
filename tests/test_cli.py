"""The command `dynaxla`."""

from __future__ import annotations

import ast
import importlib.metadata
import subprocess
import sys
from pathlib import Path

from scripts import run_script
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


def test_public_names_are_those_listed() -> None:
    """What a type checker reads in `dynaxla/__init__.py` is what is there at run time; also what nothing but `import dynaxla` reaches."""
    listed = [
        alias.name
        for node in ast.walk(ast.parse(Path(dynaxla.__file__).read_text()))
        if isinstance(node, ast.ImportFrom) and node.level
        for alias in node.names
    ]
    assert sorted(listed) == sorted(name for public in dynaxla._PUBLIC.values() for name in public)
    for script in (
        f"import dynaxla; dynaxla.observe.metrics.snapshot(); [getattr(dynaxla, name) for name in {listed}]",
        f"import dynaxla; assert {{*{listed}}} <= {{*dir(dynaxla)}}; from dynaxla import *; [{', '.join(listed)}]",
    ):
        run_script(script)
