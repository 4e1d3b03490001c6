"""Tests of `observe`: it reports the code that a function runs, and its side effects."""

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
numpy_generator = np.random.default_rng(0)
random_object = random.Random(1)
buffer = io.StringIO()
bound_sleep = types.MethodType(time.sleep, 0)  # a bound method of a C function, as pybind11 creates them


def effects(function: Callable[..., Any], *args: Any) -> list[Effect]:
    """Returns the effects that `observe` reports for a call."""
    return list(observe(function, args, {})[1].effects)


def asks_for_input() -> None:
    sys.stdin = io.StringIO("a\n")
    try:
        input()
    finally:
        sys.stdin = sys.__stdin__


def evaluates_compiled_code() -> Any:
    return eval(compile("1 + 1", "<made>", "eval"))


def starts_a_thread() -> None:
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()


def warns() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always")  # by default, Python shows a warning only once
        warnings.showwarning = lambda *args, **_: print(args)
        warnings.warn("look", stacklevel=1)


def imports_numpy() -> float:
    import numpy

    return float(numpy.random.rand())


def switches_grad_mode() -> None:
    torch.set_grad_enabled(False)


# Functions that `observe` must report as impure.
IMPURE: dict[str, Callable[[], Any]] = {
    "print": lambda: print("x", file=buffer),
    "io.FileIO": lambda: io.FileIO(os.devnull, "ab").close(),
    "FileIO imported by name": lambda: FileIO(os.devnull, "ab").close(),
    "open": lambda: open(os.devnull).close(),
    "a method of a file": lambda: buffer.write("x"),
    "stdout": lambda: sys.stdout.write(""),
    "time": lambda: X * time.time(),
    "time.perf_counter": time.perf_counter,
    "time.sleep": lambda: time.sleep(0),
    "a bound C method": lambda: bound_sleep(),
    "datetime.now": lambda: datetime.datetime.now(),
    "random": lambda: X * random.random(),
    "random.gauss": lambda: random.gauss(0, 1),
    "a random.Random object": lambda: random_object.random(),
    "numpy.random": lambda: np.random.rand(),
    "a NumPy generator": lambda: numpy_generator.normal(),
    "a NumPy function imported by name": lambda: default_rng(0),
    "a local import": imports_numpy,
    "random.shuffle": lambda: random.shuffle([1, 2]),
    "os.getcwd": os.getcwd,
    "os.listdir": lambda: os.listdir("/"),
    "Path.read_text": lambda: Path(os.devnull).read_text(),
    "uuid": uuid.uuid4,
    "logging": lambda: logging.getLogger("dynaxla.test").warning("x"),
    "input": asks_for_input,
    "compiled code": evaluates_compiled_code,
    "a new thread": starts_a_thread,
    "a shown warning": warns,
    "torch.manual_seed": lambda: torch.manual_seed(0),
    "the seed of a generator": lambda: generator.manual_seed(0),
    "generator state": lambda: torch.get_rng_state(),
    "torch.save": lambda: torch.save(X, io.BytesIO()),
    "ndarray.tofile": lambda: np.zeros(1).tofile(os.devnull),
    "torch.set_num_threads": lambda: torch.set_num_threads(torch.get_num_threads()),
    "environment variable": lambda: os.putenv("DYNAXLA_TEST", "1"),
    "id": lambda: X * id(X),
    "thread id": lambda: X * threading.get_ident(),
    "current thread": lambda: threading.current_thread().name,
    "recursion limit": lambda: sys.setrecursionlimit(sys.getrecursionlimit()),
}
# Python does not report calls of classes that are written in C. `observe` finds their names in the code instead.
FILE_CLASSES = {"io.FileIO", "FileIO imported by name"}


@pytest.mark.parametrize("name", IMPURE)
def test_effects_are_reported(name: str) -> None:
    logging.getLogger("dynaxla.test").setLevel(logging.CRITICAL)
    found = effects(IMPURE[name])
    assert found, name
    if name in FILE_CLASSES:
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


def count_to_three() -> Iterator[int]:
    yield from range(3)


def pure_function() -> Any:
    values = sorted({"b": 1, "a": 2}.items())
    text = ",".join(f"{key}={value:.2f}" for key, value in values)
    numbers = [math.sqrt(number) + sum(count_to_three()) for number in map(abs, range(-3, 3))]
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


