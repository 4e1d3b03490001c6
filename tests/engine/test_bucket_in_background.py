"""Buckets that are compiled in the background: torch's kernels run a graph's true sizes until its bucket is compiled.

This happens with the options sizes="buckets" and compile="background", and by default.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import pytest
import torch
from torch.nn import functional as F

import dynaxla
from dynaxla.engine.program_cache import ProgramCache
from dynaxla.errors import CompilationError
from dynaxla.observe import metrics
from support import internals
from support.comparisons.compare import assert_equal, strides
from support.comparisons.rounded_sizes import poisoned
from support.timing.paused_compilation import Gate, gate

__all__ = ["gate"]

pytestmark = pytest.mark.usefixtures("quick_xla")


@pytest.fixture(autouse=True)
def poison_in_padding() -> Iterator[None]:
    with poisoned():
        yield


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    all_options = {"sizes": "buckets", "compile": "background", **options}
    return torch.compile(function, backend="dynaxla", dynamic=True, fullgraph=True, options=all_options)


def counts(*names: str) -> tuple[int, ...]:
    """Returns the counters since the last call, and resets them."""
    counters = metrics.snapshot()
    metrics.reset()
    return tuple(counters.get(name, 0) for name in names)


def sums(x: torch.Tensor) -> torch.Tensor:
    return x.softmax(0).cumsum(0)


def test_torch_runs_a_bucket_until_its_program_is_ready(gate: Gate) -> None:
    run = compiled(sums)
    for ready in (False, True):
        for size in (9, 11, 12, 9, 7):
            x = torch.randn(size, 3)
            assert_equal(run(x), sums(x))
        assert counts("meanwhile", "calls", "compile") == ((0, 5, 2) if ready else (5, 0, 0))
        if not ready:
            metrics.reset()
            gate.open()
    assert sorted(shapes[0] for shapes in gate.built) == [(8, 3), (12, 3)]


def facts(function: Callable[..., Any], x: torch.Tensor) -> tuple[Any, ...]:
    """Returns the properties of results besides their values."""
    results = list(function(x))
    tensors = [result for result in results if isinstance(result, torch.Tensor)]
    storages = [tensor.untyped_storage().data_ptr() for tensor in (x, *tensors)]
    shared = [[one == other for other in storages] for one in storages]
    return (
        [strides(tensor) for tensor in tensors], [tensor.storage_offset() for tensor in tensors], shared,
        [tensor._is_view() for tensor in tensors], [tensor.requires_grad for tensor in tensors],
        [result for result in results if not isinstance(result, torch.Tensor)],
    )  # fmt: skip


def test_results_have_the_same_memory_before_and_after_compilation(gate: Gate) -> None:
    def function(x: torch.Tensor) -> tuple[Any, ...]:
        y, w = x * 2, x.t() * 3
        return y, w, x[1:], x.expand(2, *x.shape), x.cos().unsqueeze(0).expand(3, -1, -1), (x + 1)[:, :2], x.shape[0] * 2, x, y

    run = compiled(function)
    x = torch.randn(9, 3)
    expected = function(x)
    with torch.no_grad():
        before = facts(run, x)
        first = run(x)
        assert counts("meanwhile") == (2,)
        gate.open()
        assert facts(run, x) == before
        assert counts("meanwhile", "exact_sizes") == (0, 0)
    assert before[0] == [strides(result) for result in expected if isinstance(result, torch.Tensor)]
    assert_equal(first, expected)
    assert first[0].untyped_storage().nbytes() == 9 * 3 * 4, "torch's kernels pad nothing"


class Network(torch.nn.Module):
    """The last position is saved for the backward pass. Only its strides depend on the length."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.first, self.last = torch.nn.Embedding(7, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, n: torch.Tensor) -> torch.Tensor:
        hidden = self.first(self.table(n).softmax(1))
        return self.last(hidden[:, -1]).tanh().sum() + hidden.mean()


