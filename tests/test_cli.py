"""The command `dynaxla`."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import dynaxla
from dynaxla import cli
from dynaxla.cli.op_table import ways
from dynaxla.cli.ops import divided
from dynaxla.observe import coverage as observed
from dynaxla.tuning import Measurement


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


def test_ops_lists_every_core_op() -> None:
    kinds = {str(way.op): way.kind for way in ways("cpu") if torch.Tag.core in way.op.tags}
    assert len(kinds) > 150
    # Those whose result's size or number depends on a tensor's values: no XLA program can hold them.
    assert {op for op, kind in kinds.items() if kind == "kernel"} == {"aten.nonzero.default", "aten._local_scalar_dense.default"}


def test_ops_by_name() -> None:
    result = CliRunner().invoke(cli.app, ["ops", "cumsum*", "unique_dim"])
    assert result.exit_code == 0
    assert "aten.cumsum.default" in result.output
    assert "scans:" in result.output
    assert "kernel" in result.output
    missing = CliRunner().invoke(cli.app, ["ops", "no_such_op"])
    assert missing.exit_code == 2
    assert "no op matches" in missing.output


def test_ops_of_a_script(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\n"
        "torch.library.custom_op('dynaxla_test::of_a_script', lambda x: x + 1, mutates_args=(), schema='(Tensor x) -> Tensor')"
        ".register_fake(torch.empty_like)\n"
        "f = torch.compile(lambda x: torch.ops.dynaxla_test.of_a_script(x.sin().sin()), backend='dynaxla')\n"
        "f(torch.ones(3))\n"
    )
    observed.reset()
    result = CliRunner().invoke(cli.app, ["ops", "--run", str(script)])
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.output.splitlines() if "aten.sin" in line or "of_a_script" in line]
    assert [row[1::2] for row in rows] == [["dynaxla_test.of_a_script.default", "0", "1"], ["aten.sin.default", "2", "0"]]


LIGHT = """
import sys
from typer.testing import CliRunner
from dynaxla import cli

for arguments, code in [
    (["--help"], 0), (["--version"], 0), ([], 2), (["nothing"], 2), (["ops", "--run", "/nowhere/at/all.py"], 2),
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
        subprocess.run([sys.executable, "-c", script], check=True)


SCRIPT = """
import sys, threading
import beside
assert sys.path[0] == {folder!r}, sys.path
assert __name__ == "__main__" and sys.modules["__main__"].__dict__ is globals() and __file__ == {file!r}
print("arguments", sys.argv)
{end}
"""


def run_script(tmp_path: Path, end: str, *arguments: str) -> tuple[subprocess.CompletedProcess[str], subprocess.CompletedProcess[str]]:
    """A script run by `dynaxla ops --run`, and by Python."""
    (tmp_path / "beside.py").touch()
    file = tmp_path / "script.py"
    file.write_text(SCRIPT.format(folder=str(tmp_path.resolve()), file=str(file), end=end))
    ops = [sys.executable, "-c", "from dynaxla.cli import main; main()", "ops", "--run", "script.py", *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    mine, pythons = (
        subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        for command in (ops, [sys.executable, "script.py", *arguments])
    )
    assert "nodes lowered" in mine.stdout, mine.stderr
    return mine, pythons


def test_a_script_gets_its_flags(tmp_path: Path) -> None:
    mine, pythons = run_script(tmp_path, "sys.exit(7)", "--flag", "1", "--platform", "--help", "--", "-x")
    assert pythons.returncode == 7, pythons.stderr
    assert mine.returncode == 7
    assert mine.stdout.splitlines()[0] == pythons.stdout.splitlines()[0]
    assert "'--help', '--', '-x'" in mine.stdout


def test_a_failing_script_looks_as_in_python(tmp_path: Path) -> None:
    mine, pythons = run_script(tmp_path, "raise ValueError('its own')")
    assert (mine.returncode, mine.stderr) == (pythons.returncode, pythons.stderr)
    assert "its own" in mine.stderr


@pytest.mark.parametrize(
    ("given", "mine", "scripts"),
    [
        (["--run", "a.py"], ["--run", "a.py"], []),
        (["--run", "a.py", "--run", "b"], ["--run", "a.py"], ["--run", "b"]),
        (["--run=a.py", "-x"], ["--run=a.py"], ["-x"]),
        (["--run", "a.py", "--", "-x", "--"], ["--run", "a.py"], ["-x", "--"]),
        (["--platform", "tpu", "sin", "--run", "a.py", "--help"], ["--platform", "tpu", "sin", "--run", "a.py"], ["--help"]),
        (["--run"], ["--run"], []),
        (["sin", "--", "--run"], ["sin", "--", "--run"], []),
    ],
)
def test_where_the_scripts_arguments_begin(given: list[str], mine: list[str], scripts: list[str]) -> None:
    assert divided(given) == (mine, scripts)


def test_tune_says_what_to_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYNAXLA_CACHE", str(tmp_path))
    empty = CliRunner().invoke(cli.app, ["tune"])
    assert empty.exit_code == 0, empty.output
    assert "Nothing has been measured yet" in empty.output
    assert "dynaxla tune MODEL" in empty.output
    assert "resnet18" in empty.output
    measured = Measurement("convolution", "a problem", "a machine", {"xla": 1e-6, "onednn": 2e-6}, "onednn", "xla")
    store = dynaxla.config.Options().store("tuning")
    assert store is not None
    store.put("one", measured.encode())
    filled = CliRunner().invoke(cli.app, ["tune"])
    assert "a problem" in filled.output
    assert "dynaxla tune MODEL" in filled.output
    monkeypatch.setenv("DYNAXLA_CACHE", "")
    assert "dynaxla tune MODEL" in CliRunner().invoke(cli.app, ["tune"]).output
