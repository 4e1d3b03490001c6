"""What a run of a step is seen to do: the code that ran, and its effects on the world."""

from __future__ import annotations

import cProfile
import datetime
import gc
import io
import logging
import math
import os
import random
import sys
import threading
import time
import types
import uuid
import warnings
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.random import default_rng
from torch import nn

from dynaxla.guards.observation import _HIDES_METHODS, Effect, Refused, observe

X = torch.arange(6.0)
generator = torch.Generator()
rng = np.random.default_rng(0)
draw = random.Random(1)
buffer = io.StringIO()
sleeps = types.MethodType(time.sleep, 0)  # as pybind11 makes methods


def effects(function: Callable[..., Any], *args: Any) -> list[Effect]:
    return list(observe(function, args, {})[1].effects)


def asks_for_input() -> None:
    sys.stdin = io.StringIO("a\n")
    try:
        input()
    finally:
        sys.stdin = sys.__stdin__


def makes_code() -> Any:
    return eval(compile("1 + 1", "<made>", "eval"))


def starts_a_thread() -> None:
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()


def warns() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always")  # else a warning that has been shown is not shown again
        warnings.showwarning = lambda *args, **_: print(args)
        warnings.warn("look", stacklevel=1)


def imports_numpy() -> float:
    import numpy

    return float(numpy.random.rand())


def switches_grad_mode() -> None:
    torch.set_grad_enabled(False)


IMPURE: dict[str, Callable[[], Any]] = {
    "print": lambda: print("x", file=buffer),
    "a file made by its class": lambda: io.FileIO(os.devnull, "ab").close(),
    "a class imported by name": lambda: FileIO(os.devnull, "ab").close(),
    "open": lambda: open(os.devnull).close(),
    "file method": lambda: buffer.write("x"),
    "stdout": lambda: sys.stdout.write(""),
    "time": lambda: X * time.time(),
    "clock": time.perf_counter,
    "sleep": lambda: time.sleep(0),
    "method of C": lambda: sleeps(),
    "now": lambda: datetime.datetime.now(),
    "random": lambda: X * random.random(),
    "gauss": lambda: random.gauss(0, 1),
    "own random": lambda: draw.random(),
    "numpy.random": lambda: np.random.rand(),
    "numpy's own": lambda: rng.normal(),
    "imported from numpy": lambda: default_rng(0),
    "imported inside": imports_numpy,
    "shuffle": lambda: random.shuffle([1, 2]),
    "os": os.getcwd,
    "listdir": lambda: os.listdir("/"),
    "path": lambda: Path(os.devnull).read_text(),
    "uuid": uuid.uuid4,
    "logging": lambda: logging.getLogger("dynaxla.test").warning("x"),
    "input": asks_for_input,
    "code": makes_code,
    "thread": starts_a_thread,
    "warning": warns,
    "seed": lambda: torch.manual_seed(0),
    "generator": lambda: generator.manual_seed(0),
    "state": lambda: torch.get_rng_state(),
    "save": lambda: torch.save(X, io.BytesIO()),
    "array to file": lambda: np.zeros(1).tofile(os.devnull),
    "threads": lambda: torch.set_num_threads(torch.get_num_threads()),
    "environment": lambda: os.putenv("DYNAXLA_TEST", "1"),
    "exit handler": lambda: sys.setrecursionlimit(sys.getrecursionlimit()),
}


@pytest.mark.parametrize("name", IMPURE)
def test_effects(name: str) -> None:
    logging.getLogger("dynaxla.test").setLevel(logging.CRITICAL)
    found = effects(IMPURE[name])
    assert found, name
    if "class" in name:
        assert any(effect.what == "_io.FileIO()" for effect in found)
    if name in ("print", "time", "random", "numpy.random", "logging"):
        assert __file__ in found[0].where


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Dropout(0.1), nn.LayerNorm(8), nn.Linear(8, 6))
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.body(x))
        return torch.utils.checkpoint.checkpoint(torch.tanh, x, use_reentrant=False)


def generated() -> Iterator[int]:
    yield from range(3)


