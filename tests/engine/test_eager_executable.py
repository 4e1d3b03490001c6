"""Tests of engine/eager_executable.py: torch's kernels run a graph until XLA has compiled it, with the same results and memory."""

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

# These tests check when and where a graph runs, and the results' memory, not the code that XLA generates.
pytestmark = pytest.mark.usefixtures("quick_xla")

__all__ = ["gate"]

OPTIONS = {"compile": "background"}


def program(function: Callable[..., Any], *inputs: Any, phase: Phase = "inference", **options: Any) -> CompiledGraph:
    graph = AtenGraph("graph", make_fx(function, tracing_mode="symbolic")(*inputs), phase=phase)
    return Xla(Options(compile="background", **options)).runner(graph)


def counts(*names: str) -> tuple[int, ...]:
    """Returns the counters since the last call, and resets them."""
    counters = metrics.snapshot()
    metrics.reset()
    return tuple(counters.get(name, 0) for name in names)


def test_torch_runs_each_size_until_its_program_is_ready(gate: Gate) -> None:
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
    assert [reference() for reference in references] == [None] * 4, "a waiting compilation keeps no input alive"
    assert counts("meanwhile", "calls") == (4, 0)
    gate.open()
    assert len(runner.executables()) == len(gate.built) == 3
    for size, factor in ((4, 3), (5, 3), (4, 2)):
        x = torch.randn(size)
        assert torch.equal(runner([x, factor])[0], x * factor)
    assert counts("meanwhile", "calls", "compile") == (0, 3, 3)


def test_graph_without_computation_is_not_compiled(gate: Gate) -> None:
    runner = program(lambda x: [x.t(), x.shape[0] * 2], torch.ones(4, 3))
    assert runner([torch.ones(5, 2)])[1] == 10
    assert (counts("meanwhile"), gate.built) == ((0,), [])


def test_newest_sizes_are_compiled_first_up_to_the_limit(gate: Gate) -> None:
    runner = program(lambda x: [x + 1], torch.ones(4), executables=3)
    runner([torch.zeros(10)])
    assert gate.started.wait(PATIENCE)
    for size in (11, 12, 13, 14, 12):
        runner([torch.zeros(size)])
    gate.open()
    assert gate.built == [[(10,)], [(12,)], [(14,)], [(13,)]]
    assert len(runner.executables()) == 3


class Facts:
    """Properties of results besides their values."""

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
    """Returns results of every kind: strided, views of an input or of another result, parts of a result, a constant, an empty tensor."""
    y = x * 2
    parts = (x + 1).chunk(2)
    w, v = x.t() * 3, x * 5
    v[0].add_(1)  # torch's kernel for this returns a view
    return (
        y.t(), y, x[1:], x.expand(2, *x.shape), z.conj() * 1, (z * 2).conj(), parts[1], x.cos().unsqueeze(0).expand(3, -1, -1),
        torch.arange(3.0), x[:0] * 2, (x * 3).as_strided((2, 2), (3, 1)), z.imag * 1, w, w[0], v, v[1],
    )  # fmt: skip


@pytest.mark.parametrize("inference", [False, True])
def test_results_have_the_same_memory_before_and_after_compilation(gate: Gate, inference: bool) -> None:
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


def test_constant_result_is_copied(gate: Gate) -> None:
    constant = torch.arange(3)
    runner = program(lambda x: [x + 1, constant], torch.ones(4))
    runner([torch.ones(4)])[1].zero_()
    assert runner([torch.ones(4)])[1].tolist() == constant.tolist() == [0, 1, 2]
    assert counts("meanwhile") == (2,)


def test_wrong_fake_implementation_raises(gate: Gate) -> None:
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


