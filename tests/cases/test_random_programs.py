"""Random programs agree with eager mode. Their generator is repeatable, avoids undefined results, and finds planted faults."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from cases.faults.ops import FAULTS
from cases.random_programs import fault_search, runner
from cases.random_programs.__main__ import main
from cases.random_programs.builder import Builder
from cases.random_programs.choices import HypothesisChoices, SeededChoices
from cases.random_programs.generator import draw_program, generate
from cases.random_programs.judge import judge
from cases.random_programs.minimise import minimise
from cases.random_programs.observed import expect
from cases.random_programs.program import Input, Program, Step, Storage, reproducer
from cases.random_programs.stepwise import Rejected

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

# Faults of several kinds, each of which few programs suffice to find.
QUICKLY_FOUND = [
    "mutation_of_an_input_is_lost",
    "alias_of_an_input_is_a_copy",
    "result_is_contiguous",
    "view_of_a_result_starts_at_its_beginning",
    "parameter_is_stale",
    "gaps_are_read",
    "write_through_strides_is_lost",
]


@settings(max_examples=12)
@given(st.data())
def test_random_programs_agree_with_eager_mode(data: st.DataObject) -> None:
    try:
        program, expected = draw_program(HypothesisChoices(data.draw))
    except Rejected:
        reject()
    verdict = judge(program, expected)
    assert verdict.outcome in ("agrees", "torch"), f"{verdict.detail}\n{reproducer(program)}"


@pytest.mark.sample(usual=1)
@pytest.mark.quick
@pytest.mark.parametrize("first", range(100, 220, 20))
def test_seeded_programs_agree_with_eager_mode(first: int, quick_xla: None) -> None:
    for seed in range(first, first + 20):
        program, expected = generate(seed)
        verdict = judge(program, expected)
        assert verdict.outcome in ("agrees", "torch"), f"{verdict.detail}\n{reproducer(program)}"


def test_a_seed_gives_the_same_program_every_time() -> None:
    for seed in (3, 4, 5):
        first, second = generate(seed)[0], generate(seed)[0]
        assert first is not second
        assert first == second
    assert generate(3)[0] != generate(4)[0]


@pytest.mark.parametrize("first", [20, 40])
def test_printed_program_has_the_observed_results(first: int) -> None:
    """The calls of the reproducer are the observed calls."""
    for seed in range(first, first + 15):
        program, expected = generate(seed)
        namespace: dict[str, Any] = {}
        with contextlib.redirect_stdout(io.StringIO()):
            exec(reproducer(program).replace("('eager', 'dynaxla')", "('eager',)"), namespace)
        if program.is_random:
            continue
        for result, call in zip(namespace["results"], expected.calls, strict=True):
            for index, actual in enumerate(result[4] if program.mode == "train" else []):
                _assert_same(actual, call.values[f"gradient {index}"])
        # Later calls may have changed the memory of earlier results.
        for index, actual in enumerate(pytree.tree_leaves(namespace["results"][-1][2])):
            _assert_same(actual, expected.calls[-1].values[f"result {index}"])


def _assert_same(actual: torch.Tensor | None, expected: torch.Tensor | None) -> None:
    assert (actual is None) == (expected is None)
    if actual is not None and expected is not None:
        torch.testing.assert_close(actual.detach().resolve_conj().resolve_neg(), expected, equal_nan=True)


def _program(*steps: Step, values: str = "whole", outputs: tuple[int, ...] = (1,)) -> Program:
    return Program((Storage(torch.float32, 6, values, 0),), (Input(0, (2, 3), (3, 1)),), steps, outputs)


def test_results_that_depend_on_rounding_are_refused() -> None:
    exact = [Step("mul", "$0 * 0.5", (0,)), Step("floor", "$0.floor()", (1,))]
    assert expect(_program(*exact, outputs=(2,)))
    inexact = [Step("div", "$0 / 3", (0,)), Step("mul", "$0 * 3", (1,)), Step("floor", "$0.floor()", (2,))]
    with pytest.raises(Rejected, match=r"rounded|inexactly"):
        expect(_program(*inexact, outputs=(3,)))


@pytest.mark.parametrize(
    "step",
    [
        Step("to", "$0.to(torch.int8)", (0,), requires="$0.abs().lt(1).all()"),
        Step("log", "($0 - 10).log()", (0,)),
        Step("add_", "$0.t().add_($1)", (0, 0), writes=True),
    ],
    ids=lambda step: step.op,
)
def test_undefined_results_are_refused(step: Step) -> None:
    with pytest.raises(Rejected):
        expect(_program(step, outputs=(0,)))


def test_nans_repeat_under_the_same_seed() -> None:
    """Also complex NaNs, in memory with a random part."""
    inputs = (Input(0, (6, 2), (2, 1)), Input(0, (2,), (1,), 12))
    steps = (Step("normal_", "$0.normal_()", (1,), writes=True, random=True), Step("view_as_complex", "torch.view_as_complex($0)", (0,)))
    program = Program((Storage(torch.float32, 14, "special", 0),), inputs, steps, outputs=(3,))
    assert "nan" in str(program.storages[0].values(0))
    assert judge(program, expect(program)).outcome == "agrees"


def test_writes_to_overlapping_memory_are_refused() -> None:
    program = _program(Step("slice", "$0[:, 1:]", (0,)), Step("slice", "$0[:, :2]", (0,)))
    builder = Builder(SeededChoices(0), program)
    assert not builder.append(Step("add_", "$0.add_($1)", (1, 2), writes=True))
    assert builder.append(Step("add_", "$0.add_($1)", (1, 1), writes=True))


def test_every_step_can_be_drawn() -> None:
    """Some program accepts each step of the tables."""
    from cases.random_programs.builder import NoneFits
    from cases.random_programs.generator import draw_inputs
    from cases.random_programs.registry import FAMILIES

    undrawn = {(family, name) for family, table in FAMILIES.items() for name in table}
    for seed in range(600):
        choices = SeededChoices(seed)
        builder = Builder(choices, draw_inputs(choices, "plain"))
        for family, name in sorted(undrawn):
            with contextlib.suppress(NoneFits):
                if builder.append(FAMILIES[family][name](builder)):
                    undrawn.discard((family, name))
        if not undrawn:
            return
    assert not undrawn


@pytest.mark.thorough
def test_planted_faults_are_found(quick_xla: None) -> None:
    programs = fault_search.Programs([46, *range(100)])  # no program before 46 has a view as one of the faults needs
    for name in QUICKLY_FOUND:
        assert fault_search.find(FAULTS[name], programs), name


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_every_planted_fault_is_found(name: str) -> None:
    assert fault_search.find(FAULTS[name], fault_search.Programs(runner.seeds(0, 2000)))


def test_failing_program_is_minimised() -> None:
    steps = [
        Step("neg", "-$0", (0,)),
        Step("remainder", "$0 % 2", (1,)),
        Step("exp", "$0.exp()", (1,)),
        Step("t", "$0.t()", (2,)),
    ]
    program = _program(*steps, outputs=(0, 2, 3, 4))
    with FAULTS["remainder_has_the_dividends_sign"]():
        verdict = judge(program, expect(program))
        assert verdict.outcome == "disagrees"
        small = minimise(program, verdict)
    assert [step.op for step in small.steps] == ["remainder"]
    assert len(small.outputs) == 1


@pytest.mark.thorough
def test_interrupted_run_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The last line of an interrupted run may be incomplete."""
    monkeypatch.setattr(runner, "seeds", lambda first, count: range(first, first + count))
    results = tmp_path / "results.jsonl"
    arguments = ["--seed", "11", "--results", str(results)]
    assert main(["--count", "2", *arguments]) == 0
    complete = results.read_text()
    with results.open("a") as file:
        file.write('{"seed": 13, "outc')
    assert main(["--count", "3", *arguments]) == 0
    assert "3 programs, 2 of them known" in capsys.readouterr().out
    assert results.read_text().startswith(complete)
    assert sorted(runner.load(results)) == [11, 12, 13]
