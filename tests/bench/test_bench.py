"""The benchmark on a suite of one tiny model: it must take turns, notice what is wrong, and write down everything."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer import Typer
from typer.testing import CliRunner, Result

from dynaxla.bench import agreement, capture, engines, report, suites
from dynaxla.bench.benchmark_error import BenchmarkError
from dynaxla.bench.engines import Engine
from dynaxla.bench.measure import Row, Settings, Spread, measure, prepared_process
from dynaxla.bench.runner import Placement, Remote, RemoteError, first_line
from dynaxla.bench.session import run
from dynaxla.cli.bench import bench


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def tiny_inputs(batch: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    return (torch.randn(batch, 16, generator=generator),)


TINY = suites.Case("tiny", Tiny, tiny_inputs)
FAST = Settings(rounds=3)

app = Typer()
app.command()(bench)


def invoke(*args: str) -> Result:
    return CliRunner().invoke(app, list(args))


@pytest.fixture
def tiny_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(suites.SUITES, "tiny", [TINY])  # type: ignore[arg-type]


def wrapped(name: str, change: Callable[[torch.Tensor], Any], from_call: int = 0) -> Engine:
    """Eager mode, with a change to its results from the given call on."""

    def prepare(model: nn.Module, _: Any) -> Any:
        calls = 0

        def call(x: torch.Tensor) -> Any:
            nonlocal calls
            calls += 1
            return change(model(x)) if calls > from_call else model(x)

        return call

    return Engine(name, prepare)


def fail(_: torch.Tensor) -> torch.Tensor:
    raise ValueError("out of luck\nsecond line")


def rows_of(*chosen: Engine, settings: Settings = FAST) -> dict[str, Row]:
    return {row.engine: row for row in measure(TINY, [engines.ENGINES["eager"], *chosen], settings).rows}


def test_engines_take_turns() -> None:
    order: list[str] = []

    def recorder(name: str) -> Engine:
        def prepare(model: nn.Module, _: Any) -> Any:
            def call(x: torch.Tensor) -> Any:
                order.append(name)
                return model(x)

            return call

        return Engine(name, prepare)

    measure(TINY, [recorder("a"), recorder("b")], Settings(rounds=4, iterations_per_run=2))
    # First calls: one checked, three more. Then rounds of one untimed and two timed calls, led by another engine each time. Then the check.
    first_calls, rounds, last_check = order[:8], order[8:-2], order[-2:]
    assert first_calls == ["a"] * 4 + ["b"] * 4
    assert rounds == (["a"] * 3 + ["b"] * 3 + ["b"] * 3 + ["a"] * 3) * 2
    assert last_check == ["a", "b"]


def test_rows_have_everything() -> None:
    rows = rows_of(engines.ENGINES["dynaxla"], engines.ENGINES["dynaxla_retrace"], engines.ENGINES["dynamo"], engines.ENGINES["dynamo_aot"])
    for row in rows.values():
        assert row.good, row
        assert row.wall is not None
        assert row.wall.lower <= row.wall.median <= row.wall.upper
        assert len(row.wall_samples) == len(row.cpu_samples) == 3
        assert row.speedup == rows["eager"].wall.median / row.wall.median  # type: ignore[union-attr]
    once, again = rows["dynaxla"], rows["dynaxla_retrace"]
    assert {"capture", "trace", "lower", "compile"} <= once.first_phases.keys()
    assert sum(once.first_phases.values()) < once.first_call_seconds  # type: ignore[operator]
    assert once.traces == 0
    assert not once.call_phases
    assert again.traces == 3
    assert {"trace", "lower", "lookup", "run"} <= again.call_phases.keys()
    assert sum(again.call_phases.values()) <= max(again.wall_samples)


def test_a_failure_is_a_row() -> None:
    def cannot_prepare(*_: Any) -> Any:
        raise RuntimeError("no compiler")

    rows = rows_of(Engine("prepare", cannot_prepare), wrapped("first", fail), wrapped("later", fail, from_call=5))
    assert rows["prepare"].failure == "RuntimeError: no compiler"
    assert rows["first"].failure == "ValueError: out of luck"
    assert rows["later"].failure == "ValueError: out of luck"
    assert rows["later"].first_call_seconds is not None
    assert rows["eager"].good
    assert not any(rows[name].good or rows[name].speedup for name in ("prepare", "first", "later"))


def test_without_eager_nothing_is_right() -> None:
    class Broken(Tiny):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("never")

    rows = measure(suites.Case("broken", Broken, tiny_inputs), [engines.ENGINES["eager"]], FAST).rows
    assert rows[0].failure == "eager itself fails: ValueError: never"


@pytest.mark.parametrize(
    ("change", "detail"),
    [
        (lambda y: y + 1e-3, ""),
        (lambda y: y * float("nan"), ""),
        (lambda y: y.double(), "dtype torch.float64, eager gives torch.float32"),
        (lambda y: y[:, :2], "shape"),
        (lambda y: (y,), "structure"),
        (lambda y: None, "NoneType, eager gives a tensor"),
    ],
)
def test_a_wrong_result_is_noticed(change: Callable[[torch.Tensor], Any], detail: str) -> None:
    row = rows_of(wrapped("wrong", change))["wrong"]
    assert not row.good
    assert not row.failure
    assert row.agreement is not None
    assert detail in row.agreement.detail


def test_a_result_kept_from_the_first_input_is_noticed() -> None:
    def prepare(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> Any:
        kept = model(*inputs)
        return lambda *_: kept

    assert not rows_of(Engine("stale", prepare))["stale"].good


def test_farther_from_eager_is_right_if_eager_is_as_far_from_float64() -> None:
    reference = torch.ones(4, dtype=torch.float64)
    eager = torch.full((4,), 1.01)
    assert not agreement.compare(torch.full((4,), 0.99), eager).agrees
    assert agreement.compare(torch.full((4,), 0.99), eager, reference).agrees
    assert not agreement.compare(torch.full((4,), 0.9), eager, reference).agrees
    infinite = torch.full((4,), float("inf"))
    assert not agreement.compare(torch.full((4,), 0.9), infinite, reference).agrees
    assert agreement.compare(infinite, infinite, reference).agrees


def test_gradients_are_compared_by_their_norms() -> None:
    """A small gradient may be off by as much as if it were a hundredth of all; a large one may not."""
    large, small = torch.ones(100), torch.full((4,), 1e-6)
    edge = large.index_fill(0, torch.tensor([3]), 1.005)
    assert agreement.compare([edge, small], [large, small], gradients=True).agrees
    assert not agreement.compare([edge, small], [large, small]).agrees
    assert agreement.compare([large, -small], [large, small], gradients=True).agrees
    assert not agreement.compare([large * 1.01, small], [large, small], gradients=True).agrees
    assert not agreement.compare([large, small + 0.01], [large, small], gradients=True).agrees
    assert not agreement.compare([large, small * float("nan")], [large, small], gradients=True).agrees
    assert not agreement.compare([large, None], [large, small], gradients=True).agrees


def test_agreement_where_eager_itself_is_uncertain() -> None:
    """Inputs that move by rounding show how far a gradient may be off."""
    eager, near, far = torch.ones(4), torch.full((4,), 1.02), torch.full((4,), 1.1)
    trials = [[torch.full((4,), 1.01)], [torch.full((4,), 0.998)]]
    assert not agreement.compare([near], [eager], gradients=True).agrees
    assert agreement.compare([near], [eager], gradients=True, moved=trials).agrees
    assert not agreement.compare([far], [eager], gradients=True, moved=trials).agrees
    assert not agreement.compare([near], [eager], gradients=True, moved=[[torch.full((4,), float("inf"))]]).agrees

    class Steep(torch.nn.Module):
        def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
            return (x - 1) * tokens

    x, tokens = torch.ones(8), torch.arange(8)
    moved = agreement.moved(Steep(), (x, tokens))
    assert all(0 < float((result - Steep()(x, tokens)).abs().max()) < 1e-5 for result in moved)
    assert len({result.sum().item() for result in moved}) > 1


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_training(optimizer: str) -> None:
    """A call is a whole step; a gradient that is not eager's is noticed."""
    chosen = [engines.ENGINES["eager"], engines.ENGINES["dynaxla"], engines.ENGINES["dynaxla_separate"], engines.ENGINES["dynaxla_step"]]
    wrong = wrapped("wrong", lambda out: out + 0.01 * out.detach().sign())
    rows = measure(TINY, [*chosen, wrong], Settings(Placement(batch=4, training=optimizer), rounds=3)).rows
    assert [row.good for row in rows] == [True, True, True, True, False], rows
    assert all(row.agreement is not None and row.agreement.own_error is not None for row in rows), "nothing was compared with float64"
    assert not any(row.failure for row in rows)
    assert all(row.speedup for row in rows[:4])