def test_random_numbers_do_not_depend_on_compilation_time() -> None:
    """The numbers of a program and of a recomputed checkpoint do not depend on when compilation ends."""

    def function(x: torch.Tensor, recomputed: bool) -> torch.Tensor:
        def region(x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.dropout(x.sin()).cos()

        return checkpoint(region, x, use_reentrant=False) if recomputed else region(x)

    for recomputed in (False, True):
        runs = []
        for options in ({}, OPTIONS, OPTIONS | {"exact_rng": True}):
            torch._dynamo.reset()
            torch.manual_seed(0)
            metrics.reset()
            x = torch.ones(50, requires_grad=True)
            value = torch.compile(function, backend="dynaxla", options=options)(x, recomputed)
            (gradient,) = torch.autograd.grad(value.sum(), x)
            runs.append((value, gradient))
            # Without a checkpoint, the backward graph draws nothing. With one, torch's kernels can repeat the numbers only with exact_rng.
            assert (counts("meanwhile")[0] > 0) == (bool(options) and (not recomputed or len(options) > 1))
            dynaxla.synchronize()
        torch.testing.assert_close(runs[0], runs[1])
        torch.manual_seed(0)
        torch.testing.assert_close(runs[2][0], function(torch.ones(50), recomputed))


def test_failed_call_writes_nothing(gate: Gate) -> None:
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


def test_failed_compilation_is_logged_and_raised_by_the_next_call(
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


def test_backward_program_for_each_stride_of_saved_tensors(gate: Gate) -> None:
    runner = program(lambda x, y: [x * 2 + y], torch.ones(4, 3), torch.ones(4, 3), phase="backward")
    rows, columns = torch.randn(4, 3), torch.randn(3, 4).t()
    for ready in (False, True):
        for saved in (rows, columns, rows):
            torch.testing.assert_close(runner([saved, rows])[0], saved * 2 + rows)
        assert counts("meanwhile", "calls", "input_copies") == ((0, 3, 0) if ready else (3, 0, 0))
        gate.open()
    assert len(runner.executables()) == 2


def test_training(gate: Gate) -> None:
    """torch runs the first step, and saves tensors with eager mode's strides. XLA runs the others, with its own layouts."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3), torch.nn.ReLU(), torch.nn.Conv2d(3, 2, 3), torch.nn.Flatten())
    compiled = torch.compile(net, backend="dynaxla", options=OPTIONS)
    x = torch.randn(2, 2, 8, 8)
    expected = torch.autograd.grad(net(x).square().sum(), list(net.parameters()))
    counted = []
    for _ in range(3):
        metrics.reset()
        found = torch.autograd.grad(compiled(x).square().sum(), list(net.parameters()))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        counted.append(counts("meanwhile", "calls", "input_copies"))
        gate.open()
    assert counted[0] == (2, 0, 0)
    assert counted[2] == (0, 2, 0)


def test_compiled_step(gate: Gate) -> None:
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
        step_losses = []
        for number in range(6):
            step_losses.append(step(x).item())
            if number == 3:
                gate.open()
        return step_losses, [parameter.detach() for parameter in net.parameters()]

    expected = losses(lambda function: function)
    metrics.reset()
    torch.testing.assert_close(losses(dynaxla.compile_step(options=OPTIONS)), expected, rtol=1e-5, atol=1e-6)
    meanwhile, calls = counts("meanwhile", "calls")
    assert meanwhile >= 2
    assert calls >= 2


def test_deleted_model_is_not_compiled(gate: Gate) -> None:
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


def test_program_has_the_default_dtype_of_its_call(gate: Gate) -> None:
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


def test_concurrent_calls(gate: Gate) -> None:
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


def test_retrace_backend_refuses_background() -> None:
    with pytest.raises(OptionError, match="dynaxla_retrace does not support"):
        torch.compile(torch.sin, backend="dynaxla_retrace", options=OPTIONS)(torch.ones(3))


def test_stored_program_runs_at_once(gate: Gate, tmp_path: Path) -> None:
    """Both compilation modes can read the file. Programs with oneDNN are not stored, so they are compiled in the background again."""
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


def test_copy_of_a_waiting_model(gate: Gate) -> None:
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


def test_reset_while_sizes_wait(gate: Gate) -> None:
    """Waiting compilations are dropped with their graph, without an error."""
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


def test_interrupted_wait_does_not_stop_compilation(gate: Gate) -> None:
    """Ctrl-C ends the wait, but not the compilation."""
    runner = program(lambda x: [x.cos()], torch.ones(4))
    runner([torch.ones(4)])
    assert gate.started.wait(PATIENCE)
    timer = threading.Timer(0.2, signal.pthread_kill, [threading.get_ident(), signal.SIGINT])
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background processes without a handler
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


SIDE = 300  # for a single op of this size, torch's kernels run all calls


@pytest.fixture
def fast_calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Records for each call after the first one whether it took the fast path. torch's kernels run all calls of these graphs."""
    return internals.fast_calls(monkeypatch)


def compiled_single_op(function: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, backend="dynaxla", fullgraph=True)


@pytest.mark.parametrize("inference", [False, True])
def test_repeated_calls_have_equal_results_and_memory(fast_calls: list[bool], inference: bool) -> None:
    def function(x: torch.Tensor) -> tuple[Any, ...]:
        return x.roll(1, 0), x, x[2:], x.sum(0), None, x.t(), 3

    def with_parts(x: torch.Tensor) -> tuple[Any, ...]:
        rolled = x.roll(1, 0)
        return rolled, rolled[1:], rolled.t()

    with torch.inference_mode(inference):
        for traced_function in (
            function,
            with_parts,
            lambda x: (x.roll(1), (x @ x).t(), (x @ x).view(-1)),
            lambda x: (x.roll(1, 0), x.sum(0)),
        ):
            run = compiled_single_op(traced_function)
            facts = []
            for _ in range(3):
                x = torch.randn(SIDE, SIDE)
                expected, found = traced_function(x), run(x)
                torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
                tensors = [tensor for tensor in pytree.tree_leaves(found) if isinstance(tensor, torch.Tensor)]
                facts.append(vars(Facts((x,), tensors)))
            assert facts[0] == facts[1] == facts[2]
        assert fast_calls == [True, True] * 4


def test_inputs_with_other_strides_take_the_slow_path(fast_calls: list[bool]) -> None:
    x = torch.randn(SIDE, SIDE, requires_grad=True)
    run = compiled_single_op(lambda x: x.roll(1, 0))
    for gradient in (torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE).t(), torch.randn(1).expand(SIDE, SIDE)):
        x.grad = None
        run(x).backward(gradient)
        assert x.grad is not None
        assert torch.equal(x.grad, gradient.roll(-1, 0))
        assert x.grad.untyped_storage().data_ptr() != gradient.untyped_storage().data_ptr()
    runner = Xla(Options()).runner(AtenGraph("graph", make_fx(lambda x: [x.t().roll(1, 0)], tracing_mode="fake")(torch.ones(SIDE, SIDE))))
    fast_calls.clear()
    inputs = [torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE).t(), torch.randn(SIDE, SIDE).conj()]
    for tensor in (*inputs, torch._neg_view(torch.randn(SIDE, SIDE)), torch.randn(SIDE, SIDE)):
        (found,) = runner([tensor])
        assert torch.equal(found, tensor.t().roll(1, 0))
        assert (found.stride(), found.is_neg()) == ((SIDE, 1), False)
    assert fast_calls == [True, False, True, False, True]


