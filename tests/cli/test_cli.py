"""Tests of the command `dynaxla`."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

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


def test_console_script_is_cli_main() -> None:
    scripts = importlib.metadata.entry_points(group="console_scripts", name="dynaxla")
    assert next(iter(scripts)).load() is cli.main


IMPORT_CHECK = """
import sys
from typer.testing import CliRunner
from dynaxla import cli

for arguments, code in [
    (["--help"], 0), (["--version"], 0), ([], 2), (["nothing"], 2), (["explain", "/nowhere/at/all.py"], 2),
    *[([command.name, "--help"], 0) for command in cli.app.registered_commands],
    # Wrong arguments are refused, and missing files are reported, before torch and JAX are imported.
    (["bench", "--engines", "foo"], 2), (["bench", "--only", "foo"], 2), (["bench", "--suite", "foo"], 2), (["bench", "--dtype", "foo"], 2),
    (["bench", "--device", "foo"], 2), (["bench", "--optimizer", "foo"], 2), (["tune"], 0), (["tune", "foo"], 2),
    (["ops", "no_such_op"], 2), (["ops", "--platform", "foo"], 2), (["export", "foo", "--output", "here"], 2),
    (["export", "a:b", "--output", "/"], 2),
    (["export", "foo.py:b", "--output", "here"], 2), (["export", "a:b", "--output", "here", "--platform", "foo"], 2),
]:
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == code, (arguments, result.output)
    heavy = {"torch", "jax", "jaxlib", "numpy"} & sys.modules.keys()
    assert not heavy, (arguments, heavy)
import dynaxla
assert dynaxla.__version__ and "compile_step" in dir(dynaxla) and not hasattr(dynaxla, "nothing")
assert not {"torch", "jax"} & sys.modules.keys()
"""


def test_help_and_refusals_import_neither_torch_nor_jax(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", IMPORT_CHECK], check=True, env=os.environ | {"DYNAXLA_CACHE": str(tmp_path)})


def test_help_shows_no_type_of_flags() -> None:
    for name in ("bench", "doctor", "ops", "export", "tune"):
        shown = CliRunner().invoke(cli.app, [name, "--help"]).output
        assert "bool" not in shown.lower(), shown


def test_help_lists_doctor_and_explain_first() -> None:
    shown = CliRunner().invoke(cli.app, ["--help"], env={"COLUMNS": "120"}).output
    names = [command.name for command in cli.app.registered_commands]
    assert names[:2] == ["doctor", "explain"]
    assert shown.index("doctor") < shown.index("explain") < shown.index("bench-cpu")
