"""`dynaxla.explain`: a function is compiled as if for the first time, called a few times, and all is told."""

from __future__ import annotations

import contextlib
import functools
import inspect
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import torch

from ..backend import dynaxla, dynaxla_retrace
from ..errors import ArgumentError
from ..observe import events
from ..runtime import private
from ..training.step import CompiledStep
from .advice import advise
from .captures import Frames
from .collecting import Collector
from .explanation import Explanation
from .line_costs import Profiler, costs
from .restoring import restored

# Later calls, and the part of the first call's time that they may take together beyond the first of them.
_CALLS = 4
_PART = 0.5


def explain(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Explanation:
    """Compile a function with dynaxla as if for the first time, call it, and tell what became of it: graphs and why they broke, programs,
    forms, fallbacks, copies, memory, times, the costliest lines of the user's code, and what to do next.

    function: a function or module, compiled or not, or a step of `dynaxla.compile_step`. What is compiled already is compiled anew, with
    its own options (but for compile="background"), and stays as it is. args, kwargs: what it is called with.

    It is called two to seven times, as a loop would call it. Afterwards all that it leads to is as before: tensors and their gradients,
    optimizers, containers, attributes, closures, globals that its code names, random generators of torch, Python and NumPy. Meanwhile there
    is a second copy of those tensors. Not undone is what it does outside of these: files, prints, other processes, and what only other code
    reaches. A tensor that was written to has a new version, which a backward pass that was begun before may refuse. Programs are compiled
    without the cache directory, whose programs do not know the user's lines. Threads that were there before are not told of.

    Returns: an `Explanation`: print it, `save("page.html")` it, or let a notebook show it. What the first call raises is in it, not raised.
    Raises: ArgumentError for what is compiled with another backend.
    """
    subject = _subject(function)
    session = Session()
    error, later = "", list[tuple[float, float, float]]()
    with restored(subject.function, args, kwargs), session, subject.compiled() as call:
        start = time.perf_counter()
        try:
            for _ in range(subject.eager_calls):
                call(*args, **kwargs)
            start = time.perf_counter()
            call(*args, **kwargs)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        seconds = time.perf_counter() - start
        session.first_is_over()
        while not error and len(later) < _CALLS and (not later or sum(spent for spent, _, _ in later) < _PART * seconds):
            (xla, by_torch), start = session.run_seconds(), time.perf_counter()
            try:
                call(*args, **kwargs)
            except Exception as raised:
                session.notes.append(f"Call {len(later) + 2} with the same arguments failed: {type(raised).__name__}: {raised}")
                break
            spent, (xla_now, torch_now) = time.perf_counter() - start, session.run_seconds()
            later.append((spent, xla_now - xla, torch_now - by_torch))
    return session.told(subject.name, seconds, later=later, error=error)


class Session:
    """What listens, and what comes of it. Attributes: notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self._profiler = Profiler()
        self._collector = Collector(self._profiler)
        self._frames = Frames(self._collector.counts)
        self._phases: Mapping[str, float] = {}
        self._dynamo = 0.0
        self._counts: dict[int, int] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Session:
        self._stack.enter_context(events.heard(self._collector))
        self._stack.enter_context(self._frames.heard())
        return self

    def __exit__(self, *_: object) -> None:
        self._profiler.end()
        self._stack.close()

    def run_seconds(self) -> tuple[float, float]:
        """Of all programs so far, and of torch's kernels that run graphs without one."""
        return self._collector.run_seconds(), self._collector.run_seconds(by_torch=True)

    def first_is_over(self) -> None:
        """What comes now are later calls."""
        self._frames.take()
        self._phases, self._dynamo = dict(self._collector.phases), self._frames.seconds
        self._counts = {id(executable): count for executable, count in self._collector.later_runs()}

    def told(self, name: str, seconds: float, *, later: list[tuple[float, float, float]] | None = None, error: str = "") -> Explanation:
        """later: the seconds of later calls, and those of them that `run_seconds` tells apart; None for a script."""
        collector, is_script = self._collector, later is None
        if is_script:
            self._phases, self._dynamo = dict(collector.phases), self._frames.seconds
        calls = len(later) if later else 1
        runs = [(executable, (count - self._counts.get(id(executable), 0)) / calls) for executable, count in collector.later_runs()]
        lines, unplaced = costs(self._profiler, runs, collector.lines_by_torch())
        captured = collector.captured()
        known = [item.ended for item in captured if item.ended is not None]
        breaks = _together([*known, *self._frames.breaks(known)])
        usual, xla, by_torch = sorted(later)[len(later) // 2] if later else (None, None, 0.0)
        if is_script:
            xla, by_torch = self.run_seconds()
        if self._profiler.problem:
            self.notes.append(f"Lines of XLA's programs have no costs: {self._profiler.problem}.")
        elif unplaced is None and captured and not error:
            self.notes.append("Lines have no costs: no program ran a second time, and a first run is not measured.")
        found = Explanation(
            name, captured, breaks, tuple(self._frames.recompilations()), _named(self._phases, self._dynamo, seconds), seconds,
            usual, xla, lines, unplaced,
            tuple(f"{step} runs {way}: {reason}" for step, way, reason in collector.ways), tuple(self.notes), _versions(),
            is_script, error, by_torch,
        )  # fmt: skip
        return replace(found, advice=advise(found))


# What phases are called, in turn.
_PHASES = {
    "capture": "AOTAutograd, recording, imports",
    "trace": "tracing to JAX",
    "lower": "lowering to StableHLO",
    "tune": "measuring forms",
    "compile": "XLA's compiler",
    "first run": "first runs of programs",
    "later runs": "later runs of programs",
}


def _named(phases: Mapping[str, float], dynamo: float, seconds: float) -> dict[str, float]:
    found = {"TorchDynamo": dynamo, **{name: phases.get(phase, 0.0) for phase, name in _PHASES.items()}}
    found["Python, torch and the rest"] = max(0.0, seconds - sum(found.values()))
    return {name: spent for name, spent in found.items() if spent}


def _together(breaks: list[Any]) -> tuple[Any, ...]:
    """Those that are alike as one, with their count."""
    counted: dict[Any, int] = {}
    for item in breaks:
        counted[item] = counted.get(item, 0) + 1
    return tuple(replace(item, count=count) for item, count in counted.items())


def _versions() -> str:
    from .. import __version__

    device = f", {torch.get_num_threads()} threads" if not torch.cuda.is_available() else f", {torch.cuda.get_device_name()}"
    return f"dynaxla {__version__}, torch {torch.__version__}, jax {jax.__version__}, Python {platform.python_version()}{device}"


@dataclass(frozen=True)
class _Subject:
    """What is explained. Attributes: name; function (of the user's); compiled (gives what is to be called); eager_calls (how many calls
    run in eager mode before one is compiled)."""

    name: str
    function: Any
    compiled: Callable[[], contextlib.AbstractContextManager[Callable[..., Any]]]
    eager_calls: int = 0


def _subject(given: Any) -> _Subject:
    if isinstance(given, CompiledStep):
        step = given.anew(replace(given.options, compile="now"))
        return _Subject(_name(given.function), given.function, lambda: contextlib.nullcontext(step), step.eager_calls)
    if not callable(given):
        raise ArgumentError(f"explain takes a function or a module, not {given!r}", hint="dynaxla.explain(model, x)")
    wrapper = private.compiler_of(given)
    with_what, settings = dynaxla, dict[str, Any]()
    if wrapper is not None:
        with_what = getattr(wrapper, "compiler_fn", wrapper)
        if with_what is dynaxla_retrace:
            raise ArgumentError(
                f"explain is for what is compiled once, and {_name(given)} is compiled with dynaxla_retrace, anew at every call",
                hint="give it what you gave to torch.compile, to be told what the backend dynaxla makes of it",
            )
        if getattr(with_what, "__module__", "") != dynaxla.__module__:
            raise ArgumentError(
                f"explain is for what dynaxla compiles, and {_name(given)} is compiled with {getattr(wrapper, 'compiler_name', with_what)}",
                hint="give it what you gave to torch.compile",
            )
        settings = {**getattr(wrapper, "kwargs", {}), "dynamic": getattr(wrapper, "dynamic", None)}
    original = private.uncompiled(given)
    is_its_own = isinstance(given, torch.nn.Module) and given is original and wrapper is not None  # model.compile(...)
    call = private.uncompiled_call(given) if is_its_own else original
    return _Subject(_name(original), original, functools.partial(_compiled, call, with_what, settings))


@contextlib.contextmanager
def _compiled(function: Any, with_what: Callable[..., Any], settings: Mapping[str, Any]) -> Iterator[Callable[..., Any]]:
    """The function as torch compiles it with a backend of dynaxla's, apart from all that is compiled of it elsewhere. Programs are let go
    afterwards. settings: what torch.compile was given, by name."""
    held: list[list[Callable[..., Any]]] = []
    options = {**(settings.get("options") or {}), "compile": "now"}

    def backend(module: Any, inputs: Any) -> Callable[..., Any]:
        cell = [with_what(module, inputs, mode=settings.get("mode"), options=options)]
        held.append(cell)
        return lambda *args: cell[0](*args)

    isolated = {"isolate_recompiles": True} if "isolate_recompiles" in inspect.signature(torch.compile).parameters else {}
    try:
        yield torch.compile(function, backend=backend, dynamic=settings.get("dynamic"), **isolated)
    finally:
        for cell in held:
            cell.clear()  # torch keeps what it made of a function for as long as the function lives


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", None) or type(function).__name__
