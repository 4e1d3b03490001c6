"""The option compile="background": torch's kernels run a graph until XLA has compiled it, and nothing but time tells the difference."""

from __future__ import annotations

import copy
import gc
import signal
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import dynaxla
from dynaxla.capture.graph import AtenGraph, Phase
from dynaxla.config import Options
from dynaxla.engine import stored
from dynaxla.engine.eager_executable import EagerExecutable
from dynaxla.engine.xla import CompiledGraph, Xla
from dynaxla.errors import CompilationError, OptionError
from dynaxla.observe import events, metrics
from support import internals
from support.comparisons.compare import strides
from support.processes.time_limits import PATIENCE
from support.timing.paused_compilation import Gate, gate

# What is asked here is when and where a graph runs, and how results lie: the code that XLA makes is not the subject.
pytestmark = pytest.mark.usefixtures("quick_xla")

__all__ = ["gate"]

OPTIONS = {"compile": "background"}


def program(function: Callable[..., Any], *inputs: Any, phase: Phase = "inference", **options: Any) -> CompiledGraph:
    graph = AtenGraph("graph", make_fx(function, tracing_mode="symbolic")(*inputs), phase=phase)
    return Xla(Options(compile="background", **options)).runner(graph)


def counts(*names: str) -> tuple[int, ...]:
    """What has been counted since the last time."""
    found = metrics.snapshot()
    metrics.reset()
    return tuple(found.get(name, 0) for name in names)


def test_torch_runs_a_size_until_its_program_is_ready(gate: Gate) -> None:
    runner = program(lambda x, n: [x * n, n + 1], torch.ones(4), 3)
    references = []
    for size, factor in ((4, 3), (5, 3), (4, 3), (4, 2)):
        x = torch.randn(size)
        args = [x, factor]
        found = runner(args)
        assert (torch.equal(found[0], x * factor), found[1], args) == (True, factor + 1, [])
        references.append(weakref.ref(x))
        del x, found
    gc.collect()
    assert [reference() for reference in references] == [None] * 4, "what waits keeps no input"
    assert counts("meanwhile", "calls") == (4, 0)
    gate.open()
    assert len(runner.executables()) == len(gate.built) == 3
    for size, factor in ((4, 3), (5, 3), (4, 2)):
        x = torch.randn(size)
        assert torch.equal(runner([x, factor])[0], x * factor)
    assert counts("meanwhile", "calls", "compile") == (0, 3, 3)


def test_nothing_to_compute_waits_for_nothing(gate: Gate) -> None:
    runner = program(lambda x: [x.t(), x.shape[0] * 2], torch.ones(4, 3))
    assert runner([torch.ones(5, 2)])[1] == 10
    assert (counts("meanwhile"), gate.built) == ((0,), [])


def test_newest_first_and_no_more_than_a_graph_keeps(gate: Gate) -> None:
    runner = program(lambda x: [x + 1], torch.ones(4), executables=3)
    runner([torch.zeros(10)])
    assert gate.started.wait(PATIENCE)
    for size in (11, 12, 13, 14, 12):
        runner([torch.zeros(size)])
    gate.open()
    assert gate.built == [[(10,)], [(12,)], [(14,)], [(13,)]]
    assert len(runner.executables()) == 3


class Facts:
    """What can be seen of results besides their values."""

    def __init__(self, inputs: tuple[torch.Tensor, ...], results: list[torch.Tensor]) -> None:
        everything = [*inputs, *results]
        storages = [tensor.untyped_storage() for tensor in everything]
        self.strides = [strides(tensor) for tensor in results]
        self.shared = [[one.data_ptr() == other.data_ptr() for other in storages] for one in storages]
        self.kinds = [(tensor.dtype, tensor.is_conj(), tensor.is_neg(), tensor.is_inference(), tensor.requires_grad) for tensor in results]
        self.places = [tensor.storage_offset() for tensor in results]
        self.views = [tensor._is_view() for tensor in results]
        self.sizes = [storage.nbytes() for storage in storages]