def computes() -> Any:
    values = sorted({"b": 1, "a": 2}.items())
    text = ",".join(f"{key}={value:.2f}" for key, value in values)
    numbers = [math.sqrt(number) + sum(generated()) for number in map(abs, range(-3, 3))]
    array = np.linspace(0, 1, 6).astype(np.float32)
    numbers.append(float(array.sum()) + len(text) + isinstance(text, str) + max(numbers))
    values.append(("c", 3))
    return (X + torch.from_numpy(array)).sum() * numbers[0], dict(values), hash(text), zip(numbers, values, strict=False)


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "NAdam", "Rprop"])
def test_ordinary_steps_are_pure(name: str) -> None:
    net = Net()
    optimizer = getattr(torch.optim, name)(net.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.mse_loss(net(x).float(), x)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    for _ in range(2):  # a first call may import modules of torch
        _, observation = observe(step, (torch.randn(4, 6),), {})
        scheduler.step()
    assert observation.is_pure, list(map(str, observation.effects))
    assert step.__code__ in observation.codes
    assert Net.forward.__code__ in observation.codes


def test_what_shows_no_event_is_refused_before_it_runs(tmp_path: Path) -> None:
    target = tmp_path / "made"

    def makes() -> None:
        FileIO(target, "wb").close()

    with pytest.raises(Refused, match="FileIO"):
        observe(makes, (), {}, refuse=True)
    assert not target.exists()


def test_computing_is_pure() -> None:
    assert effects(computes) == []


def test_backward_hooks_are_seen() -> None:
    seen: list[int] = []

    def hook(grad: torch.Tensor) -> torch.Tensor:
        return grad * time.time()

    def step() -> None:
        x = torch.ones(2, requires_grad=True)
        x.register_hook(hook)
        (x * 2).sum().backward()
        seen.append(1)

    _, observation = observe(step, (), {})
    assert hook.__code__ in observation.codes
    assert [effect.what for effect in observation.effects] == ["time.time"]
    assert "in hook" in observation.effects[0].where


def test_settings_that_stay_changed() -> None:
    try:
        _, observation = observe(switches_grad_mode, (), {})
    finally:
        torch.set_grad_enabled(True)
    assert observation.changes_settings
    assert not observation.is_pure


def test_the_profile_function_is_as_before() -> None:
    events: list[str] = []

    def mine(frame: Any, event: str, argument: Any) -> None:
        events.append(event)

    def fails() -> None:
        raise ValueError("no")

    sys.setprofile(mine)
    try:
        observe(computes, (), {})
        assert sys.getprofile() is mine
        assert len(events) > 20
        with pytest.raises(ValueError, match="no"):
            observe(fails, (), {})
        assert sys.getprofile() is mine
        for name in ("time", "method of C", "a class imported by name"):
            with pytest.raises(Refused):
                observe(IMPURE[name], (), {}, refuse=True)
            assert sys.getprofile() is mine
    finally:
        sys.setprofile(None)
    observe(computes, (), {})
    assert sys.getprofile() is None


def test_within_a_profiler() -> None:
    profiler = cProfile.Profile()
    profiler.enable()
    observe(computes, (), {})
    with pytest.raises(Refused):
        observe(time.time, (), {}, refuse=True)
    math.factorial(5)
    profiler.disable()
    assert any("factorial" in str(entry.code) for entry in profiler.getstats())


def test_nested() -> None:
    inner: list[Any] = []

    def outer() -> None:
        inner.append(observe(computes, (), {})[1])
        time.time()

    _, observation = observe(outer, (), {})
    assert inner[0].is_pure
    assert [effect.what for effect in observation.effects] == ["time.time"]
    assert computes.__code__ in observation.codes


def test_other_threads_are_not_observed() -> None:
    stop = threading.Event()

    def busy() -> None:
        while not stop.is_set():
            time.time()

    thread = threading.Thread(target=busy)
    thread.start()
    try:
        assert effects(computes) == []
    finally:
        stop.set()
        thread.join()


hides_methods = pytest.mark.skipif(not _HIDES_METHODS, reason="this Python shows all calls to the profile function")


@hides_methods
def test_methods_of_c_are_shown_in_one_thread_and_to_nobody_afterwards() -> None:
    def in_another_thread() -> None:
        thread = threading.Thread(target=lambda: [sleeps() for _ in range(3)])
        thread.start()
        thread.join()

    assert "time.sleep" not in {effect.what for effect in effects(in_another_thread)}
    with pytest.raises(Refused, match=r"time\.sleep"):
        observe(lambda: sleeps(), (), {}, refuse=True)
    assert [sys.monitoring.get_tool(tool) for tool in range(6)] == [None] * 6


@hides_methods
def test_without_a_free_tool_nothing_is_run() -> None:
    ran: list[int] = []
    taken = [tool for tool in range(6) if sys.monitoring.get_tool(tool) is None]
    for tool in taken:
        sys.monitoring.use_tool_id(tool, "a debugger")
    try:
        with pytest.raises(Refused, match="six tool ids"):
            observe(lambda: ran.append(1), (), {})
    finally:
        for tool in taken:
            sys.monitoring.free_tool_id(tool)
    assert not ran


def test_finalizers_that_a_collection_runs_are_not_the_functions() -> None:
    class Speaks:
        def __del__(self) -> None:
            print("gone", file=sys.stderr)

    def leave() -> None:
        speaks = Speaks()
        speaks.itself = speaks  # type: ignore[attr-defined]

    def allocate() -> int:
        return len([[] for _ in range(10_000)])

    before = gc.get_threshold()
    gc.collect()
    leave()
    gc.set_threshold(50)
    try:
        _, observation = observe(allocate, (), {})
    finally:
        gc.set_threshold(*before)
    assert observation.is_pure
    assert not [code for code in observation.codes if code.co_name == "__del__"]
