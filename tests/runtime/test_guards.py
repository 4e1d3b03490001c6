"""Tests of checks that tensors and dicts are unchanged, with the fast and the public entry points."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from dynaxla.runtime import guards


def test_argument_check_detects_changes_of_tensors(way: str) -> None:
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


def test_argument_check_keeps_no_tensor_alive(way: str) -> None:
    x = torch.randn(3)
    reference = weakref.ref(x)
    check_arguments = guards.ArgumentCheck([x])
    del x
    gc.collect()
    assert reference() is None
    assert check_arguments.matches(torch.randn(3))


def test_empty_argument_check(way: str) -> None:
    assert guards.ArgumentCheck([]).matches()


def test_dict_check_detects_writes(way: str) -> None:
    """Without dict versions, a check always reports a change, which is safe."""
    first: dict[Any, Any] = {"a": 1}
    second: dict[Any, Any] = {}
    check = guards.DictCheck([first, second])
    assert check.are_unchanged() == (way == "fast")
    first["a"] = 2
    assert not check.are_unchanged()
    first["a"] = 1
    assert not check.are_unchanged(), "the dict was written to, though its value was restored"
    later_check = guards.DictCheck([first, second])
    assert later_check.are_unchanged() == (way == "fast")
    second["b"] = 1
    assert not later_check.are_unchanged()
    last_check = guards.DictCheck([second])
    del second["b"]
    assert not last_check.are_unchanged()


def test_graph_is_captured_again_for_another_current_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As graphs require that create tensors on "cuda"."""
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
    guards.guard_current_gpu()  # has no effect outside a capture


answer: list[int] = [0]


def ask() -> int:
    return answer[0]


def test_graph_is_captured_again_for_another_result_of_a_function() -> None:
    captured = []

    def backend(module: torch.fx.GraphModule, _: Any) -> Any:
        captured.append(answer[0])
        guards.guard_on_result(__name__, ("ask",))
        return module

    compiled = torch.compile(lambda x: x + 1, backend=backend)
    for answer[0] in (0, 0, 1, 1, 2):
        compiled(torch.ones(3))
    assert captured == [0, 1, 2]
    guards.guard_on_result(__name__, ("ask",))  # has no effect outside a capture
