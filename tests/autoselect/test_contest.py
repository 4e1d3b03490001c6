"""Tests of the contest of engines.

Engines with planted errors are never chosen, inputs are as eager mode leaves them, and the fastest engine is stored.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dynaxla
from dynaxla.autoselect import contest
from dynaxla.errors import OptionError
from dynaxla.observe import engine_decisions, metrics
from support import internals
from support.fakes import wrong_engines


@pytest.fixture(autouse=True)
def engines() -> Iterator[None]:
    """Registers the engines of `wrong_engines` during a test, and clears the verdicts of earlier tests."""
    engine_decisions.reset()
    with wrong_engines.planted(**wrong_engines.ENGINES):
        yield


def compiled(function: Any, *engines: str, **settings: Any) -> Any:
    """Returns the function compiled with dynaxla_auto, for dynaxla and the given engines.

    Args:
        function: the function or module.
        engines: the names of the engines that compete with dynaxla.
        settings: arguments of torch.compile, and `cache`, the folder of stored choices. Without `cache`, no choice is stored.
    """
    options = {"engines": ["dynaxla", *engines], "cache": settings.pop("cache", "")}
    return torch.compile(function, backend="dynaxla_auto", options=options, **settings)


def call_until_verdict(call: Callable[[], None], count: int = 1, max_calls: int = 800) -> dict[str, Any]:
    """Calls a function until there are `count` verdicts, and twice more. Returns the last verdict.

    Raises: AssertionError if there are fewer verdicts after `max_calls` calls.
    """
    for _ in range(max_calls):
        call()
        if len(engine_decisions.verdicts()) >= count:
            call()
            call()
            return engine_decisions.verdicts()[-1]
    raise AssertionError(f"fewer than {count} verdicts after {max_calls} calls: {engine_decisions.verdicts()}")


def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x @ w).relu()


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        ("planted_always", "it is wrong: the results differ"),
        ("planted_wider", "torch.float64"),
        ("planted_transposed", "it is wrong: result 0 has strides"),
        ("planted_writes_inputs", "it writes to input 0"),
        ("planted_fails", "it failed: RuntimeError: no such luck"),
        ("planted_cannot_compile", "it cannot compile the graph: NotImplementedError: nothing of the kind"),
    ],
)
def test_a_wrong_engine_is_not_chosen(engine: str, reason: str) -> None:
    x, w = torch.randn(4, 6), torch.randn(6, 5)
    before = x.clone()
    call = compiled(product, engine, "eager")
    verdict = call_until_verdict(lambda: torch.testing.assert_close(call(x, w), product(x, w)))
    assert verdict["chosen"] in ("dynaxla", "eager")
    assert reason in verdict["left_out"][engine]
    assert torch.equal(x, before)


def test_slow_engine_is_not_chosen() -> None:
    x, w = torch.randn(4, 6), torch.randn(6, 5)
    call = compiled(product, "planted_slow", "eager")
    verdict = call_until_verdict(lambda: torch.testing.assert_close(call(x, w), product(x, w)))
    assert verdict["chosen"] != "planted_slow"
    assert verdict["seconds"]["planted_slow"] > 0.002
    assert verdict["seconds"][verdict["chosen"]] == min(verdict["seconds"].values())
    assert verdict["phase"] == "inference"


@pytest.mark.parametrize(("slower", "max_calls"), [(1.05, 600), (3.0, 100)])
def test_the_fastest_engine_is_chosen_on_a_noisy_machine(slower: float, max_calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates a machine that is up to 30 % slower for several calls in a row."""
    for seed in range(60):
        dice, clock, other_work = random.Random(seed), [0.0], [1.0]
        internals.clock_of_contests(monkeypatch, lambda _, clock=clock: clock[0])

        def engine(seconds: float, dice: Any = dice, clock: Any = clock, other_work: Any = other_work) -> Any:
            def run(x: torch.Tensor) -> list[torch.Tensor]:
                if dice.random() < 0.1:
                    other_work[0] = 1 + dice.uniform(0, 0.3)
                clock[0] += seconds * other_work[0]
                return [x + 1]

            return run

        engines = {"dynaxla": engine(1e-3 * slower), "other": engine(1e-3), "eager": engine(4e-3)}
        trial = contest.Contest(f"graph {seed}", engines["eager"], engines, {}, torch.device("cpu"), False)
        calls = 0
        while not trial.serving and calls < max_calls:
            trial.call((), [torch.ones(2)])
            calls += 1
        assert trial.serving == {(): engines["other"]}, (seed, calls)