@pytest.mark.parametrize("batch", [1, 2])
def test_training(gate: Gate, batch: int) -> None:
    """Includes forward passes by torch with backward passes by XLA, because the programs are ready at different times."""
    torch.manual_seed(0)
    network = Network()
    run = compiled(network)
    metrics.reset()
    pending = []
    for length in (9, 10, 11, 12, 10):
        n = torch.randint(0, 7, (batch, length))
        expected = torch.autograd.grad(network(n), list(network.parameters()))
        if length == 12:
            gate.open()
            assert counts("compile") == (2,), "one program forward, and one backward"
        value = run(n)
        torch.testing.assert_close(value, network(n))
        pending.append((value, expected))
        if length != 11:
            for value, gradients in pending:
                torch.testing.assert_close(torch.autograd.grad(value, list(network.parameters())), gradients)
            pending.clear()
    assert counts("meanwhile", "calls", "compile") == (0, 5, 0)


def test_sizes_that_must_not_be_rounded(gate: Gate) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x.sum(0) if x.shape[0] % 5 == 0 else x

    run = compiled(function)
    for ready in (False, True):
        for size in (20, 35):
            assert_equal(run(torch.ones(size)), function(torch.ones(size)))
        assert counts("meanwhile", "calls", "exact_sizes") == ((0, 2, 2) if ready else (2, 0, 2))
        gate.open()


def test_dropout_does_not_depend_on_compilation_time() -> None:
    runs = []
    for options in ({}, {"compile": "now", "sizes": "exact"}):
        torch._dynamo.reset()
        torch.manual_seed(0)
        run = compiled(lambda x: F.dropout(x) + x.mean(0), **options)
        leaves = [torch.ones(size, 4, requires_grad=True) for size in (9, 10)]
        values = [run(leaf) for leaf in leaves]
        runs.append([values, torch.autograd.grad(sum(value.sum() for value in values), leaves)])
        dynaxla.synchronize()
    torch.testing.assert_close(runs[0], runs[1])


