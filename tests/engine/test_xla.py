"""Tests of engine/xla.py, the default engine: one program for each combination of sizes and numbers, compiled once."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest
import torch
from jax import lax
from torch._functorch._aot_autograd import descriptors
from torch.fx.experimental.proxy_tensor import make_fx

from dynaxla.capture.graph import AtenGraph
from dynaxla.config import Options
from dynaxla.engine.build import build
from dynaxla.engine.compile import compile_lowered, lower, trace
from dynaxla.engine.retrace import Retrace
from dynaxla.engine.unit import CompilationUnit
from dynaxla.engine.xla import CompiledGraph, Xla
from dynaxla.errors import CompilationError, ForkError, OutOfMemory
from dynaxla.lowering import Interpreter, Settings
from dynaxla.lowering.implementations import Implementation
from dynaxla.lowering.ops.matmul import CONTRACTION
from dynaxla.observe import metrics
from dynaxla.runtime import programs, transfer
from support import internals


def program(function: Callable[..., Any], *inputs: Any, **options: Any) -> CompiledGraph:
    graph = AtenGraph("graph", make_fx(function, tracing_mode="symbolic")(*inputs))
    metrics.reset()
    return Xla(Options(**options)).runner(graph)


def compilation_count() -> int:
    return metrics.snapshot().get("compile", 0)


def test_one_executable_for_each_combination_of_sizes() -> None:
    runner = program(lambda x, n: [x * n, n + 1], torch.ones(4), 3)
    for number, (size, factor) in enumerate([(4, 3), (5, 3), (4, 2)], start=1):
        for _ in range(2):
            x = torch.randn(size)
            args = [x, factor]
            result, following = runner(args)
            assert torch.equal(result, x * factor)
            assert (following, args) == (factor + 1, []), "a caller's list must not keep tensors alive"
        assert compilation_count() == len(runner.executables()) == number


def test_numbers_of_other_types_have_other_keys() -> None:
    """1, 1.0 and True are equal, but results computed with them have different dtypes."""
    runner = program(lambda x, n: [x * n], torch.ones(4), 3)
    keys = {runner.unit.sizes.key([torch.ones(4), number]) for number in (1, True, 1.0)}
    assert len(keys) == 3


def test_graph_without_computation_is_not_compiled() -> None:
    runner = program(lambda x: [x.t(), x, x.shape[0] * 2], torch.ones(4, 3))
    x = torch.ones(5, 2)
    transposed, same, number = runner([x])
    assert transposed.data_ptr() == x.data_ptr()
    assert (same is x, number) == (True, 10)
    assert compilation_count() == 0
    assert runner.executables()[0].program is None


def test_failed_compilation_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = program(lambda x: [x.sin()], torch.ones(4))

    def refuse(*_: Any) -> None:
        raise jax.errors.JaxRuntimeError("INTERNAL: no")

    with monkeypatch.context() as patch:
        internals.compiler(patch, refuse)
        with pytest.raises(CompilationError, match="could not compile graph"):
            runner([torch.ones(4)])
    assert runner.executables() == []
    torch.testing.assert_close(runner([torch.ones(4)])[0], torch.ones(4).sin())


def test_cuda_options_follow_torchs_settings_and_fall_back_to_cublas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only this option gives cuDNN's gradients of attention a fixed order of sums."""
    runner = program(lambda x: [x.sin()], torch.ones(4), xla={"xla_dump_to": "somewhere"})
    runner.unit.platform = "cuda"
    used_options: list[dict[str, Any]] = []

    def refuse(lowered: Any, device: Any, options: dict[str, Any], *_: Any) -> None:
        used_options.append(options)
        raise jax.errors.JaxRuntimeError("INTERNAL: Couldn't find output tile sizes")

    internals.compiler(monkeypatch, refuse)
    traced = jax.jit(lax.neg).trace(1.0)
    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic)
        try:
            with pytest.raises(CompilationError):
                compile_lowered(runner.unit, traced.lower(), traced, Settings.current("cuda"))
        finally:
            torch.use_deterministic_algorithms(False)
    assert ["xla_gpu_exclude_nondeterministic_ops" in options for options in used_options] == [False, False, True, True]
    assert [options.get("xla_gpu_enable_triton_gemm") for options in used_options] == [None, False, None, False]
    assert {options["xla_dump_to"] for options in used_options} == {"somewhere"}


@pytest.mark.parametrize("engine", [Xla, Retrace])
def test_other_settings_need_another_program(engine: type[Xla | Retrace]) -> None:
    """The StableHLO may be the same, but XLA's options differ."""
    runner = engine(Options()).runner(AtenGraph("graph", make_fx(lambda x: [x + 1])(torch.ones(4))))
    runner.unit.platform, runner._has_one_key = "cuda", False
    try:
        for deterministic, count in ((False, 1), (True, 2), (False, 2), (True, 2)):
            torch.use_deterministic_algorithms(deterministic)
            assert torch.equal(runner([torch.ones(4)])[0], torch.full((4,), 2.0))
            assert len(runner.executables()) == count
    finally:
        torch.use_deterministic_algorithms(False)