def test_steps_are_for_training() -> None:
    (row,) = [row for row in measure(TINY, [engines.ENGINES["dynaxla_step"]], FAST).rows]
    assert row.failure == "BenchmarkError: the engine dynaxla_step is one for --training"
    assert invoke("--training", "--optimizer", "lion").exit_code == 2


def test_numbers_that_are_no_floats_must_be_equal() -> None:
    assert agreement.compare([torch.tensor([1, 2]), 3], [torch.tensor([1, 2]), 3]).agrees
    assert agreement.compare([torch.tensor([1, 2]), 3], [torch.tensor([1, 3]), 3]).detail == "1 of 2 elements differ"
    assert not agreement.compare([3], [4]).agrees


def test_random_inputs_are_fresh() -> None:
    seen: list[torch.Tensor] = []

    def prepare(model: nn.Module, _: Any) -> Any:
        def call(x: torch.Tensor) -> Any:
            seen.append(x)
            return model(x)

        return call

    measure(TINY, [Engine("fresh", prepare)], Settings(rounds=3, randomize_input=True))
    assert len({tuple(x.flatten().tolist()) for x in seen}) == len(seen)


def test_capture_counts_graphs_and_ops() -> None:
    with torch.no_grad():
        whole = capture.examine(Tiny().eval(), tiny_inputs(2, torch.Generator()))
        case = suites.choose("breaks", ["item"])[0]
        broken = capture.examine(case.build(), case.inputs(1, torch.Generator()))
    assert (whole.graphs, whole.graph_calls, whole.captured_share, whole.breaks) == (1, 1, 1.0, {})
    assert whole.ops_per_graph == whole.largest_graph == whole.eager_ops > 0
    assert broken.graph_calls == 2
    assert 0.9 < broken.captured_share < 1
    assert any("item()" in reason for reason in broken.breaks)


