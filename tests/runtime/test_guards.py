"""Whether tensors and dicts are as they were, by the fast way and by the public one."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from dynaxla.runtime import guards


def test_argument_check_sees_every_change(way: str) -> None:
    x, y = torch.randn(3, 4), torch.randn(2)
    check_arguments = guards.ArgumentCheck([x, y])
    assert check_arguments.matches(x, y)
    assert check_arguments.matches(torch.randn(3, 4), torch.randn(2))
    assert not check_arguments.matches(torch.randn(4, 3).t(), y)
    assert not check_arguments.matches(x.double(), y)
    assert not check_arguments.matches(x, torch.randn(3))
    assert not check_arguments.matches(torch.nn.Parameter(x), y)
    complex_tensor = torch.randn(3, dtype=torch.complex64)
    check_complex = guards.ArgumentCheck([complex_tensor])
    assert not check_complex.matches(complex_tensor.conj())
    assert not check_arguments.matches(x.to("meta"), y)
    negative = complex_tensor.conj().imag
    check_negative = guards.ArgumentCheck([negative])
    assert check_negative.matches(negative)
    assert not check_negative.matches(complex_tensor.imag)


def test_an_argument_check_holds_no_tensor(way: str) -> None:
    x = torch.randn(3)
    gone = weakref.ref(x)
    check_arguments = guards.ArgumentCheck([x])
    del x
    gc.collect()
    assert gone() is None
    assert check_arguments.matches(torch.randn(3))


def test_no_tensors_match_no_tensors(way: str) -> None:
    assert guards.ArgumentCheck([]).matches()


def test_dicts_that_change(way: str) -> None:
    """Without a version the answer is always no, which is never wrong."""
    one: dict[Any, Any] = {"a": 1}
    other: dict[Any, Any] = {}
    checked = guards.DictCheck([one, other])
    assert checked.are_unchanged() == (way == "fast")
    one["a"] = 2
    assert not checked.are_unchanged()
    one["a"] = 1
    assert not checked.are_unchanged(), "what was put back has been written"
    again = guards.DictCheck([one, other])
    assert again.are_unchanged() == (way == "fast")
    other["b"] = 1
    assert not again.are_unchanged()
    last = guards.DictCheck([other])
    del other["b"]
    assert not last.are_unchanged()


def test_another_current_gpu_is_captured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a graph that makes tensors on "cuda" must be."""
    current, captured = [0], []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])

    def backend(module: torch.fx.GraphModule, _: Any) -> Any:
        captured.append(current[0])
        guards.guard_current_gpu()
        return module

    compiled = torch.compile(lambda x: x + 1, backend=backend)
    for current[0] in (0, 0, 1, 1, 0):
        compiled(torch.ones(3))
    assert captured == [0, 1]
    guards.guard_current_gpu()  # outside of a capture there is nothing to guard


answer: list[int] = [0]


def ask() -> int:
    return answer[0]


def test_another_answer_is_captured_anew() -> None:
    captured = []

    def backend(module: torch.fx.GraphModule, _: Any) -> Any:
        captured.append(answer[0])
        guards.guard_on_result(__name__, ("ask",))
        return module

    compiled = torch.compile(lambda x: x + 1, backend=backend)
    for answer[0] in (0, 0, 1, 1, 2):
        compiled(torch.ones(3))
    assert captured == [0, 1, 2]
    guards.guard_on_result(__name__, ("ask",))  # outside of a capture there is nothing to guard