def shapes(x: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Results of every kind: strided, in an input's memory, in one another's, a part of what was made, a constant, without elements."""
    y = x * 2
    parts = (x + 1).chunk(2)
    w, v = x.t() * 3, x * 5
    v[0].add_(1)  # torch's kernel for that gives a view
    return (
        y.t(), y, x[1:], x.expand(2, *x.shape), z.conj() * 1, (z * 2).conj(), parts[1], x.cos().unsqueeze(0).expand(3, -1, -1),
        torch.arange(3.0), x[:0] * 2, (x * 3).as_strided((2, 2), (3, 1)), z.imag * 1, w, w[0], v, v[1],
    )  # fmt: skip


@pytest.mark.parametrize("inference", [False, True])
def test_results_lie_in_memory_in_the_same_way(gate: Gate, inference: bool) -> None:
    compiled = torch.compile(shapes, backend="dynaxla", options=OPTIONS, fullgraph=True)
    with torch.inference_mode(inference):
        inputs = torch.randn(4, 3), torch.randn(4, 3, dtype=torch.complex64)
        expected = shapes(*inputs)
        first = list(compiled(*inputs))
        assert counts("meanwhile", "calls") == (1, 0)
        gate.open()
        second = list(compiled(*inputs))
        assert counts("meanwhile", "calls") == (0, 1)
        facts = [vars(Facts(inputs, results)) for results in (first, second)]
        assert facts[0] == facts[1]
        assert facts[0]["strides"] == [strides(result) for result in expected]
        for results in (first, second):
            torch.testing.assert_close(results, list(expected), rtol=1e-6, atol=1e-6)
        first[8].zero_()
        torch.testing.assert_close(compiled(*inputs)[8], expected[8])


def test_a_constant_of_the_graph_is_copied(gate: Gate) -> None:
    constant = torch.arange(3)
    runner = program(lambda x: [x + 1, constant], torch.ones(4))
    runner([torch.ones(4)])[1].zero_()
    assert runner([torch.ones(4)])[1].tolist() == constant.tolist() == [0, 1, 2]
    assert counts("meanwhile") == (2,)


def test_a_value_that_is_not_as_promised_is_an_error(gate: Gate) -> None:
    with torch.library._scoped_library("dynaxla_pending", "FRAGMENT") as library:
        library.define("lying(Tensor x) -> Tensor")
        library.impl("lying", lambda x: x.sum(0), "CompositeExplicitAutograd")
        torch.library.register_fake("dynaxla_pending::lying", torch.empty_like, lib=library)
        runner = program(lambda x: [torch.ops.dynaxla_pending.lying(x)], torch.ones(4, 3))
        for ready in (False, True):
            with pytest.raises(RuntimeError, match=r"its fake \(meta\) implementation declared"):
                runner([torch.ones(4, 3)])
            gate.open()
            assert bool(runner.executables()) or not ready


def test_random_numbers_do_not_depend_on_the_time() -> None:
    """Neither those that a program draws, nor those that a checkpointed region draws again."""

    def function(x: torch.Tensor, again: bool) -> torch.Tensor:
        def region(x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.dropout(x.sin()).cos()

        return checkpoint(region, x, use_reentrant=False) if again else region(x)

    for again in (False, True):
        found = []
        for options in ({}, OPTIONS, OPTIONS | {"exact_rng": True}):
            torch._dynamo.reset()
            torch.manual_seed(0)
            metrics.reset()
            x = torch.ones(50, requires_grad=True)
            value = torch.compile(function, backend="dynaxla", options=options)(x, again)
            (gradient,) = torch.autograd.grad(value.sum(), x)
            found.append((value, gradient))
            # Without a checkpoint the backward graph draws nothing; with one torch's own kernels can draw again what they drew.
            assert (counts("meanwhile")[0] > 0) == (bool(options) and (not again or len(options) > 1))
            dynaxla.synchronize()
        torch.testing.assert_close(found[0], found[1])
        torch.manual_seed(0)
        torch.testing.assert_close(found[2][0], function(torch.ones(50), again))


def test_a_failure_in_the_middle_writes_nothing(gate: Gate) -> None:
    def function(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return torch.nn.functional.embedding(index, x)

    compiled = torch.compile(function, backend="dynaxla", options=OPTIONS)
    for calls in (0, 1):
        x = torch.ones(3, 2)
        with pytest.raises(IndexError, match="index out of range in self"):
            compiled(x, torch.tensor([3]))
        assert torch.equal(x, torch.ones(3, 2))
        assert torch.equal(compiled(x, torch.tensor([2])), torch.full((1, 2), 2.0))
        assert torch.equal(x, torch.full((3, 2), 2.0))
        assert counts("calls") == (2 * calls,)
        gate.open()
        metrics.reset()


def test_what_cannot_be_compiled_is_logged_and_raised_by_the_next_call(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> None:
        raise jax.errors.JaxRuntimeError("INTERNAL: no")

    runner = program(lambda x: [x.sin()], torch.ones(4))
    x = torch.randn(5)
    with monkeypatch.context() as patch:
        internals.compiler(patch, refuse)
        torch.testing.assert_close(runner([x])[0], x.sin())
        dynaxla.synchronize()
        (message,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
        assert message.startswith(
            "graph could not be compiled in the background, and its next call compiles it again: XLA could not compile graph"
        )
        for size in (5, 5, 6):
            with pytest.raises(CompilationError, match="INTERNAL: no"):
                runner([torch.ones(size)])
    metrics.reset()
    torch.testing.assert_close(runner([x])[0], x.sin())
    assert counts("meanwhile", "calls") == (0, 1)


def test_a_backward_program_belongs_to_the_strides_of_what_was_kept(gate: Gate) -> None:
    runner = program(lambda x, y: [x * 2 + y], torch.ones(4, 3), torch.ones(4, 3), phase="backward")
    rows, columns = torch.randn(4, 3), torch.randn(3, 4).t()
    for ready in (False, True):
        for kept in (rows, columns, rows):
            torch.testing.assert_close(runner([kept, rows])[0], kept * 2 + rows)
        assert counts("meanwhile", "calls", "input_copies") == ((0, 3, 0) if ready else (3, 0, 0))
        gate.open()
    assert len(runner.executables()) == 2


def test_a_model_that_is_trained(gate: Gate) -> None:
    """The first step by torch, whose convolution keeps what it keeps in eager mode's order, the others by XLA, which has its own."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3), torch.nn.ReLU(), torch.nn.Conv2d(3, 2, 3), torch.nn.Flatten())
    compiled = torch.compile(net, backend="dynaxla", options=OPTIONS)
    x = torch.randn(2, 2, 8, 8)
    expected = torch.autograd.grad(net(x).square().sum(), list(net.parameters()))
    seen = []
    for _ in range(3):
        metrics.reset()
        found = torch.autograd.grad(compiled(x).square().sum(), list(net.parameters()))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        seen.append(counts("meanwhile", "calls", "input_copies"))
        gate.open()
    assert seen[0] == (2, 0, 0)
    assert seen[2] == (0, 2, 0)


def test_a_compiled_step(gate: Gate) -> None:
    def losses(compile: Callable[..., Any]) -> tuple[list[float], list[torch.Tensor]]:
        torch.manual_seed(0)
        net = torch.nn.Linear(3, 2)
        optimizer = torch.optim.Adam(net.parameters(), lr=0.1)

        @compile
        def step(x: torch.Tensor) -> torch.Tensor:
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        x = torch.ones(4, 3)
        found = []
        for number in range(6):
            found.append(step(x).item())
            if number == 3:
                gate.open()
        return found, [parameter.detach() for parameter in net.parameters()]

    expected = losses(lambda function: function)
    metrics.reset()
    torch.testing.assert_close(losses(dynaxla.compile_step(options=OPTIONS)), expected, rtol=1e-5, atol=1e-6)
    meanwhile, calls = counts("meanwhile", "calls")
    assert meanwhile >= 2
    assert calls >= 2


def test_a_model_that_goes_is_not_compiled(gate: Gate) -> None:
    first, second = program(lambda x: [x + 1], torch.ones(4)), program(lambda x: [x + 2], torch.ones(4))
    first([torch.ones(4)])
    assert gate.started.wait(PATIENCE)
    second([torch.ones(4)])
    reference = weakref.ref(second)
    del second
    gc.collect()
    assert reference() is None
    gate.open()
    assert counts("compile") == (1,)


def test_a_program_is_for_the_default_dtype_of_its_call(gate: Gate) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        runner = program(lambda n: [n / 3], torch.arange(4))
        expected = runner([torch.arange(4)])[0]
    finally:
        torch.set_default_dtype(before)
    gate.open()
    assert counts("meanwhile", "compile") == (1, 1)
    assert runner.cache.in_background, "nothing has failed"
    result = runner([torch.arange(4)])[0]
    assert result.dtype == torch.float64
    torch.testing.assert_close(result, expected)


def test_threads_that_come_at_once(gate: Gate) -> None:
    runner = program(lambda x: [x.sin()], torch.ones(4))
    barrier, results = threading.Barrier(4), []

    def call() -> None:
        barrier.wait()
        for size in (4, 5, 4):
            results.append(torch.equal(runner([torch.ones(size)])[0], torch.ones(size).sin()))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gate.open()
    assert results == [True] * 12
    assert (counts("meanwhile", "compile"), len(gate.built)) == ((12, 2), 2)


def test_retracing_is_never_in_the_background() -> None:
    with pytest.raises(OptionError, match="dynaxla_retrace does not support"):
        torch.compile(torch.sin, backend="dynaxla_retrace", options=OPTIONS)(torch.ones(3))


def test_what_a_file_has_compiled_runs_at_once(gate: Gate, tmp_path: Path) -> None:
    """Whichever way it was compiled then. No file has oneDNN's programs, so these are compiled in the background once more."""
    x, runners = torch.randn(1, 3, 6, 6), []

    def run(function: Callable[..., Any], **options: Any) -> tuple[int, ...]:
        stored._live_programs.clear()  # as in another process
        graph = AtenGraph("graph", make_fx(function, tracing_mode="fake")(x), ())
        runners.append(Xla(Options(cache=str(tmp_path), implementations={"convolution": "onednn"}, **options)).runner(graph))
        torch.testing.assert_close(runners[-1]([x]), function(x))
        return counts("meanwhile", "recalls", "trace")

    def convolution(x: torch.Tensor) -> list[torch.Tensor]:
        return [torch.nn.functional.conv2d(x, x[..., :3, :3])]

    def plain(x: torch.Tensor) -> list[torch.Tensor]:
        return [x.sin() + 2]

    assert [run(plain), run(plain, **OPTIONS)] == [(0, 0, 1), (0, 1, 0)]
    assert [run(convolution), run(convolution, **OPTIONS)] == [(0, 0, 1), (1, 0, 0)]
    gate.open()
    assert counts("recalls", "trace") == (1, 0)


def test_a_copy_of_a_model_that_waits_is_a_model_of_its_own(gate: Gate) -> None:
    model, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
    compiled = torch.compile(model, backend="dynaxla", options=OPTIONS)
    compiled(x).sum().backward()
    copied = copy.deepcopy(compiled)
    with torch.no_grad():
        copied.weight.add_(1)
    for _ in range(2):
        torch.testing.assert_close(compiled(x), torch.nn.functional.linear(x, model.weight, model.bias))
        torch.testing.assert_close(copied(x), torch.nn.functional.linear(x, model.weight + 1, model.bias))
        gate.open()


def test_a_reset_while_sizes_wait(gate: Gate) -> None:
    """What waited is gone with its graph, and nothing is raised by it."""
    compiled = torch.compile(lambda x: x.sin() @ x.t(), backend="dynaxla", dynamic=True, options=OPTIONS)
    for _ in range(2):
        for size in (2, 3, 4):
            x = torch.randn(size, 5)
            torch.testing.assert_close(compiled(x), x.sin() @ x.t())
        torch.compiler.reset()
    gate.open()
    x = torch.randn(4, 5)
    torch.testing.assert_close(compiled(x), x.sin() @ x.t())
    dynaxla.synchronize()
    torch.testing.assert_close(compiled(x), x.sin() @ x.t())


def test_a_wait_that_is_interrupted_goes_on_in_the_background(gate: Gate) -> None:
    """Ctrl-C ends the wait, not the compilation."""
    runner = program(lambda x: [x.cos()], torch.ones(4))
    runner([torch.ones(4)])
    assert gate.started.wait(PATIENCE)
    timer = threading.Timer(0.2, signal.pthread_kill, [threading.get_ident(), signal.SIGINT])
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what is in the background with none
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            dynaxla.synchronize()
        timer.join()
    finally:
        signal.signal(signal.SIGINT, before)
    gate.open()
    assert counts("meanwhile", "compile") == (1, 1)
    torch.testing.assert_close(runner([torch.ones(4)])[0], torch.ones(4).cos())
    assert counts("meanwhile", "calls") == (0, 1)


SIDE = 300  # torch's kernels run a lone op of so many numbers for all calls


@pytest.fixture
def again(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each call of a graph that torch runs for all calls, after the first one: whether it went the short way."""
    return internals.fast_calls(monkeypatch)


def lone(function: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, backend="dynaxla", fullgraph=True)


@pytest.mark.parametrize("inference", [False, True])
def test_calls_that_are_alike_give_the_same_in_the_same_memory(again: list[bool], inference: bool) -> None:
    def function(x: torch.Tensor) -> tuple[Any, ...]:
        return x.roll(1, 0), x, x[2:], x.sum(0), None, x.t(), 3

    def with_parts(x: torch.Tensor) -> tuple[Any, ...]:
        rolled = x.roll(1, 0)
        return rolled, rolled[1:], rolled.t()

    with torch.inference_mode(inference):
        for made in (function, with_parts, lambda x: (x.roll(1), (x @ x).t(), (x @ x).view(-1)), lambda x: (x.roll(1, 0), x.sum(0))):
            run = lone(made)
            seen = []
            for _ in range(3):
                x = torch.randn(SIDE, SIDE)
                expected, found = made(x), run(x)
                torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
                tensors = [each for each in pytree.tree_leaves(found) if isinstance(each, torch.Tensor)]
                seen.append(vars(Facts((x,), tensors)))
            assert seen[0] == seen[1] == seen[2]
        assert again == [True, True] * 4


def test_inputs_in_another_layout_go_the_long_way(again: list[bool]) -> None:
    x = torch.randn(SIDE, SIDE, requires_grad=True)
    run = lone(lambda x: x.roll(1, 0))
    for gradient in (torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE).t(), torch.randn(1).expand(SIDE, SIDE)):
        x.grad = None
        run(x).backward(gradient)
        assert x.grad is not None
        assert torch.equal(x.grad, gradient.roll(-1, 0))
        assert x.grad.untyped_storage().data_ptr() != gradient.untyped_storage().data_ptr()
    runner = Xla(Options()).runner(AtenGraph("graph", make_fx(lambda x: [x.t().roll(1, 0)], tracing_mode="fake")(torch.ones(SIDE, SIDE))))
    again.clear()
    inputs = [torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE).t(), torch.randn(SIDE, SIDE).conj()]
    for given in (*inputs, torch._neg_view(torch.randn(SIDE, SIDE)), torch.randn(SIDE, SIDE)):
        (found,) = runner([given])
        assert torch.equal(found, given.t().roll(1, 0))
        assert (found.stride(), found.is_neg()) == ((SIDE, 1), False)
    assert again == [True, False, True, False, True]


def test_results_in_another_layout_are_put_right(again: list[bool]) -> None:
    """What torch's settings can do."""
    graph = AtenGraph("graph", make_fx(lambda x: [x.roll(1, 0)], tracing_mode="fake")(torch.ones(SIDE, SIDE)))
    runner = Xla(Options()).runner(graph)
    x = torch.randn(SIDE, SIDE)
    runner([x])
    (found,) = runner.cache._executables.values()
    assert isinstance(found, EagerExecutable)
    other = torch.empty(SIDE, 2 * SIDE)[:, ::2].copy_(x.roll(1, 0))
    found._eager_graph.compute = lambda _: (other,)
    (result,) = runner([x])
    assert (torch.equal(result, x.roll(1, 0)), result.stride(), again[-1]) == (True, (SIDE, 1), True)
    assert result.untyped_storage().nbytes() == 4 * SIDE * SIDE


@pytest.mark.parametrize("compile", ["now", "background"])
def test_a_graph_that_torch_runs_is_looked_at_once(compile: str) -> None:
    graph = AtenGraph("graph", make_fx(lambda x: [x.roll(1, 0)], tracing_mode="fake")(torch.ones(SIDE, SIDE)))
    runner = Xla(Options(compile=compile)).runner(graph)
    heard: list[Any] = []
    with events.listening(heard.append):
        runner([torch.randn(SIDE, SIDE)])
    (found,) = runner.cache._executables.values()
    ended = [event.executable for event in heard if isinstance(event, events.CompileEnded)]
    assert (type(found), ended) == (EagerExecutable, [found])


def test_other_peoples_kernels_are_never_run_so(again: list[bool]) -> None:
    """They may give an input back if they like its values: each call looks at that."""
    with torch.library._scoped_library("lone", "DEF") as library:
        library.define("positive(Tensor x) -> Tensor")
        library.impl("positive", lambda x: x if bool((x > 0).all()) else x.clamp(min=0), "CPU")
        library.impl("positive", torch.empty_like, "Meta")
        run = lone(lambda x: (torch.ops.lone.positive(x), x.roll(1, 0)))
        counts()
        for sign in (-1, 1, 1):
            x = sign * torch.ones(SIDE, SIDE)
            found, rolled = run(x)
            assert found.data_ptr() != x.data_ptr()
            assert (found.sum().item(), rolled.sum().item()) == (max(sign, 0) * SIDE * SIDE, sign * SIDE * SIDE)
        assert counts("calls", "by_torch") == (3, 0), "a program calls the kernel"
        assert again == []


def test_who_looks_on_sees_the_long_way(again: list[bool]) -> None:
    run = lone(lambda x: x.roll(1, 0))
    x = torch.randn(SIDE, SIDE)
    for _ in range(3):
        run(x)
    assert again == [True, True]
    with torch.profiler.profile() as profile:
        run(x)
    assert again[-1] is False
    assert any(event.key.startswith("dynaxla_") for event in profile.key_averages()), "the graph has a name there"
    heard: list[Any] = []
    with events.listening(heard.append):
        run(x)
    assert again[-1] is False
    assert [type(event) for event in heard] == [events.ProgramRan]


def test_a_kernel_that_fails_leaves_the_short_way_open(again: list[bool]) -> None:
    run = lone(lambda x, index: x.gather(0, index))
    x, right, wrong = torch.randn(SIDE, SIDE), torch.zeros(SIDE, SIDE, dtype=torch.int64), torch.full((SIDE, SIDE), SIDE)
    for index in (right, right, wrong, right):
        if index is wrong:
            with pytest.raises((RuntimeError, IndexError), match="out of bounds"):
                run(x, index)
        else:
            assert torch.equal(run(x, index), x.gather(0, index))
    assert again.count(True) >= 2


def test_in_a_child_nothing_goes_the_short_way(again: list[bool]) -> None:
    graph = AtenGraph("graph", make_fx(lambda x: [x.roll(1, 0)], tracing_mode="fake")(torch.ones(SIDE, SIDE)))
    runner = Xla(Options()).runner(graph)
    x = torch.randn(SIDE, SIDE)
    runner([x])
    runner([x])
    assert again.count(True) == 1
    again.clear()
    runner.cache.after_fork()
    assert torch.equal(runner([x])[0], x.roll(1, 0))
    assert again == []