def test_results_with_other_strides_are_copied(fast_calls: list[bool]) -> None:
    """torch's settings can change the strides of results."""
    graph = AtenGraph("graph", make_fx(lambda x: [x.roll(1, 0)], tracing_mode="fake")(torch.ones(SIDE, SIDE)))
    runner = Xla(Options()).runner(graph)
    x = torch.randn(SIDE, SIDE)
    runner([x])
    (executable,) = runner.cache._executables.values()
    assert isinstance(executable, EagerExecutable)
    other = torch.empty(SIDE, 2 * SIDE)[:, ::2].copy_(x.roll(1, 0))
    executable._eager_graph.compute = lambda _: (other,)
    (result,) = runner([x])
    assert (torch.equal(result, x.roll(1, 0)), result.stride(), fast_calls[-1]) == (True, (SIDE, 1), True)
    assert result.untyped_storage().nbytes() == 4 * SIDE * SIDE


@pytest.mark.parametrize("compile", ["now", "background"])
def test_single_op_gets_an_eager_executable_at_once(compile: str) -> None:
    graph = AtenGraph("graph", make_fx(lambda x: [x.roll(1, 0)], tracing_mode="fake")(torch.ones(SIDE, SIDE)))
    runner = Xla(Options(compile=compile)).runner(graph)
    received: list[Any] = []
    with events.listening(received.append):
        runner([torch.randn(SIDE, SIDE)])
    (executable,) = runner.cache._executables.values()
    ended = [event.executable for event in received if isinstance(event, events.CompileEnded)]
    assert (type(executable), ended) == (EagerExecutable, [executable])