def test_failed_compilation_is_raised_by_the_next_call(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(*_: Any) -> None:
        raise jax.errors.JaxRuntimeError("INTERNAL: no")

    run, x = compiled(sums), torch.randn(9, 3)
    with monkeypatch.context() as patch:
        internals.compiler(patch, refuse)
        assert_equal(run(x), sums(x))
        dynaxla.synchronize()
        assert "could not be compiled in the background" in caplog.text
        for size in (9, 11):
            with pytest.raises(CompilationError, match="INTERNAL: no"):
                run(torch.randn(size, 3))
    assert_equal(run(x), sums(x))


def test_torch_runs_an_evicted_bucket_again(gate: Gate) -> None:
    run = compiled(sums, executables=1)
    small, large = torch.randn(9, 3), torch.randn(20, 3)
    gate._open.set()
    for x in (small, large, small):
        metrics.reset()
        assert_equal(run(x), sums(x))
        dynaxla.synchronize()
        assert_equal(run(x), sums(x))
        assert counts("meanwhile", "calls", "compile") == (1, 1, 1)


def test_many_waiting_sizes_compile_no_more_than_the_limit(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    run = compiled(lambda x, y: (x.sum(0), y.sum(0)), executables=3)
    waiting = internals.background_tasks(monkeypatch)
    for size in range(2, 200):
        assert_equal(run(torch.ones(size), torch.ones(400 - size)), (torch.tensor(float(size)), torch.tensor(400.0 - size)))
    assert counts("meanwhile") == (198,)
    gate.open()
    (program,) = {*waiting}
    assert isinstance(program, ProgramCache)
    assert len(gate.built) <= 4
    assert len(program.executables()) == 3


def test_threads_with_different_sizes(gate: Gate) -> None:
    run = compiled(sums)
    run(torch.ones(3, 3))
    are_close: list[bool] = []

    def call(first: int) -> None:
        for size in range(first, 40, 4):
            x = torch.randn(size, 3)
            are_close.append(torch.allclose(run(x), sums(x), atol=1e-5))

    gate._open.set()
    threads = [threading.Thread(target=call, args=(first,)) for first in (4, 5, 6, 7)]
    config = torch._dynamo.config
    # Calls of torch.compile(dynamic=True) set and reset this option. With torch 2.11, it is global to all threads, and can stay set.
    with config.patch(assume_static_by_default=config.assume_static_by_default):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert are_close == [True] * 36


def test_wrong_fake_implementation_raises(gate: Gate) -> None:
    with torch.library._scoped_library("dynaxla_bucket", "FRAGMENT") as library:
        library.define("lying(Tensor x) -> Tensor")
        library.impl("lying", lambda x: x.double(), "CompositeExplicitAutograd")
        torch.library.register_fake("dynaxla_bucket::lying", torch.empty_like, lib=library)
        run = compiled(lambda x, y: (x.sum(0), torch.ops.dynaxla_bucket.lying(y)))
        y = torch.ones(2)
        torch._dynamo.mark_static(y, 0)
        with pytest.raises(RuntimeError, match="float64"):
            run(torch.ones(9), y)


def compiled_by_default(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(function, backend="dynaxla", dynamic=True, fullgraph=True, options={"compile": "auto", **options})


def call_with(run: Callable[..., Any], *sizes: int) -> None:
    for size in sizes:
        x = torch.randn(size, 3)
        assert_equal(run(x), sums(x))


@pytest.fixture
def program_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    internals.programs_are_faster(monkeypatch)


@pytest.mark.usefixtures("program_is_faster")
def test_default_waits_for_two_programs_and_compiles_others_after_eight_calls(gate: Gate, caplog: pytest.LogCaptureFixture) -> None:
    run = compiled_by_default(sums)
    with caplog.at_level("INFO", logger="dynaxla"):
        call_with(run, 9, 10, 9)
    assert counts("meanwhile", "calls", "compile") == (0, 3, 2)
    assert "further sizes are compiled in the background" in caplog.text
    call_with(run, *[11, 12] * 3, 11)
    gate._open.set()
    dynaxla.synchronize()
    assert counts("meanwhile", "calls", "compile") == (7, 0, 0)
    call_with(run, 12)
    dynaxla.synchronize()
    assert counts("meanwhile", "calls", "compile") == (1, 0, 1), "the eighth call was worth a program"
    call_with(run, 11, 12, 9)
    assert counts("meanwhile", "calls", "compile") == (0, 3, 0)


@pytest.mark.parametrize("sizes", ["auto", "exact", "buckets"])
def test_compile_now_waits_at_each_call(gate: Gate, sizes: str) -> None:
    call_with(compiled_by_default(sums, compile="now", sizes=sizes), *range(9, 16))
    assert counts("meanwhile", "by_torch", "calls") == (0, 0, 7)


@pytest.mark.parametrize("sizes", ["exact", "buckets"])
def test_first_two_programs_are_awaited_for_all_kinds_of_sizes(gate: Gate, monkeypatch: pytest.MonkeyPatch, sizes: str) -> None:
    internals.requests_before_compilation(monkeypatch, 1)
    internals.programs_are_faster(monkeypatch)
    run = compiled_by_default(sums, sizes=sizes)
    call_with(run, 9, 17, 33)
    assert counts("meanwhile", "calls", "compile") == (1, 2, 2)
    gate.open()
    call_with(run, 33)
    assert counts("meanwhile", "calls", "compile") == (0, 1, 1)


def test_deterministic_algorithms_wait_at_each_call(gate: Gate) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        call_with(compiled_by_default(sums), *range(9, 16))
    finally:
        torch.use_deterministic_algorithms(False)
    assert counts("meanwhile", "by_torch", "calls") == (0, 0, 7)


def test_random_numbers_do_not_depend_on_compilation_time() -> None:
    runs = []
    for options in ({}, {"compile": "now", "sizes": "exact"}):
        torch._dynamo.reset()
        torch.manual_seed(0)
        run = compiled_by_default(lambda x: F.dropout(x) + x.mean(0), **options)
        runs.append([run(torch.ones(size, 4)) for size in range(9, 16)])
    torch.testing.assert_close(runs[0], runs[1])


def test_slower_programs_are_not_used_and_end_compilation(
    gate: Gate, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    internals.requests_before_compilation(monkeypatch, 1)
    internals.programs_are_slower(monkeypatch)
    gate._open.set()
    run = compiled_by_default(sums)
    call_with(run, 9, 10)
    for size in (20, 40):
        call_with(run, size)
        dynaxla.synchronize()
        metrics.reset()
        with caplog.at_level("INFO", logger="dynaxla"):
            call_with(run, *[size] * 6)
        assert counts("calls", "by_torch") == (3, 3), "both take turns"
        call_with(run, size, size - 1)
        assert counts("calls", "by_torch") == (0, 2)
    assert "torch's kernels run further sizes" in caplog.text
    call_with(run, 80, 100)
    dynaxla.synchronize()
    call_with(run, 80, 100)
    assert counts("calls", "by_torch", "compile") == (0, 4, 0)