def missing(problem: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """An implementation with a custom call that this machine does not have."""
    result: jax.Array = CONTRACTION.by_name["xla"].run(problem, x, y)
    return jax.ffi.ffi_call("there is no such call", result)(result)


@pytest.mark.parametrize("engine", [Xla, Retrace])
def test_implementation_that_the_machine_lacks_is_dropped(
    engine: type[Xla | Retrace], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After one refusal, later sizes do not try the implementation. Other errors are raised."""
    implementation = Implementation("missing", missing, (), lambda problem: True, lambda problem: True, is_refusable=True)
    internals.implementations_of(monkeypatch, CONTRACTION, {"missing": implementation, **CONTRACTION.by_name})
    graph = AtenGraph("graph", make_fx(lambda x: [x @ x], tracing_mode="symbolic")(torch.ones(4, 4)))
    runner = engine(Options()).runner(graph)
    for size in (4, 5):
        x = torch.randn(size, size)
        torch.testing.assert_close(runner([x])[0], x @ x)
    (message,) = [record.getMessage() for record in caplog.records if record.name == "dynaxla"]
    assert message.startswith("graph is compiled again without optional kernels (contraction=missing), which XLA refused: ")
    assert [item.program is not None for item in runner.executables()] == [True, True]

    def refuse(*_: Any) -> None:
        raise jax.errors.JaxRuntimeError("INTERNAL: no")

    internals.compiler(monkeypatch, refuse)
    with pytest.raises(CompilationError, match="INTERNAL: no"):
        runner([torch.ones(6, 6)])


def test_concurrent_calls_compile_once() -> None:
    runner = program(lambda x: [x.sin()], torch.ones(4))
    barrier, results = threading.Barrier(4), []

    def call() -> None:
        barrier.wait()
        results.append(runner([torch.ones(4)])[0])

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.testing.assert_close(results, [torch.ones(4).sin()] * 4)
    assert compilation_count() == 1


def test_each_executable_is_dumped_under_its_own_name(tmp_path: Path) -> None:
    runner = program(lambda x: [x.sin()], torch.ones(4), dump=str(tmp_path))
    for size in (2, 3, 2):
        runner([torch.ones(size)])
    assert {file.name.partition(".")[0] for file in tmp_path.iterdir()} == {"graph", "graph_2"}


def test_forked_child_uses_torch_or_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA was used before the fork. Its programs are neither destroyed nor called in the child."""
    for fallback in ("kernel", "error"):
        runner = program(lambda x: [x.sin()], torch.ones(4), fallback=fallback)
        runner([torch.ones(4)])
        left: list[object] = []
        internals.objects_kept_from_destruction(monkeypatch, left)
        runner.cache.after_fork()
        assert len(left) == 1
        assert runner.executables() == []
        internals.needed_fallbacks(monkeypatch)
        internals.xla_is_lost(monkeypatch)
        before = compilation_count()
        if fallback == "kernel":
            assert torch.equal(runner([torch.ones(4)])[0], torch.ones(4).sin())
        else:
            with pytest.raises(ForkError):
                runner([torch.ones(4)])
        assert compilation_count() == before
        monkeypatch.undo()


def test_failed_check_on_gpu_leaves_inputs_unchanged() -> None:
    """torch writes to inputs after the call, before the checks are read. Here the program is compiled for the CPU."""
    x, index = torch.zeros(3), torch.tensor([0, 2])
    module = make_fx(lambda x, index: [x + 1, x[index]], tracing_mode="fake")(x, index)
    for position, node in enumerate(module.graph.find_nodes(op="placeholder")):
        node.meta["desc"] = descriptors.PlainAOTInput(position)
    written = descriptors.InputMutationAOTOutput(descriptors.PlainAOTInput(0))
    module.graph.output_node().meta["desc"] = [written, descriptors.PlainAOTOutput(0)]
    runner = CompiledGraph(CompilationUnit(AtenGraph("graph", module), Options()))
    unit = runner.unit
    unit.device, unit.platform, device = torch.device("cuda", 0), "cuda", unit.jax_device
    unit.interpreter = Interpreter(module, "cuda")
    specialised = unit.specialise([x, index])
    assert specialised.function is not None
    traced, _, facts = trace(unit, specialised.function, specialised.buffers)
    call = programs.compile_lowered(lower(unit, traced), device, {}).call
    arrays = [transfer.import_tensor(tensor, device) for tensor in (torch.zeros(2, dtype=torch.int32), torch.full((3,), 5.0))]
    for numbers, expected, failed in (([0, 2], 6, 0), ([0, 3], 5, 1)):
        new, _, code = map(transfer.export_array, call([*arrays, transfer.import_tensor(torch.tensor(numbers), device)]))
        assert (new.tolist(), int(code)) == ([expected] * 3, len(facts.checks) * (1 - failed))


@pytest.mark.parametrize(("failures", "torch_frees_memory", "trials"), [(1, True, 2), (1, False, 1), (2, True, 2)])
def test_compilation_without_memory_is_repeated_if_torch_frees_some(
    failures: int, torch_frees_memory: bool, trials: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = program(lambda x: [x + 1], torch.ones(4))
    attempts: list[int] = []
    original = programs.compile_lowered

    def compile_lowered(*args: Any) -> programs.XlaProgram:
        attempts.append(len(attempts))
        if len(attempts) <= failures:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: autotuning")
        return original(*args)

    internals.compiler(monkeypatch, compile_lowered)
    internals.memory_to_give_back(monkeypatch, torch_frees_memory)
    with contextlib.nullcontext() if failures < trials else pytest.raises(OutOfMemory):
        build(runner.unit, runner.unit.specialise([torch.ones(4)]))
    assert len(attempts) == trials