@pytest.mark.parametrize("name", [case.name for case in suites.BREAKS if case.name != "generate"])
def test_models_that_break_graphs(name: str) -> None:
    result = measure(suites.choose("breaks", [name])[0], [engines.ENGINES["dynaxla"]], Settings(rounds=1, randomize_input=True))
    assert result.rows[0].good, result.rows[0]
    assert result.captured is not None
    assert result.captured.breaks


def test_generation_stops_at_the_end_token() -> None:
    model = suites.make_model(suites.choose("breaks", ["generate"])[0], 0, torch.float32, torch.device("cpu"))
    text = torch.ones(1, 8, dtype=torch.int64)
    assert model(text).shape == (1, 28)
    model.head.bias[0] = 1e4
    assert model(text).shape == (1, 9)


def test_weights_follow_the_seed_and_batch_norms_are_settled() -> None:
    case = suites.choose("models", ["resnet18"])[0]
    first, same, other = (suites.make_model(case, seed, torch.float32, torch.device("cpu")) for seed in (0, 0, 1))
    assert all(torch.equal(a, b) for a, b in zip(first.state_dict().values(), same.state_dict().values(), strict=True))
    assert not torch.equal(first.conv1.weight, other.conv1.weight)
    assert not first.training
    x, y = suites.make_inputs(case, 1, torch.Generator().manual_seed(0), torch.float32, torch.device("cpu"))[0], torch.zeros(1, 3, 224, 224)
    assert agreement.distance(first(x), first(y)) > 0.1


def test_another_process_gives_the_same_results_and_its_memory() -> None:
    case = suites.choose("breaks", ["branch"])[0]
    placement = Placement()
    inputs = placement.inputs(case, torch.Generator().manual_seed(3))
    remote = Remote("eager", case, placement)
    try:
        with torch.no_grad():
            assert torch.equal(remote.call(inputs), placement.model(case)(*inputs))
        assert remote.time([inputs] * 2).wall_seconds > 0
        large = (torch.randn(100_000, 256),)
        memory = remote.memory([large])
        assert memory.peak_bytes > 2 * large[0].nbytes
        assert memory.kept_bytes < memory.peak_bytes
        with pytest.raises(RemoteError) as caught:
            remote.call((torch.randn(8, 3),))
        assert first_line(caught.value).startswith("RuntimeError: Given normalized_shape")
        assert torch.equal(remote.call(inputs), remote.call(inputs))
    finally:
        remote.close()


