"""Tests of engine/executable.py: errors of a compiled program's call, repetition, and memory that is returned to the system."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import pytest
import torch

from dynaxla.engine.executable import Executable, compilation_error, execution_error
from dynaxla.errors import ExecutionError, OutOfMemory
from dynaxla.observe import metrics
from dynaxla.runtime.late_checks import failure
from dynaxla.runtime.programs import XlaProgram
from support import internals


class NumberBuffers:
    """A binding whose arrays are its tensors.

    Attributes:
        frees_memory: True if memory can be freed after a call that had too little.
        donates_inputs: True if the program owns the inputs while it runs.
    """

    def __init__(self, frees_memory: bool = False, donates_inputs: bool = False) -> None:
        self.frees_memory, self.donates_inputs = frees_memory, donates_inputs
        self.exported: list[Any] = []
        self.abandoned: list[bool] = []

    def take(self, args: list[Any]) -> list[Any]:
        return args

    def arrays(self, tensors: Sequence[Any]) -> Sequence[Any]:
        return tensors

    def export(self, results: Sequence[Any], tensors: Sequence[Any]) -> list[Any]:
        self.exported.append(list(results))
        return list(results)

    def outputs(self, results: Sequence[Any], tensors: Sequence[Any]) -> list[Any]:
        return [*results, *tensors]

    def abandon(self, out_of_memory: bool, tensors: Sequence[Any]) -> bool:
        self.abandoned.append(out_of_memory)
        return self.frees_memory and out_of_memory

    def report(self, code: Any, checks: Any, name: str) -> None:
        if (error := failure(code, checks)) is not None:
            raise error


def executable(
    call: Callable[[Sequence[Any]], Sequence[Any]], binding: Any = None, checks: Any = (), is_large: bool = False, acts: bool = False
) -> Executable:
    return Executable("a program", XlaProgram(call, str, is_large), NumberBuffers() if binding is None else binding, checks, acts)


def test_executable_without_program() -> None:
    assert Executable("nothing", None, NumberBuffers())([1, 2]) == [1, 2]


def test_first_failed_check_is_raised() -> None:
    checks = [(IndexError, "out of range"), (ValueError, "not positive")]
    for code, (error, message) in enumerate(checks):
        with pytest.raises(error, match=message):
            executable(lambda _, code=code: ["result", code], checks=checks)([])
    assert executable(lambda _: ["result", 2], checks=checks)(["x"]) == ["result", "x"]
    assert executable(lambda _: ["result", 0])([]) == ["result", 0], "without checks the last result is an output"


@pytest.mark.parametrize(
    ("text", "kind"), [("RESOURCE_EXHAUSTED: no", OutOfMemory), ("Out of memory allocating", OutOfMemory), ("INTERNAL: no", ExecutionError)]
)
def test_errors_of_xla_name_the_program(text: str, kind: type[ExecutionError]) -> None:
    def fail(_: Sequence[Any]) -> Sequence[Any]:
        raise jax.errors.JaxRuntimeError(text)

    with pytest.raises(ExecutionError, match=rf"a program (.|\n)*{text}") as raised:
        executable(fail)([])
    assert type(raised.value) is kind is type(execution_error("a program", RuntimeError(text)))
    assert isinstance(raised.value.__cause__, jax.errors.JaxRuntimeError)


class FailingProgram:
    """A program whose first calls fail with `text`, and which counts its calls."""

    def __init__(self, failures: int, text: str = "RESOURCE_EXHAUSTED: no") -> None:
        self.failures, self.text, self.calls = failures, text, 0

    def __call__(self, arrays: Sequence[Any]) -> Sequence[Any]:
        self.calls += 1
        if self.calls <= self.failures:
            raise jax.errors.JaxRuntimeError(self.text)
        return ["result", *arrays]


def test_call_without_memory_is_repeated_once_if_torch_frees_some() -> None:
    binding, program = NumberBuffers(frees_memory=True), FailingProgram(1)
    metrics.reset()
    assert executable(program, binding)(["x"]) == ["result", "x", "x"]
    assert (program.calls, binding.abandoned, metrics.snapshot()["repeated"]) == (2, [True], 1)
    binding, program = NumberBuffers(frees_memory=True), FailingProgram(2)
    with pytest.raises(OutOfMemory):
        executable(program, binding)([])
    assert (program.calls, binding.abandoned) == (2, [True, False]), "the call is abandoned after each failure"


@pytest.mark.parametrize(
    ("frees_memory", "text", "acts"),
    [(False, "RESOURCE_EXHAUSTED: no", False), (True, "INTERNAL: no", False), (True, "RESOURCE_EXHAUSTED: no", True)],
)
def test_call_is_not_repeated_without_new_memory_or_with_impure_kernels(frees_memory: bool, text: str, acts: bool) -> None:
    binding, program = NumberBuffers(frees_memory), FailingProgram(1, text)
    with pytest.raises(ExecutionError):
        executable(program, binding, acts=acts)([])
    assert (program.calls, len(binding.abandoned)) == (1, 1)


def test_other_exceptions_are_raised_unchanged() -> None:
    def fail(_: Sequence[Any]) -> Sequence[Any]:
        raise AttributeError("a defect")

    with pytest.raises(AttributeError, match=r"^a defect$"):
        executable(fail)([])


def test_compilation_error_names_the_program() -> None:
    assert "XLA could not compile a program: no" in str(compilation_error("a program", ValueError("no")))


@pytest.mark.parametrize("is_large", [True, False])
def test_free_memory_is_returned_after_the_second_call_of_a_large_program(is_large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0
    returned = internals.returned_memory(monkeypatch, lambda: calls)
    program = executable(lambda _: [], is_large=is_large)
    for _ in range(5):
        calls += 1
        program([])
    assert returned == ([2] if is_large else [])


def test_call_is_a_region_of_torchs_profiler() -> None:
    program = executable(lambda _: [])
    with torch.profiler.profile(acc_events=True) as profile:  # torch 2.11 warns without
        program([])
    assert "a program" in {event.key for event in profile.key_averages()}


def test_interrupt_does_not_lose_results_written_in_place() -> None:
    """Ctrl-C after the program: the tensors get their new values before the exception is raised."""
    binding = NumberBuffers(donates_inputs=True)

    def interrupted(results: Sequence[Any], tensors: Sequence[Any]) -> list[Any]:
        binding.export = export
        raise KeyboardInterrupt

    export, binding.export = binding.export, interrupted
    with pytest.raises(KeyboardInterrupt):
        executable(lambda arrays: [array + 1 for array in arrays], binding)([1, 2])
    assert binding.exported == [[2, 3]]
    assert not binding.abandoned


def test_failed_program_with_donated_inputs_is_not_repeated() -> None:
    binding = NumberBuffers(frees_memory=True, donates_inputs=True)

    def fail(_: Sequence[Any]) -> Sequence[Any]:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: there is no more")

    with pytest.raises(OutOfMemory):
        executable(fail, binding)([1])
    assert binding.abandoned == [False]
    assert not binding.exported
