"""The conformance suite on chosen calls of op_db and on a seeded sample of the other cases, and tests of the suite itself: it finds planted
faults, and its runs survive crashes and continue.
"""

from __future__ import annotations

import functools
import json
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import pytest
import torch

from cases.conformance import __main__ as command
from cases.conformance import judge, pool, telling
from cases.conformance.calls import Call, copy_tensors
from cases.conformance.device_suite import DeviceRunner
from cases.conformance.entries import Case, Trial, cases, entries, trials
from cases.conformance.expected import EXPECTED, Expected, by_case
from cases.conformance.report import Summary, coverage_page, load
from cases.conformance.trial import Outcome, Run, Runner, quiet, run_together
from cases.conformance.worker import run_case
from support import internals
from support.releases import IS_OLDEST

SEED, CASES, SAMPLES = 3, 30, 3


@pytest.fixture(autouse=True)
def quietly() -> Iterator[None]:
    """The databases use deprecated functions on purpose."""
    with warnings.catch_warnings():
        quiet()
        yield


# Ops that fail in torch 2.11 itself: its shape functions of Fourier transforms have other strides than its kernels, and TorchDynamo traces
# neither quantiles nor splits of an empty tensor.
FAIL_IN_OLDEST = ("fft.", "quantile", "nanquantile", "split", "unsafe_split")


def _in_this_torch(group: Sequence[telling.Candidate]) -> Sequence[telling.Candidate]:
    """Returns the calls that this release of torch has. Releases older than that of telling.txt lack calls, newer ones lack ops."""
    group = [item for item in group if item[0].name in entries(item[0].database)]
    if not IS_OLDEST:
        return group
    return [item for item in group if not item[0].name.startswith(FAIL_IN_OLDEST) and telling.is_there(*item)]


TELLING = [
    pytest.param(group, marks=[pytest.mark.slow] if further else [], id=f"{group[0][0]}-{group[0][1]}")
    for further in (False, True)
    for group in telling.groups(further)
]


@pytest.mark.sample(usual=10)
@pytest.mark.parametrize("group", TELLING)
def test_chosen_calls_agree_with_eager_mode(group: Sequence[telling.Candidate]) -> None:
    group = _in_this_torch(group)
    calls = [telling.call_of(*item) for item in group]
    failures = [
        f"{case}, call {number}: {outcome}: {trial.call.describe()}"
        for (case, number), (_, trial), outcome in zip(group, calls, run_together(calls), strict=True)
        if outcome.verdict != "pass"
    ]
    assert not failures, "\n".join(failures)


@functools.cache
def _sample() -> list[Case]:
    """Returns a sample of the cases whose calls are not in telling.txt."""
    expected = by_case()
    candidates = [case for case in cases() if str(case) not in expected and not telling.is_of(case) and case.kind != "changed_numbers"]
    return random.Random(SEED).sample(candidates, CASES)


@pytest.mark.sample(usual=15)
@pytest.mark.parametrize("index", range(CASES))
def test_sample_of_the_databases(index: int) -> None:
    _check_case(_sample()[index])


def _check_case(case: Case) -> None:
    result = run_case(case, SAMPLES)
    assert not result["failed"], f"{case}: {json.dumps(result['examples'], indent=2)}"


@functools.cache
def _sample_of_refused() -> list[Case]:
    expected = by_case()
    return random.Random(SEED).sample([case for case in cases() if case.kind == "changed_numbers" and str(case) not in expected], CASES)


@pytest.mark.parametrize("index", range(CASES))
def test_refused_calls_are_refused_when_compiled(index: int) -> None:
    """`make conformance ARGS="--kind error_inputs,changed_numbers"` runs all such cases."""
    _check_case(_sample_of_refused()[index])


# Planted faults. Each backend below runs the graph in eager mode, then changes the result or the inputs.

Graph = Callable[..., Any]


def _outcome(function: Callable[..., Any], *args: Any, spoil: Callable[[Graph], Graph]) -> Outcome:
    def backend(module: torch.fx.GraphModule, _: Sequence[Any]) -> Graph:
        return spoil(module.forward)

    return Runner(judge.default_tolerance, backend=backend).run(Trial(Call.of(function, args, {})))


def _changed_result(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Graph], Graph]:
    return lambda graph: lambda *tensors: tuple(change(result) for result in graph(*tensors))


def _on_copies(graph: Graph) -> Graph:
    return lambda *tensors: graph(*copy_tensors(tensors))


def _overwriting_an_input(graph: Graph) -> Graph:
    def run(*tensors: torch.Tensor) -> Any:
        results = graph(*tensors)
        tensors[0].zero_()
        return results

    return run


