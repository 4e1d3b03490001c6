"""`dynaxla.explain`: compiles a function as if for the first time, calls it a few times, and builds an `Explanation`."""

from __future__ import annotations

import contextlib
import functools
import inspect
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import torch

from ..backend import dynaxla, dynaxla_retrace
from ..errors import ArgumentError
from ..observe import events
from ..runtime import private
from ..training.step import CompiledStep
from . import formatting
from .advice import advise
from .event_collector import Collector
from .explanation import Explanation
from .graph_breaks import DynamoMetrics
from .line_costs import Profiler, costs
from .state_restore import restored_afterwards

# The maximum number of later calls. After the first later call, another one is made only while all later calls together have taken less
# than `_MAX_LATER_FRACTION` of the first call's time.
_MAX_LATER_CALLS = 4
_MAX_LATER_FRACTION = 0.5


def explain(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Explanation:
    """Compiles a function with dynaxla as if for the first time, calls it, and explains the result.

    The explanation has graphs and their breaks, programs, chosen implementations, fallbacks, copies, memory, times, the costliest
    lines of the user's code, and advice.

    The function is called two to seven times, as a loop would call it. Afterwards the state that it can reach is restored: tensors and
    their gradients, optimizers, containers, attributes, closures, globals that its code names, and the random generators of torch, Python
    and NumPy. Until then there is a second copy of these tensors. Other effects are not undone: files, prints, other processes, and objects
    that only other code reaches. A tensor that was written to has a new version, which a backward pass from before the call may reject.
    Programs are compiled without the cache directory, since cached programs have no line numbers of the user's code. Work in threads that
    existed before the call is not explained.

    Args:
        function: a function or module, compiled or not, or a step of `dynaxla.compile_step`. If it is compiled already, it is compiled
            again with its own options (but without compile="background"); the existing compiled function is not changed.
        args: the function's arguments.
        kwargs: the function's keyword arguments.

    Returns: an `Explanation`. Print it, `save("page.html")` it, or let a notebook show it. An exception of the first call is part of the
    explanation and is not raised.

    Raises: ArgumentError for an object that cannot be called, or is compiled with another backend than dynaxla and dynaxla_auto.
    """
    subject = _subject_of(function)
    session = Session(_arguments(subject.function))
    error, later = "", list[tuple[float, float, float]]()
    with restored_afterwards(subject.function, args, kwargs), session, subject.compiled() as call:
        start = time.perf_counter()
        try:
            for _ in range(subject.eager_calls):
                call(*args, **kwargs)
            start = time.perf_counter()
            call(*args, **kwargs)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        seconds = time.perf_counter() - start
        session.end_first_call()
        while (
            not error
            and len(later) < _MAX_LATER_CALLS
            and (not later or sum(spent for spent, _, _ in later) < _MAX_LATER_FRACTION * seconds)
        ):
            (xla, by_torch), start = session.run_seconds(), time.perf_counter()
            try:
                call(*args, **kwargs)
            except Exception as raised:
                session.notes.append(f"Call {len(later) + 2} with the same arguments failed: {type(raised).__name__}: {raised}")
                break
            spent, (xla_now, torch_now) = time.perf_counter() - start, session.run_seconds()
            later.append((spent, xla_now - xla, torch_now - by_torch))
    return session.explanation(subject.name, seconds, later=later, error=error)


class Session:
    """Collects events and profiles inside a `with` block, and builds an explanation from them.

    Args:
        arguments: see `Collector`.

    Attributes:
        notes: remarks for the user.
    """

    def __init__(self, arguments: Sequence[str] = ()) -> None:
        self.notes: list[str] = []
        self._profiler = Profiler()
        self._collector = Collector(self._profiler, arguments)
        self._dynamo_metrics = DynamoMetrics(self._collector.is_collected)
        self._phases: Mapping[str, float] = {}
        self._dynamo_seconds = 0.0
        self._counts: dict[int, int] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Session:
        self._stack.enter_context(events.listening(self._collector))
        self._stack.enter_context(self._dynamo_metrics.listening())
        return self

    def __exit__(self, *_: object) -> None:
        self._profiler.end()
        self._stack.close()

    def run_seconds(self) -> tuple[float, float]:
        """Returns the seconds so far of all programs, and of torch's kernels that run graphs without a program."""
        return self._collector.run_seconds(), self._collector.run_seconds(by_torch=True)

    def end_first_call(self) -> None:
        """Marks the end of the first call."""
        self._dynamo_metrics.collect()
        self._phases, self._dynamo_seconds = dict(self._collector.phases), self._dynamo_metrics.seconds
        self._counts = {id(executable): count for executable, count in self._collector.later_runs()}

    def explanation(
        self, name: str, seconds: float, *, later: list[tuple[float, float, float]] | None = None, error: str = ""
    ) -> Explanation:
        """Builds the explanation.

        Args:
            name: the name of the function or script.
            seconds: the duration of the first call, or of the whole script.
            later: for each later call its seconds, and the two parts of these seconds as in `run_seconds`; None for a script.
            error: the exception of the first call, or the exit status of a script that failed; "" for neither.
        """
        collector, is_script = self._collector, later is None
        if is_script:
            self._phases, self._dynamo_seconds = dict(collector.phases), self._dynamo_metrics.seconds
        calls = len(later) if later else 1
        runs = [(executable, (count - self._counts.get(id(executable), 0)) / calls) for executable, count in collector.later_runs()]
        lines, unplaced = costs(self._profiler, runs, collector.torch_line_seconds())
        captured = collector.captured()
        graph_ends = [item.ended for item in captured if item.ended is not None]
        breaks = _merged_breaks([*graph_ends, *self._dynamo_metrics.breaks(graph_ends)])
        median, xla, by_torch = sorted(later)[len(later) // 2] if later else (None, None, 0.0)
        if is_script:
            xla, by_torch = self.run_seconds()
        if self._profiler.problem:
            self.notes.append(f"Lines of XLA's programs have no costs: {self._profiler.problem}.")
        elif unplaced is None and captured and not error:
            self.notes.append("Lines have no costs: no program ran a second time, and a first run is not measured.")
        result = Explanation(
            name, captured, breaks, tuple(self._dynamo_metrics.recompilations()),
            _phase_seconds(self._phases, self._dynamo_seconds, seconds), seconds, median, xla, lines, unplaced,
            tuple(f"{step} runs {way}: {reason}" for step, way, reason in collector.step_fallbacks), tuple(self.notes), _versions(),
            is_script, error, by_torch,
        )  # fmt: skip
        return replace(result, advice=advise(result))


# The readable names of the phases, in order.
_PHASES = {
    "capture": "AOTAutograd, recording, imports",
    "trace": "tracing to JAX",
    "lower": "lowering to StableHLO",
    "tune": "measuring implementations",
    "compile": "XLA's compiler",
    "first run": "first runs of programs",
    "later runs": "later runs of programs",
}


def _phase_seconds(phases: Mapping[str, float], dynamo: float, seconds: float) -> dict[str, float]:
    result = {"TorchDynamo": dynamo, **{name: phases.get(phase, 0.0) for phase, name in _PHASES.items()}}
    result["Python, torch and the rest"] = max(0.0, seconds - sum(result.values()))
    return {name: spent for name, spent in result.items() if spent}


def _merged_breaks(breaks: list[Any]) -> tuple[Any, ...]:
    """Merges equal graph breaks, with their count."""
    counted: dict[Any, int] = {}
    for item in breaks:
        counted[item] = counted.get(item, 0) + 1
    return tuple(replace(item, count=count) for item, count in counted.items())


def _versions() -> str:
    from .. import __version__

    is_gpu = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if is_gpu else formatting.number(torch.get_num_threads(), "thread")
    return f"dynaxla {__version__}, torch {torch.__version__}, jax {jax.__version__}, Python {platform.python_version()}, {device}"


@dataclass(frozen=True)
class _Subject:
    """The function to explain.

    Attributes:
        name: the function's name.
        function: the user's function or module.
        compiled: returns a context manager that yields the function to call.
        eager_calls: the number of calls in eager mode before the first compiled call.
    """

    name: str
    function: Any
    compiled: Callable[[], contextlib.AbstractContextManager[Callable[..., Any]]]
    eager_calls: int = 0


def _subject_of(function: Any) -> _Subject:
    if isinstance(function, CompiledStep):
        step = function.fresh_copy(replace(function.options, compile="now"))
        return _Subject(_name(function.function), function.function, lambda: contextlib.nullcontext(step), step.eager_calls)
    if not callable(function):
        raise ArgumentError(f"explain takes a function or a module, not {function!r}", hint="call dynaxla.explain(model, x)")
    wrapper = private.backend_of(function)
    backend, settings = dynaxla, dict[str, Any]()
    if wrapper is not None:
        backend = getattr(wrapper, "compiler_fn", wrapper)
        if backend is dynaxla_retrace:
            raise ArgumentError(
                f"explain supports functions that are compiled once, and {_name(function)} is compiled with dynaxla_retrace at every call",
                hint="pass the function that you passed to torch.compile: explain compiles it with the backend dynaxla",
            )
        if getattr(backend, "__module__", "") != dynaxla.__module__:
            raise ArgumentError(
                f"explain supports functions that dynaxla compiles, and {_name(function)} is compiled with "
                f"{getattr(wrapper, 'compiler_name', backend)}",
                hint="pass the function that you passed to torch.compile",
            )
        settings = {**getattr(wrapper, "kwargs", {}), "dynamic": getattr(wrapper, "dynamic", None)}
    original = private.uncompiled(function)
    is_compiled_in_place = isinstance(function, torch.nn.Module) and function is original and wrapper is not None  # model.compile(...)
    call = private.uncompiled_call(function) if is_compiled_in_place else original
    return _Subject(_name(original), original, functools.partial(_compiled, call, backend, settings))


@contextlib.contextmanager
def _compiled(function: Any, backend: Callable[..., Any], settings: Mapping[str, Any]) -> Iterator[Callable[..., Any]]:
    """Yields the function compiled with a backend of dynaxla, separately from other compiled versions. Its programs are freed afterwards.

    Args:
        function: the function.
        backend: the backend.
        settings: the arguments of torch.compile, by name.
    """
    cells: list[list[Callable[..., Any]]] = []
    options = {**(settings.get("options") or {}), "compile": "now"}

    def compile_graph(module: Any, inputs: Any) -> Callable[..., Any]:
        cell = [backend(module, inputs, mode=settings.get("mode"), options=options)]
        cells.append(cell)
        return lambda *args: cell[0](*args)

    isolated = {"isolate_recompiles": True} if "isolate_recompiles" in inspect.signature(torch.compile).parameters else {}
    try:
        yield torch.compile(function, backend=compile_graph, dynamic=settings.get("dynamic"), **isolated)
    finally:
        for cell in cells:
            cell.clear()  # torch keeps the compiled function alive as long as the original function


def _arguments(function: Any) -> list[str]:
    """Returns the names of a function's or module's positional arguments; no names if Python cannot determine them."""
    try:
        result = inspect.signature(function.forward if isinstance(function, torch.nn.Module) else function).parameters.values()
    except (TypeError, ValueError):
        return []
    return [item.name for item in result if item.kind in (item.POSITIONAL_ONLY, item.POSITIONAL_OR_KEYWORD)]


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", None) or type(function).__name__
