"""Tests of the benchmark that compares functions of `to_jax` with handwritten JAX code."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import pytest
from benchmarks.versus_jax import CASES, Measured
from jax import numpy as jnp
from typer.testing import CliRunner

from benchmarks import versus_jax
from dynaxla.cli import app
from support.processes.scripts import run_script
from support.timing import quick_compilation


def test_names() -> None:
    assert list(CASES) == ["mlp", "resnet18", "gpt_block"]


# Runs in a process with quick compilation by XLA: the test does not check the compiled code.
SCRIPT = """
import json, sys
from benchmarks import versus_jax
versus_jax._ROUNDS = 1
for name in sys.argv[1:]:
    case = versus_jax.CASES[name]
    shape = (1, 3, 64, 64) if name == "resnet18" else (2, *case.shape[1:])
    print(json.dumps([name, versus_jax.measure(versus_jax.Case(case.build, case.by_hand, shape), seconds=0)]))
"""


@pytest.mark.thorough
@pytest.mark.parametrize("names", [["mlp", "gpt_block"], pytest.param(["resnet18"], marks=pytest.mark.slow)], ids=" ".join)
def test_handwritten_models_give_the_same_results(names: list[str]) -> None:
    """The large model: `pytest -m slow tests/benchmarks/test_versus_jax.py`."""
    results = dict(map(json.loads, run_script(SCRIPT, names, XLA_FLAGS=quick_compilation.flags()).splitlines()))
    assert list(results) == names
    assert versus_jax.is_good(results)
    for measured in results.values():
        assert measured.keys() == {"inference", "gradient"}
        assert all(item["ratio"] > 0 for item in measured.values())


def test_wrong_result_is_detected() -> None:
    wrong = versus_jax._compared(jax.jit(lambda x: x), jax.jit(lambda x: 1.1 * x), (jnp.ones(3),), 0)
    assert wrong.distance == pytest.approx(0.1, rel=1e-3)
    assert not versus_jax.is_good({"wrong": {"inference": vars(wrong)}})


def test_the_command_writes_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    item = vars(Measured(2.0, 2.08, 1.04, 1e-6))
    monkeypatch.setattr(versus_jax, "measure", lambda *_: {"inference": item})
    done = CliRunner().invoke(app, ["bench-cpu", "interop", "--models", "mlp", "--output", str(tmp_path)])
    assert done.exit_code == 0
    assert "2.080" in (tmp_path / "cpu.md").read_text()
    assert CliRunner().invoke(app, ["bench-cpu", "interop", "--models", "absent", "--output", str(tmp_path)]).exit_code == 2