PLANTED: dict[str, tuple[Callable[..., Any], Callable[[Graph], Graph], str]] = {
    "nothing": (torch.sin, lambda graph: graph, ""),
    "value": (torch.sin, _changed_result(lambda x: x + 1e-3), "wrong value"),
    "one value": (torch.sin, _changed_result(lambda x: x.index_fill(0, torch.tensor(0), 0.0)), "wrong value"),
    "a NaN": (torch.sin, _changed_result(lambda x: x.index_fill(0, torch.tensor(0), torch.nan)), "wrong value"),
    "a lost NaN": (torch.log, _changed_result(lambda x: x.nan_to_num(0.0)), "wrong value"),
    "dtype": (torch.sin, _changed_result(torch.Tensor.double), "wrong dtype"),
    "shape": (torch.sin, _changed_result(lambda x: x[:1]), "wrong shape"),
    "stride": (torch.sin, _changed_result(lambda x: x.t().contiguous().t()), "wrong stride"),
    "conjugate bit": (torch.resolve_conj, _changed_result(lambda x: x.conj_physical().conj()), "wrong bits"),
    "lost mutation": (torch.Tensor.sin_, _on_copies, "wrong aliasing"),
    "lost mutation, nothing returned": (lambda x: [x.sin_(), None][1], _on_copies, "wrong value"),
    "needless mutation": (torch.sin, _overwriting_an_input, "wrong value"),
    "lost alias": (lambda x: x[1:], _changed_result(torch.clone), "wrong aliasing"),
    "needless alias": (torch.clone, lambda graph: lambda *tensors: tuple(tensors), "wrong aliasing"),
    "other object": (lambda x: x.sin_(), _changed_result(lambda x: x.view(x.shape)), "wrong aliasing"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_fault_is_found(name: str) -> None:
    function, spoil, label = PLANTED[name]
    argument = torch.randn(3, 4, dtype=torch.complex64 if name == "conjugate bit" else torch.float32)
    outcome = _outcome(function, argument, spoil=spoil)
    assert (outcome.verdict, outcome.label) == (("fail", label) if label else ("pass", ""))


@pytest.mark.parametrize("kind", ["samples", "noncontiguous", "out", "inplace", "gradients"])
def test_wrong_lowering_is_found(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _spoil(monkeypatch, torch.ops.aten.atan.default, lambda x: jax.numpy.arctan(x) * 1.001)
    result = run_case(Case("op_db", "atan", "float64", kind), 2)
    assert set(result["failed"]) == {"wrong value"}


def test_wrong_backward_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    _spoil(monkeypatch, torch.ops.aten.cos.default, lambda x: jax.numpy.cos(x) * 1.001)
    result = run_case(Case("op_db", "sin", "float64", "gradients"), 1)
    assert set(result["failed"]) == {"wrong value"}


def test_lowering_of_another_dtype_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    _spoil(monkeypatch, torch.ops.aten.atan.default, lambda x: jax.numpy.arctan(x).astype("float16"))
    result = run_case(Case("op_db", "atan", "float32", "samples"), 1)
    assert set(result["failed"]) == {"raises:LoweringError"}


def test_accepted_error_input_is_found() -> None:
    runner = Runner(judge.default_tolerance, backend=lambda module, _: lambda *tensors: (tensors[0],))
    rejected = torch.full((2,), 9)
    outcome = runner.run(Trial(Call.of(torch.gather, (torch.randn(2), 0, rejected), {}), expects_error=True))
    assert outcome.label == "wrong acceptance"


def test_wrong_random_distribution_is_found() -> None:
    wide = torch.empty(1000)
    assert _outcome(torch.rand_like, wide, spoil=lambda graph: graph).verdict == "pass"
    assert _outcome(torch.rand_like, wide, spoil=_changed_result(lambda x: x * 2)).label == "wrong value"
    assert _outcome(torch.rand_like, wide, spoil=_changed_result(torch.zeros_like)).label == "wrong value"


def _spoil(monkeypatch: pytest.MonkeyPatch, op: torch._ops.OpOverload, function: Callable[..., Any]) -> None:
    internals.replace_lowering(monkeypatch, op, function)


# Tolerances.


def _values(actual: Any, expected: Any, wide: Any = None) -> judge.Difference | None:
    dtype = torch.float32
    reference = None if wide is None else [torch.tensor(wide, dtype=torch.float64)]
    return judge.values(
        [torch.tensor(actual, dtype=dtype)], [torch.tensor(expected, dtype=dtype)], judge.default_tolerance, lambda: reference
    )


def test_result_nearer_to_the_reference_than_eager_passes() -> None:
    assert _values([1.0, 2.0], [1.1, 2.0]) is not None
    assert _values([1.0, 2.0], [1.1, 2.0], [1.0, 2.0]) is None
    assert _values([1.2, 2.0], [1.1, 2.0], [1.0, 2.0]) is not None


def test_non_finite_results_must_agree_with_eager_or_the_reference() -> None:
    inf, nan = float("inf"), float("nan")
    assert _values([nan, inf], [nan, inf], [0.0, 0.0]) is None
    assert _values([1.0], [nan], [1.0]) is None
    assert _values([2.0], [nan], [1.0]) is not None
    assert _values([inf], [-inf], [-inf]) is not None
    assert _values([nan], [1.0], [1.5]) is not None
    assert _values([inf], [3e38], [1e39]) is None


def test_any_order_of_equal_values_passes_but_no_wrong_index() -> None:
    case = Case("op_db", "topk", "float32", "samples")
    trial = next(iter(trials(case)))
    trial.call = Call.of(torch.topk, (torch.tensor([1.0, 1.0, 0.0]), 1), {})
    trial.unique = lambda result, source: [result[0], source.gather(0, result[1])]

    def index_of(index: int) -> Callable[[Graph], Graph]:
        return lambda graph: lambda *tensors: (graph(*tensors)[0], torch.tensor([index]))

    for index, verdict in ((0, "pass"), (1, "pass"), (2, "fail")):
        runner = Runner(judge.default_tolerance, backend=lambda module, _, index=index: index_of(index)(module.forward))
        assert runner.run(trial).verdict == verdict


def test_uninitialised_values_on_the_cpu_are_not_compared() -> None:
    runner = DeviceRunner(judge.default_tolerance)
    empty = torch.empty(0, 10), torch.empty(0, dtype=torch.long)  # torch's kernel does not write the loss of empty inputs
    uninitialised, product = Call.of(torch.nn.functional.multi_margin_loss, empty, {}), Call.of(torch.mul, (torch.tensor(1.0), 2), {})
    for call, is_difference in ((uninitialised, False), (product, True)):
        actual, expected = (Run(call.tensors, torch.tensor(value), None, False) for value in (3.0, 2.0))
        assert isinstance(runner.compare(Trial(call), actual, expected), judge.Difference) == is_difference


# Calls as source text.


def test_call_is_written_as_source() -> None:
    x = torch.ones(2)
    call = Call.of(torch.add, (x, [x, 1.5], float("inf")), {"dim": (0,), "dtype": torch.float32, "key": x.device})
    assert call.text == "op(t0, [t0, 1.5], inf, dim=(0, ), dtype=torch.float32, key=c0)"
    assert call.widened().text == "op(t0, [t0, 1.5], inf, dim=(0, ), dtype=torch.float64, key=c0)"


def test_copies_keep_storages_strides_and_bits() -> None:
    base = torch.randn(4, 4, dtype=torch.complex64)
    tensors = [base, base[1:].t(), base.conj(), base.imag]
    copies = copy_tensors(tensors)
    for copied, original in zip(copies, tensors, strict=True):
        assert torch.equal(copied, original)
        assert (copied.stride(), copied.storage_offset()) == (original.stride(), original.storage_offset())
        assert (copied.is_conj(), copied.is_neg()) == (original.is_conj(), original.is_neg())
    assert len({copied.untyped_storage().data_ptr() for copied in copies}) == 1
    assert copies[0].data_ptr() != base.data_ptr()


# Expected failures and the summary.


def _result(case: Case, **changes: Any) -> dict[str, Any]:
    blank = {"case": str(case), "passed": 1, "skipped": {}, "failed": {}, "notes": {}, "examples": {}}
    return blank | {"executed": ["aten.sin.default"], "fallback": [], "complete": True, "seconds": 0.0} | changes


SIN = Case("op_db", "sin", "float32", "samples")
RAISES = Expected("op_db", "sin", ("float32",), ("samples",), "UnsupportedOp", "a reason")


def test_expected_failure_is_strict() -> None:
    raising, other, wrong = ({"failed": {label: 1}} for label in ("raises:UnsupportedOp", "raises:LoweringError", "wrong value"))
    assert Summary([_result(SIN, **raising)], [RAISES]).good
    assert not Summary([_result(SIN, **raising)], []).good
    assert not Summary([_result(SIN, **other)], [RAISES]).good
    assert not Summary([_result(SIN, **wrong)], [RAISES]).good
    assert Summary([_result(SIN)], [RAISES]).unexpected_passes == [str(SIN)]
    assert Summary([_result(SIN, complete=False)], [RAISES]).good


def test_expected_failures_exist() -> None:
    known = {str(case) for case in cases()}
    assert [case for case in by_case(EXPECTED) if case not in known] == []


def test_summary_counts_an_entry_once_for_each_dtype() -> None:
    failing = Case("op_db", "sin", "float64", "out")
    results = [_result(SIN), _result(failing, failed={"wrong stride": 2}), _result(Case("op_db", "sin", "float64", "samples"))]
    results += [_result(Case("op_db", "nonzero", "float32", "samples"), passed=0, skipped={"torch.compile raises Unsupported": 3})]
    summary = Summary(results, [])
    states = {(entry.name, entry.dtype): entry.state for entry in summary.entries.values()}
    assert states == {("sin", "float32"): "passes", ("sin", "float64"): "fails", ("nonzero", "float32"): "empty"}
    assert "calls: 8; passed 3, failed 2, skipped 3" in summary.text()
    page = coverage_page(summary)
    assert "| sin | lowering | f32 | f64: wrong stride |" in page
    assert "| nonzero | decomposition |  | f32: torch.compile raises Unsupported |" in page


# Runs resume, and continue after a worker crashes or hangs.

HANGS = 5
STUB = (
    f"HANGS = {HANGS}"
    + """
import json, os, sys, time
answers = os.fdopen(int(sys.argv[1]), "w", buffering=1)
say = lambda **message: answers.write(json.dumps(message) + "\\n")
say(ready=True)
for line in sys.stdin:
    request = json.loads(line)
    name = request["case"][1]
    say(sample=4)
    if name == "crash":
        os.abort()
    if name == "hang":
        say(sample=HANGS)
        time.sleep(3600)
    result = dict.fromkeys(("skipped", "failed", "notes", "examples"), {}) | dict.fromkeys(("executed", "fallback"), [])
    result |= {"passed": 1, "complete": request["max_samples"] is None}
    say(case="/".join(request["case"]), kilobytes=0, pid=os.getpid(), **result)
"""
)


def _stub() -> tuple[str, ...]:
    return (sys.executable, "-c", STUB)


def test_crash_and_hang_fail_their_case_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the worker that announces that it hangs has a short time limit: the time of the others depends on the machine's load."""
    receive, will_hang = pool.Worker._receive, [False]

    def receive_patiently(worker: pool.Worker, _: float) -> dict[str, Any]:
        message = receive(worker, 0.1 if will_hang[0] else 600)
        will_hang[0] = message.get("sample") == HANGS
        return message

    def start_without_limit(worker: pool.Worker) -> None:
        will_hang[0] = False
        start(worker)

    start = pool.Worker._start
    monkeypatch.setattr(pool.Worker, "_receive", receive_patiently)
    monkeypatch.setattr(pool.Worker, "_start", start_without_limit)
    wanted = [Case("op_db", name, "float32", "samples") for name in ("first", "crash", "second", "hang", "third", "fourth")]
    results: list[dict[str, Any]] = []
    pool.run_all(wanted, 1, results.append, max_samples=None, together=1, silence_seconds=1, log=tmp_path / "log", command=_stub())
    assert [result.get("failed") for result in results] == [{}, {"crashes": 1}, {}, {"hangs": 1}, {}, {}]
    assert results[1]["examples"]["crashes"] == {"sample": "4", "message": "SIGABRT"}
    processes = [result["pid"] for result in results if "pid" in result]
    assert len(set(processes)) == 3
    assert processes[2] == processes[3]


FEW = ["--db", "op_db", "--dtype", "bool", "--kind", "samples", "--match", "^(neg|logical_not|view)$"]


def test_run_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "COMMAND", _stub())
    results = tmp_path / "results.jsonl"
    assert command.main([*FEW, "--results", str(results)]) == 0
    lines = results.read_text().splitlines(keepends=True)
    assert len(lines) == 2
    results.write_text(lines[0] + lines[1][:20])  # as if the run had been killed while it wrote
    assert command.main([*FEW, "--results", str(results)]) == 0
    assert "2 cases, 1 of them known" in capsys.readouterr().out
    assert len(load(results)) == 2
    assert command.main([*FEW, "--results", str(results), "--max-samples", "1", "--fresh"]) == 0
    assert command.main([*FEW, "--results", str(results)]) == 0
    assert "2 cases, 2 of them known" not in capsys.readouterr().out
    assert all(result["complete"] for result in load(results).values())


@pytest.mark.thorough
def test_worker_compiles_and_counts_ops(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    assert command.main([*FEW[:-1], "^logical_not$", "--results", str(results)]) == 0
    (result,) = load(results).values()
    assert result["passed"] > 0
    assert result["executed"] == ["aten.logical_not.default"]
