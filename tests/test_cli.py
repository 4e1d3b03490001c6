"""The command `dynaxla`."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import torch
from typer.testing import CliRunner

import dynaxla
from dynaxla import cli
from dynaxla.observe import ops as observed
from dynaxla.ops import ways


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
