"""Tests of training/recording_settings.py: settings that only the recording thread sees."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable
from typing import Any

import torch

from dynaxla.runtime import private
from dynaxla.training.recording_settings import compiling, replaced_param_groups, without_torch_compile

OTHER = [{"params": [], "lr": 7.0}]


def in_other_thread(query: Callable[[], Any]) -> Any:
    """Returns the result of a function in another thread."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(query()))
    thread.start()
    thread.join()
    return results[0]


def optimizer(lr: float = 0.5) -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=lr)


def test_replaced_groups_of_this_thread() -> None:
    first, second = optimizer(), optimizer(0.25)
    groups = first.param_groups

    def rates() -> list[float]:
        return [first.param_groups[0]["lr"], second.param_groups[0]["lr"]]

    with replaced_param_groups([(first, OTHER)]):
        assert isinstance(first, torch.optim.SGD)
        assert (type(first).__name__, type(first).__module__) == ("SGD", torch.optim.SGD.__module__)
        assert (rates(), in_other_thread(rates)) == ([7.0, 0.25], [0.5, 0.25])
        with replaced_param_groups([(second, OTHER)]):
            assert rates() == [7.0, 7.0]
        first.param_groups[0]["lr"] = 8.0
        in_other_thread(lambda: first.param_groups[0].update(lr=0.75))
    assert OTHER[0].pop("lr") == 8.0
    OTHER[0]["lr"] = 7.0
    assert type(first) is type(second) is torch.optim.SGD
    assert first.param_groups is groups
    assert rates() == [0.75, 0.25]


def test_replaced_groups_in_two_threads_at_once() -> None:
    """The last thread that leaves restores the optimizer's class, whichever thread that is."""
    first = optimizer()
    entered, leave = threading.Event(), threading.Event()

    def record() -> None:
        with replaced_param_groups([(first, [{"params": [], "lr": 9.0}])]):
            entered.set()
            leave.wait()

    thread = threading.Thread(target=record)
    with replaced_param_groups([(first, OTHER)]):
        thread.start()
        entered.wait()
        assert first.param_groups[0]["lr"] == 7.0
    assert first.param_groups[0]["lr"] == 0.5
    assert type(first) is not torch.optim.SGD
    leave.set()
    thread.join()
    assert type(first) is torch.optim.SGD


def test_compiling_in_this_thread() -> None:
    flag = private.compiling_flag()
    for _ in range(2):
        with compiling(), compiling():
            assert torch.compiler.is_compiling()
            assert not in_other_thread(lambda: bool(torch.compiler.is_compiling()))
            assert operator.eq(private.compiling_flag(), True)
            assert [private.compiling_flag() | False, private.compiling_flag() & True, True ^ private.compiling_flag()] == [
                True,
                True,
                False,
            ]
        assert not torch.compiler.is_compiling()
        assert private.compiling_flag() is flag


def test_without_torch_compile() -> None:
    runs: list[int] = []

    @torch.compile(backend=lambda module, inputs: runs.append(1) or module.forward)
    def function(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    with without_torch_compile():
        assert function(torch.ones(1)).item() == 2
    assert not runs
    assert function(torch.ones(1)).item() == 2
    assert runs
