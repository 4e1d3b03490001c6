"""A compiled program's call: what it raises, when, and what it leaves to the heap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import pytest
import torch

from dynaxla.engine.executable import Executable, compilation_error, execution_error
from dynaxla.errors import ExecutionError, OutOfMemory
from dynaxla.runtime import heap
from dynaxla.runtime.programs import XlaProgram


class Numbers:
    """Buffers whose arrays are their tensors. late: whether a check's code is known a call later."""

    def __init__(self, late: bool = False) -> None:
        self.late = late

    def take(self, args: list[Any]) -> list[Any]:
        return args

    def arrays(self, tensors: Sequence[Any]) -> Sequence[Any]:
        return tensors

    def export(self, results: Sequence[Any]) -> list[Any]:
        return list(results)

    def outputs(self, results: Sequence[Any], tensors: Sequence[Any]) -> list[Any]:
        return [*results, *tensors]

    def code(self, result: Any) -> int | None:
        return None if self.late else int(result)


def executable(call: Callable[[Sequence[Any]], Sequence[Any]], binding: Any = None, checks: Any = (), is_large: bool = False) -> Executable:
    return Executable("a program", XlaProgram(call, str, is_large), Numbers() if binding is None else binding, checks)


def test_nothing_to_compute_is_not_called() -> None:
    assert Executable("nothing", None, Numbers())([1, 2]) == [1, 2]


def test_the_first_failed_check_is_raised_and_its_number_is_no_output() -> None:
    checks = [(IndexError, "out of range"), (ValueError, "not positive")]
    for code, (error, message) in enumerate(checks):
        with pytest.raises(error, match=message):
            executable(lambda _, code=code: ["result", code], checks=checks)([])
    assert executable(lambda _: ["result", 2], checks=checks)(["x"]) == ["result", "x"]
    assert executable(lambda _: ["result", 0], Numbers(late=True), checks)([]) == ["result"], "a GPU's is not waited for"
    assert executable(lambda _: ["result", 0])([]) == ["result", 0], "without checks the last result is an output"


@pytest.mark.parametrize(
    ("text", "kind"), [("RESOURCE_EXHAUSTED: no", OutOfMemory), ("Out of memory allocating", OutOfMemory), ("INTERNAL: no", ExecutionError)]
)
def test_what_xla_raises_names_the_program(text: str, kind: type[ExecutionError]) -> None:
    def fail(_: Sequence[Any]) -> Sequence[Any]:
        raise jax.errors.JaxRuntimeError(text)

    with pytest.raises(ExecutionError, match=rf"a program (.|\n)*{text}") as raised:
        executable(fail)([])
    assert type(raised.value) is kind is type(execution_error("a program", RuntimeError(text)))
    assert isinstance(raised.value.__cause__, jax.errors.JaxRuntimeError)


def test_a_defect_of_ours_is_no_error_of_xlas() -> None:
    def fail(_: Sequence[Any]) -> Sequence[Any]:
        raise AttributeError("a defect")

    with pytest.raises(AttributeError, match=r"^a defect$"):
        executable(fail)([])


def test_a_program_that_cannot_be_compiled_is_named() -> None:
    assert "XLA could not compile a program: no" in str(compilation_error("a program", ValueError("no")))


@pytest.mark.parametrize("is_large", [True, False])
def test_free_memory_goes_back_after_the_second_call_of_a_large_program(is_large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    returned: list[int] = []
    calls = 0
    monkeypatch.setattr(heap, "return_freed_memory", lambda: returned.append(calls))
    program = executable(lambda _: [], is_large=is_large)
    for _ in range(5):
        calls += 1
        program([])
    assert returned == ([2] if is_large else [])


def test_a_call_is_a_region_of_torchs_profiler() -> None:
    program = executable(lambda _: [])
    with torch.profiler.profile() as profile:
        program([])
    assert "a program" in {event.key for event in profile.key_averages()}
