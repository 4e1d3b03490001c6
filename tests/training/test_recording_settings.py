"""What a recording sees and other threads do not."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable
from typing import Any

import torch

from dynaxla.runtime import private
from dynaxla.training.recording_settings import compiling, replaced_param_groups, without_torch_compile

OTHER = [{"params": [], "lr": 7.0}]


def elsewhere(look: Callable[[], Any]) -> Any:
    """What another thread sees."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(look()))
    thread.start()
    thread.join()
    return found[0]


def optimizer(lr: float = 0.5) -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=lr)


def test_groups_of_this_thread() -> None:
    one, two = optimizer(), optimizer(0.25)
    groups = one.param_groups

    def rates() -> list[float]:
        return [one.param_groups[0]["lr"], two.param_groups[0]["lr"]]

    with replaced_param_groups([(one, OTHER)]):
        assert isinstance(one, torch.optim.SGD)
        assert (type(one).__name__, type(one).__module__) == ("SGD", torch.optim.SGD.__module__)
        assert (rates(), elsewhere(rates)) == ([7.0, 0.25], [0.5, 0.25])
        with replaced_param_groups([(two, OTHER)]):
            assert rates() == [7.0, 7.0]
        one.param_groups[0]["lr"] = 8.0
        elsewhere(lambda: one.param_groups[0].update(lr=0.75))
    assert OTHER[0].pop("lr") == 8.0
    OTHER[0]["lr"] = 7.0
    assert type(one) is type(two) is torch.optim.SGD
    assert one.param_groups is groups
    assert rates() == [0.75, 0.25]


def test_groups_in_two_threads_at_once() -> None:
    """The optimizer's class is its own again when the last of them is done, whichever that is."""
    one = optimizer()
    entered, leave = threading.Event(), threading.Event()

    def records() -> None:
        with replaced_param_groups([(one, [{"params": [], "lr": 9.0}])]):
            entered.set()
            leave.wait()

    thread = threading.Thread(target=records)
    with replaced_param_groups([(one, OTHER)]):
        thread.start()
        entered.wait()
        assert one.param_groups[0]["lr"] == 7.0
    assert one.param_groups[0]["lr"] == 0.5
    assert type(one) is not torch.optim.SGD
    leave.set()
    thread.join()
    assert type(one) is torch.optim.SGD


def test_compiling_in_this_thread() -> None:
    flag = private.compiling_flag()
    for _ in range(2):
        with compiling(), compiling():
            assert torch.compiler.is_compiling()
            assert not elsewhere(lambda: bool(torch.compiler.is_compiling()))
            assert operator.eq(private.compiling_flag(), True)
            assert [private.compiling_flag() | False, private.compiling_flag() & True, True ^ private.compiling_flag()] == [
                True,
                True,
                False,
            ]
        assert not torch.compiler.is_compiling()
        assert private.compiling_flag() is flag


def test_compiled_functions_run_as_they_were_written() -> None:
    runs: list[int] = []

    @torch.compile(backend=lambda module, inputs: runs.append(1) or module.forward)
    def function(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    with without_torch_compile():
        assert function(torch.ones(1)).item() == 2
    assert not runs
    assert function(torch.ones(1)).item() == 2
    assert runs