def test_unreported_constructor_is_refused_before_it_runs(tmp_path: Path) -> None:
    target = tmp_path / "created"

    def create_file() -> None:
        FileIO(target, "wb").close()

    with pytest.raises(Refused, match="FileIO"):
        observe(create_file, (), {}, refuse=True)
    assert not target.exists()


def test_pure_function_has_no_effects() -> None:
    assert effects(pure_function) == []


def test_backward_hooks_are_observed() -> None:
    calls: list[int] = []

    def hook(grad: torch.Tensor) -> torch.Tensor:
        return grad * time.time()

    def step() -> None:
        x = torch.ones(2, requires_grad=True)
        x.register_hook(hook)
        (x * 2).sum().backward()
        calls.append(1)

    _, observation = observe(step, (), {})
    assert hook.__code__ in observation.codes
    assert [effect.what for effect in observation.effects] == ["time.time"]
    assert "in hook" in observation.effects[0].where


def test_changed_torch_settings_are_reported() -> None:
    try:
        _, observation = observe(switches_grad_mode, (), {})
    finally:
        torch.set_grad_enabled(True)
    assert observation.changes_settings
    assert not observation.is_pure


def test_observe_restores_the_profile_function() -> None:
    events: list[str] = []

    def profile_function(frame: Any, event: str, argument: Any) -> None:
        events.append(event)

    def fails() -> None:
        raise ValueError("no")

    sys.setprofile(profile_function)
    try:
        observe(pure_function, (), {})
        assert sys.getprofile() is profile_function
        assert len(events) > 20
        with pytest.raises(ValueError, match="no"):
            observe(fails, (), {})
        assert sys.getprofile() is profile_function
        for name in ("time", "a bound C method", "FileIO imported by name"):
            with pytest.raises(Refused):
                observe(IMPURE[name], (), {}, refuse=True)
            assert sys.getprofile() is profile_function
    finally:
        sys.setprofile(None)
    observe(pure_function, (), {})
    assert sys.getprofile() is None


def test_enabled_profiler_stays_enabled() -> None:
    profiler = cProfile.Profile()
    profiler.enable()
    observe(pure_function, (), {})
    with pytest.raises(Refused):
        observe(time.time, (), {}, refuse=True)
    math.factorial(5)
    profiler.disable()
    assert any("factorial" in str(entry.code) for entry in profiler.getstats())


def test_nested_observations() -> None:
    inner: list[Any] = []

    def outer() -> None:
        inner.append(observe(pure_function, (), {})[1])
        time.time()

    _, observation = observe(outer, (), {})
    assert inner[0].is_pure
    assert [effect.what for effect in observation.effects] == ["time.time"]
    assert pure_function.__code__ in observation.codes


def test_other_threads_are_not_observed() -> None:
    stop = threading.Event()

    def busy() -> None:
        while not stop.is_set():
            time.time()

    thread = threading.Thread(target=busy)
    thread.start()
    try:
        assert effects(pure_function) == []
    finally:
        stop.set()
        thread.join()


hides_methods = pytest.mark.skipif(not _HIDES_METHODS, reason="this version of Python reports all calls to the profile function")


@hides_methods
def test_bound_c_methods_are_reported_in_the_observed_thread_only() -> None:
    """Checks also that `observe` frees its tool of sys.monitoring."""

    def in_another_thread() -> None:
        thread = threading.Thread(target=lambda: [bound_sleep() for _ in range(3)])
        thread.start()
        thread.join()

    assert "time.sleep" not in {effect.what for effect in effects(in_another_thread)}
    with pytest.raises(Refused, match=r"time\.sleep"):
        observe(lambda: bound_sleep(), (), {}, refuse=True)
    assert [sys.monitoring.get_tool(tool) for tool in range(6)] == [None] * 6


@hides_methods
def test_function_does_not_run_without_a_free_monitoring_tool() -> None:
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


def test_finalizers_run_by_the_garbage_collector_are_not_reported() -> None:
    class PrintsAtDeletion:
        def __del__(self) -> None:
            print("gone", file=sys.stderr)

    def create_garbage() -> None:
        item = PrintsAtDeletion()
        item.itself = item  # type: ignore[attr-defined]  # a cycle, which only the garbage collector deletes

    def allocate() -> int:
        return len([[] for _ in range(10_000)])

    before = gc.get_threshold()
    gc.collect()
    create_garbage()
    gc.set_threshold(50)  # collections begin while `allocate` runs
    try:
        _, observation = observe(allocate, (), {})
    finally:
        gc.set_threshold(*before)
    assert observation.is_pure
    assert not [code for code in observation.codes if code.co_name == "__del__"]
