"""`dynaxla ops`: what it takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from dynaxla import cli
from dynaxla.cli import op_table
from dynaxla.cli.ops import divided
from dynaxla.observe import coverage as observed


def test_ops_by_name() -> None:
    result = CliRunner().invoke(cli.app, ["ops", "cumsum*", "unique_dim"])
    assert result.exit_code == 0
    assert "aten.cumsum.default" in result.output
    assert "scans:" in result.output
    assert "kernel" in result.output
    missing = CliRunner().invoke(cli.app, ["ops", "no_such_op"])
    assert missing.exit_code == 2
    assert "no op matches" in missing.output


def test_ways_are_those_of_the_platform_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    way = op_table.Way(torch.ops.aten.cumsum.default, "kernel")
    monkeypatch.setattr(op_table, "ways", lambda platform: asked.append(platform) or [way])
    named = CliRunner().invoke(cli.app, ["ops", "cumsum", "--platform", "tpu"]).output
    counted = CliRunner().invoke(cli.app, ["ops", "--platform", "rocm"]).output
    assert asked == ["tpu", "rocm"]
    assert "aten.cumsum.default" in named
    assert "aten.cumsum.default" not in counted
    assert "together" in counted


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