def test_an_engine_that_is_wrong_for_a_new_size_is_excluded() -> None:
    """The engine is right for 4 rows and wrong for any other number of rows."""
    w = torch.randn(6, 5)
    call = compiled(product, "planted_other_sizes", dynamic=True)
    for rows in [4] * 60 + [7] * 60 + [4] * 5:
        x = torch.randn(rows, 6)
        torch.testing.assert_close(call(x, w), product(x, w))
    last = engine_decisions.verdicts()[-1]
    assert last["chosen"] == "dynaxla"
    assert "it is wrong" in last["left_out"]["planted_other_sizes"]


def test_chosen_engine_with_a_later_error_is_replaced_by_the_next_best(monkeypatch: pytest.MonkeyPatch) -> None:
    # Always chooses planted_other_sizes.
    internals.choice_of_engine(monkeypatch, lambda seconds: min(seconds, key="planted_other_sizes".__ne__))
    w = torch.randn(6, 5)
    call = compiled(product, "planted_other_sizes", "eager", dynamic=True)
    four, seven = torch.randn(4, 6), torch.randn(7, 6)
    assert call_until_verdict(lambda: torch.testing.assert_close(call(four, w), product(four, w)))["chosen"] == "planted_other_sizes"
    verdict = call_until_verdict(lambda: torch.testing.assert_close(call(seven, w), product(seven, w)), count=2)
    assert verdict["chosen"] in ("dynaxla", "eager")
    assert "without planted_other_sizes" in verdict["why"]
    torch.testing.assert_close(call(four, w), product(four, w))


def test_verdict_without_repeated_sizes() -> None:
    w = torch.randn(6, 5)
    call = compiled(product, "planted_right", "eager", dynamic=True)
    for rows in range(17, 32):
        x = torch.randn(rows, 6)
        torch.testing.assert_close(call(x, w), product(x, w))
    (verdict,) = [item for item in engine_decisions.verdicts() if item["sizes"][0] == 32]
    assert "several sizes" in verdict["why"]