def test_custom_kernels_never_take_the_fast_path(fast_calls: list[bool]) -> None:
    """A custom kernel may return its input, depending on values, so each call has to check this."""
    with torch.library._scoped_library("lone", "DEF") as library:
        library.define("positive(Tensor x) -> Tensor")
        library.impl("positive", lambda x: x if bool((x > 0).all()) else x.clamp(min=0), "CPU")
        library.impl("positive", torch.empty_like, "Meta")
        run = compiled_single_op(lambda x: (torch.ops.lone.positive(x), x.roll(1, 0)))
        counts()
        for sign in (-1, 1, 1):
            x = sign * torch.ones(SIDE, SIDE)
            found, rolled = run(x)
            assert found.data_ptr() != x.data_ptr()
            assert (found.sum().item(), rolled.sum().item()) == (max(sign, 0) * SIDE * SIDE, sign * SIDE * SIDE)
        assert counts("calls", "by_torch") == (3, 0), "a program calls the kernel"
        assert fast_calls == []


def test_profiler_and_listeners_cause_the_slow_path(fast_calls: list[bool]) -> None:
    run = compiled_single_op(lambda x: x.roll(1, 0))
    x = torch.randn(SIDE, SIDE)
    for _ in range(3):
        run(x)
    assert fast_calls == [True, True]
    with torch.profiler.profile() as profile:
        run(x)
    assert fast_calls[-1] is False
    assert any(event.key.startswith("dynaxla_") for event in profile.key_averages()), "the profile names the graph"
    received: list[Any] = []
    with events.listening(received.append):
        run(x)
    assert fast_calls[-1] is False
    assert [type(event) for event in received] == [events.ProgramRan]


def test_failed_kernel_does_not_disable_the_fast_path(fast_calls: list[bool]) -> None:
    run = compiled_single_op(lambda x, index: x.gather(0, index))
    x, valid, invalid = torch.randn(SIDE, SIDE), torch.zeros(SIDE, SIDE, dtype=torch.int64), torch.full((SIDE, SIDE), SIDE)
    for index in (valid, valid, invalid, valid):
        if index is invalid:
            with pytest.raises((RuntimeError, IndexError), match="out of bounds"):
                run(x, index)
        else:
            assert torch.equal(run(x, index), x.gather(0, index))
    assert fast_calls.count(True) >= 2


def test_forked_child_takes_the_slow_path(fast_calls: list[bool]) -> None:
    graph = AtenGraph("graph", make_fx(lambda x: [x.roll(1, 0)], tracing_mode="fake")(torch.ones(SIDE, SIDE)))
    runner = Xla(Options()).runner(graph)
    x = torch.randn(SIDE, SIDE)
    runner([x])
    runner([x])
    assert fast_calls.count(True) == 1
    fast_calls.clear()
    runner.cache.after_fork()
    assert torch.equal(runner([x])[0], x.roll(1, 0))
    assert fast_calls == []