def test_files_are_written(tiny_suite: None, tmp_path: Path) -> None:
    result = invoke("--suite", "tiny", "--engines", "eager,dynaxla,dynaxla_retrace", "--rounds", "2", "--output", str(tmp_path / "new"))
    assert result.exit_code == 0, result.output
    assert "All 3 rows agree with eager." in result.output
    assert "trace at every call" in result.output
    name = "tiny-cpu-batch1-float32"
    assert {file.name for file in (tmp_path / "new").iterdir()} == {f"{name}.{kind}" for kind in ("json", "md", "png")}
    data = json.loads((tmp_path / "new" / f"{name}.json").read_text())
    assert [row["engine"] for row in data["models"][0]["rows"]] == ["eager", "dynaxla", "dynaxla_retrace"]
    assert data["geometric_means"]["eager"] == {"speedup": 1.0, "models": 1}
    assert data["models"][0]["captured"]["captured_share"] == 1.0
    assert {"torch", "jax", "cpu", "date"} <= data["environment"].keys()
    markdown = (tmp_path / "new" / f"{name}.md").read_text()
    assert re.search(r"^\| tiny \| dynaxla \| .* \| yes \|", markdown, re.MULTILINE)
    assert f"![speedups]({name}.png)" in markdown
    assert (tmp_path / "new" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_the_exit_code_tells(tiny_suite: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(engines.ENGINES, "failing", wrapped("failing", fail))
    monkeypatch.setitem(engines.ENGINES, "wrong", wrapped("wrong", lambda y: y + 1))
    for name, shown in {"failing": "failed: ValueError: out of luck", "wrong": "NO: off by"}.items():
        result = invoke("--suite", "tiny", "--engines", name, "--rounds", "1", "--output", str(tmp_path))
        assert result.exit_code == 1
        assert shown in result.output
        assert "1 of 2 rows failed or disagree" in result.output
        assert shown in (tmp_path / "tiny-cpu-batch1-float32.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "known"),
    [
        (("--models", "resnet19"), "resnet18, resnet50"),
        (("--only", "resnet18,nothing", "--only", "none"), "'none', 'nothing'"),
        (("--suite", "every"), "models, small, functions, breaks"),
        (("--engines", "tensorrt"), "eager, inductor, torchscript"),
        (("--engines", "torch_xla"), "torch_xla is not installed"),
        (("--baseline", "speed"), "eager, inductor"),
        (("--dtype", "float8"), "float32, bfloat16, float16, float64"),
        (("--device", "abacus"), "cpu, cuda"),
        (("--device", "meta"), "cpu, cuda"),
        (("--device", "cuda:99"), "CUDA devices"),
        (("--output", "/dev/null/here"), "cannot write"),
    ],
)
def test_unknown_names_are_errors(arguments: tuple[str, ...], known: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynaxla.bench.session.run", None)
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert known in result.output


def test_an_engine_that_cannot_be_used_is_left_out_unless_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(engines.ENGINES, "inductor", Engine("inductor", lambda model, _: model, lambda: "no compiler"))
    chosen, notes = engines.choose([], engines.QUICK)
    assert [engine.name for engine in chosen] == ["eager", "dynaxla", "dynaxla_retrace"]
    assert notes == ["inductor left out: no compiler"]
    with pytest.raises(BenchmarkError, match="no compiler"):
        engines.choose(["inductor"], [])


def test_means_are_of_good_rows_only() -> None:
    def row(model: str, engine: str, milliseconds: float, agrees: bool = True) -> Row:
        spread = Spread(milliseconds, milliseconds, milliseconds)
        return Row(model, engine, wall=spread, agreement=agreement.Agreement(agrees))

    from dynaxla.bench.measure import ModelResult

    found = report.Report("tiny", Settings(), ["eager", "dynaxla"])
    found.models = [
        ModelResult("a", [row("a", "eager", 8), row("a", "dynaxla", 1)]),
        ModelResult("b", [row("b", "eager", 2), row("b", "dynaxla", 1)]),
        ModelResult("c", [row("c", "eager", 100), row("c", "dynaxla", 1, agrees=False)]),
    ]
    mean = found.geometric_mean("dynaxla", "eager")
    assert mean is not None
    assert mean[0] == pytest.approx(4.0)
    assert mean[1] == 2
    assert found.geometric_mean("dynaxla", "inductor") is None


def test_an_interrupted_run_reports_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    found = run([TINY, suites.Case("late", interrupt, tiny_inputs)], [engines.ENGINES["eager"]], FAST, "tiny")
    assert [model.model for model in found.models] == ["tiny"]
    assert any("1 of 2 models" in note for note in found.notes)


def test_the_process_is_left_as_it_was() -> None:
    threads = torch.get_num_threads()
    with prepared_process(2) as notes:
        assert torch.get_num_threads() == 2
    assert torch.get_num_threads() == threads
    assert not notes, "nothing to say unless the environment sizes XLA's pools"


def test_the_first_line_is_of_the_real_error() -> None:
    def backend(*_: Any) -> Any:
        raise ValueError("\nthe reason\nmore")

    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    assert first_line(caught.value) == "ValueError: the reason"
    assert len(first_line(ValueError("x" * 1000))) == 200