def test_engine_with_wrong_writes_is_excluded() -> None:
    """The user's input is written to once in each call."""

    def step(count: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        count.add_(x)
        return count * 2

    written, expected, x = torch.zeros(3, 4), torch.zeros(3, 4), torch.randn(3, 4)
    call = compiled(step, "planted_in_mutation", "eager")

    def one_call() -> None:
        torch.testing.assert_close(call(written, x), step(expected, x))
        torch.testing.assert_close(written, expected)

    verdict = call_until_verdict(one_call)
    assert verdict["chosen"] in ("dynaxla", "eager")
    assert "input 0 differs after the call" in verdict["left_out"]["planted_in_mutation"]


def test_views_of_inputs_stay_views() -> None:
    def view(x: torch.Tensor) -> torch.Tensor:
        return x.t()[1:]

    x = torch.randn(3, 4)
    call = compiled(view, "planted_no_view", "eager")
    verdict = call_until_verdict(lambda: torch.testing.assert_close(call(x), view(x)))
    assert "result 0 shares memory with nothing, eager mode's with input 0" in verdict["left_out"]["planted_no_view"]
    call(x).zero_()
    assert not x[:, 1:].any()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def test_training_as_in_eager_mode() -> None:
    """Each step gives the gradients and statistics of eager mode. An engine with an error only in its backward pass is excluded."""
    torch.manual_seed(0)
    net, eager_net = Net(), Net()
    eager_net.load_state_dict(net.state_dict())
    call = compiled(net, "planted_in_backward", "planted_slow", "eager")
    hook_calls: list[int] = []
    net.layers[0].weight.register_hook(lambda gradient: hook_calls.append(1))
    steps = 0

    def one_step() -> None:
        nonlocal steps
        steps += 1
        x = torch.randn(5, 6)
        for model, function in ((net, call), (eager_net, eager_net)):
            model.zero_grad()
            function(x).square().sum().backward()
        for (name, parameter), other in zip(net.named_parameters(), eager_net.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-4, atol=1e-4, msg=name)
        for buffer, other in zip(net.buffers(), eager_net.buffers(), strict=True):
            torch.testing.assert_close(buffer, other)

    verdict = call_until_verdict(one_step)
    assert verdict["phase"] == "training"
    assert verdict["chosen"] in ("dynaxla", "eager")
    assert "the gradients differ" in verdict["left_out"]["planted_in_backward"]
    assert len(hook_calls) == steps


def test_graphs_with_random_or_custom_ops_run_once() -> None:
    torch.manual_seed(3)
    x = torch.randn(50)
    drop = compiled(lambda x: nn.functional.dropout(x, 0.5) * 2, "planted_right", "eager")
    drop(x)
    (verdict,) = engine_decisions.verdicts()
    assert verdict["chosen"] == "dynaxla"
    assert "the graph draws random numbers: aten." in verdict["why"]
    assert "test_contest.py" in verdict["why"]

    calls: list[int] = []
    with torch.library._scoped_library("planted", "FRAGMENT") as library:
        library.define("effect(Tensor x) -> Tensor")
        library.impl("effect", lambda x: (calls.append(1), x + 1)[1], "CPU")
        library.impl("effect", lambda x: torch.empty_like(x), "Meta")
        call = compiled(lambda x: torch.ops.planted.effect(x), "planted_right", "eager")
        for _ in range(3):
            torch.testing.assert_close(call(x), x + 1)
    assert len(calls) == 3
    assert "the graph calls a custom op" in engine_decisions.verdicts()[-1]["why"]


def test_each_call_runs_an_engine_at_most_once() -> None:
    runs: list[str] = []

    def counting(module: Any, _: Any) -> Callable[..., Any]:
        return lambda *args: (runs.append("engine"), module(*args))[1]

    x, w = torch.randn(4, 6), torch.randn(6, 5)
    with wrong_engines.planted(planted_counting=counting):
        call = compiled(product, "planted_counting", "eager")
        before = metrics.snapshot().get("trials", 0)
        runs_per_call = []

        def one_call() -> None:
            runs.clear()
            call(x, w)
            runs_per_call.append(len(runs))

        call_until_verdict(one_call)
    assert max(runs_per_call) == 1
    assert metrics.snapshot()["trials"] - before == 2  # one check for each engine except eager mode


def test_a_choice_is_stored_and_a_damaged_file_is_ignored(tmp_path: Path) -> None:
    x, w = torch.randn(4, 6), torch.randn(6, 5)

    def one_call() -> None:
        torch.testing.assert_close(call(x, w), product(x, w))

    call = compiled(product, "planted_slow", "eager", cache=str(tmp_path))
    first = call_until_verdict(one_call)
    torch._dynamo.reset()
    engine_decisions.reset()
    call = compiled(product, "planted_slow", "eager", cache=str(tmp_path))
    one_call()
    (verdict,) = engine_decisions.verdicts()
    assert verdict["is_stored"]
    assert (verdict["chosen"], verdict["seconds"]) == (first["chosen"], first["seconds"])
    assert "an earlier process" in verdict["left_out"]["planted_slow"]
    one_call()
    (file,) = (tmp_path / "engines").iterdir()
    file.write_bytes(b"something else")
    torch._dynamo.reset()
    engine_decisions.reset()
    call = compiled(product, "planted_slow", "eager", cache=str(tmp_path))
    assert not call_until_verdict(one_call)["is_stored"]


def test_concurrent_calls_of_several_threads() -> None:
    x, w = torch.randn(4, 6), torch.randn(6, 5)
    call = compiled(product, "planted_right", "planted_slow", "eager")
    call(x, w)
    errors: list[Exception] = []

    def work() -> None:
        try:
            for _ in range(60):
                torch.testing.assert_close(call(x, w), product(x, w))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    call_until_verdict(lambda: torch.testing.assert_close(call(x, w), product(x, w)))
    assert len(engine_decisions.verdicts()) == 1


def test_inference_mode_and_autocast() -> None:
    net = Net().eval()
    x = torch.randn(5, 6)
    call = compiled(net, "planted_always", "eager")
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        expected = net(x)
        verdict = call_until_verdict(lambda: torch.testing.assert_close(call(x), expected, rtol=2e-2, atol=2e-2))
    assert verdict["chosen"] in ("dynaxla", "eager")


def test_an_error_from_invalid_inputs_excludes_no_engine() -> None:
    table, call = torch.randn(4, 3), compiled(lambda table, index: table[index] * 2, "planted_right", "eager")
    good, bad = torch.tensor([1, 2]), torch.tensor([1, 9])
    with pytest.raises((IndexError, RuntimeError)):
        call(table, bad)
    call_until_verdict(lambda: torch.testing.assert_close(call(table, good), table[good] * 2))
    assert not engine_decisions.verdicts()[-1]["left_out"]


def test_a_new_number_of_threads_starts_a_new_contest() -> None:
    """TorchDynamo compiles the function again for another number of threads. The new graph has its own contest."""
    x, w = torch.randn(4, 6), torch.randn(6, 5)
    call = compiled(product, "eager")
    call_until_verdict(lambda: call(x, w))
    torch.set_num_threads(2)
    try:
        call_until_verdict(lambda: call(x, w), count=2)
    finally:
        torch.set_num_threads(1)


def test_invalid_engines_are_refused() -> None:
    def refused(message: str, backend: str = "dynaxla_auto", **options: Any) -> None:
        with pytest.raises(OptionError, match=message):
            torch.compile(lambda x: x + 1, backend=backend, options=options)(torch.ones(3))

    refused(r"'indutcor' cannot be an engine; the valid names are: (.|\n)*inductor", engines=["dynaxla", "indutcor"])
    refused("'dynaxla_auto' cannot be an engine", engines=["dynaxla", "dynaxla_auto"])
    refused("dynaxla_retrace", backend="dynaxla_retrace", engines=["dynaxla"])
    with pytest.raises(OptionError, match="compile_step does not support the option engines"):
        dynaxla.compile_step(lambda x: x, options={"engines": ["dynaxla"]})


@pytest.mark.slow
def test_the_default_engines_agree() -> None:
    """The default engines are dynaxla, Inductor and eager mode. The graph has linear layers, a batch norm and a GELU."""
    net = Net().eval()
    call = torch.compile(net, backend="dynaxla_auto", options={"cache": ""})
    x = torch.randn(5, 6)
    with torch.no_grad():
        verdict = call_until_verdict(lambda: torch.testing.assert_close(call(x), net(x), rtol=1e-4, atol=1e-5))
    assert set(verdict["seconds"]) | set(verdict["left_out"]) == {"dynaxla", "inductor", "eager"}
    assert not any("wrong" in reason for reason in verdict["left_out"].values())


def test_without_a_compiler_inductor_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    call = compiled(product, "inductor", "eager")
    x, w = torch.randn(4, 6), torch.randn(6, 5)
    verdict = call_until_verdict(lambda: torch.testing.assert_close(call(x, w), product(x, w)))
    assert "C++ compiler" in verdict["left_out"]["inductor"]
