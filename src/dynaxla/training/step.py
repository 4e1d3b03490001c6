"""`compile_step`: decides for each call of a step whether it replays a program, runs in eager mode, or is recorded.

A call with surroundings and arguments that have been recorded runs a program and nothing else (replayed_steps.py). Any other call runs in
eager mode and is watched. Only if such a call does nothing that a program would not do (print, count, look at values), the next call like
it is recorded and compiled. So every program repeats a step that has succeeded in eager mode. The first call always runs in eager mode: it
shows what state the step can read. A step that repeatedly does what no program can do rests: it runs in eager mode without being watched,
for twice as many calls each time.

With `fullgraph` every call without a program is recorded at once, and refused before it has any effect if that fails. With several
processes, each decides for itself: in eager mode a step calls the same collectives as in a program (eager_collectives.py).
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any, Generic, ParamSpec, TypeVar, overload

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from .. import forks
from ..config import Options
from ..errors import CaptureError, DynaxlaError, OptionError
from ..guards.observation import Refused
from ..guards.snapshot import Snapshot
from ..guards.torch_state import without_cached_casts
from ..observe import events, metrics
from ..runtime import eager_fallback
from .replayed_steps import StepPrograms

P = ParamSpec("P")
R = TypeVar("R")
_log = logging.getLogger("dynaxla")

# How many calls in a row may each find new surroundings or arguments before the step rests, that is, runs unwatched for some calls. Calls
# with tensors of new shapes do not count. After a rest, the second number applies.
_MOST_IN_VAIN = 8
_MOST_AFTER_REST = 2
# How many calls in a row may do something that a program would not before the step rests; the first call does not count.
_MOST_FAILURES = 2
# How many calls a step rests the first time; each later rest is twice as long. A watched call takes as long as twenty others.
_FIRST_REST = 256


@overload
def compile_step(function: Callable[P, R], *, fullgraph: bool = False, options: Mapping[str, Any] | None = None) -> CompiledStep[P, R]: ...


@overload
def compile_step(
    function: None = None, *, fullgraph: bool = False, options: Mapping[str, Any] | None = None
) -> Callable[[Callable[P, R]], CompiledStep[P, R]]: ...


def compile_step(function: Any = None, *, fullgraph: bool = False, options: Mapping[str, Any] | None = None) -> Any:
    """Compiles a training step to one program: a function that runs a model, calls `loss.backward()`, steps an optimizer, zeroes gradients.

    The first two calls run in eager mode and are watched. A step that has done nothing but compute with tensors is recorded at the third
    call and becomes one program without Python. All state that the function reads besides its arguments (modules, optimizers, closures,
    globals) is watched: if anything but tensors' values and learning rates has changed, the step runs in eager mode once more, and is
    recorded again. State outside Python, such as files, is not watched.

    A step whose Python code has effects or looks at values (prints, counters, `if loss > 3`, `losses.append(loss.item())`, schedulers) runs
    in eager mode, and the log warns about it once. `dynaxla.metrics.snapshot()` counts these calls as "eager_steps". One of several
    processes may run in eager mode while others replay the program: DistributedDataParallel and `fully_shard` call the same collectives in
    both.

    Parameters, buffers, gradients and optimizer state are read and written in place.

    Args:
        function: ordinary code. Its return value may have tensors (they are detached), Python values, and containers of both. Without a
            function, `compile_step` returns a decorator: `@compile_step(options={...})`.
        fullgraph: refuse a step that cannot be one program, at its first call, before it has any effect.
        options: as for `torch.compile(..., backend="dynaxla", options=...)`, except for `sizes="buckets"` and `distributed="spmd"`.

    Raises:
        OptionError: an option is not valid for a step.

    A call of the compiled step raises the function's exceptions, CaptureError (with fullgraph), and ExecutionError. A program that fails
    has written nothing, unless torch's own in-place update after it runs out of memory.
    """
    if function is None:
        return functools.partial(compile_step, fullgraph=fullgraph, options=options)
    if not callable(function):
        raise OptionError(
            f"compile_step takes a function, not {function!r}", hint="write @dynaxla.compile_step or compile_step(options={...})"
        )
    if options is not None and "engines" in options:
        hint = 'compile only the model, with torch.compile(backend="dynaxla_auto"); call loss.backward() and optimizer.step() as usual'
        raise OptionError("compile_step does not support the option engines: it compiles a step to one program", hint=hint)
    parsed = Options.parse(options, None)
    if parsed.sizes == "buckets":
        hint = "compile only the model, with torch.compile and that option; call loss.backward() and optimizer.step() as usual"
        raise OptionError("compile_step does not support the option sizes='buckets': it compiles one program for each size", hint=hint)
    if parsed.distributed == "spmd":
        hint = "compile only the model, with torch.compile and that option; call loss.backward() and optimizer.step() as usual"
        raise OptionError(
            "compile_step does not support the option distributed='spmd': it records the ops on the local tensors of DTensors", hint=hint
        )
    return CompiledStep(function, parsed, fullgraph)


class CompiledStep(Generic[P, R]):
    """A compiled step; see `compile_step`."""

    def __init__(self, function: Callable[P, R], options: Options, fullgraph: bool) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._options = options
        self._fullgraph = fullgraph
        self._watched = StepPrograms(function, options)
        # The number of next calls that are not watched, and the length of the next rest.
        self._resting, self._rest = 0, _FIRST_REST
        # Calls since a program has last run: those that did something that no program does, and those in situations not seen before.
        self._failures = self._in_vain = 0
        # For each call that ran no program: the shapes of the tensors among its arguments.
        self._shapes: set[tuple[torch.Size, ...]] = set()
        self._lock = forks.lock()

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if _inside.get() or eager_fallback.is_being_traced():  # called inside another step, or while torch traces
            return self._function(*args, **kwargs)
        with _inside:
            if self._resting > 0:
                self._resting -= 1
                return self._run_in_eager_mode(args, kwargs)
            with self._lock:
                return self._call(args, kwargs, self._fullgraph)

    def call_as_program(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the step. If it has no program, record it at once, as with `fullgraph`; if that fails, run it in eager mode.

        Reports about programs, such as sharding/traffic.py, use this.
        """
        with _inside, self._lock:
            return self._call(args, kwargs, at_once=True)

    def _call(self, args: Any, kwargs: Any, at_once: bool) -> Any:
        """Run a call. With `at_once`, a call without a program is recorded even if no call like it has run in eager mode."""
        if not at_once and not self._watched.has_seen_anything:
            return (
                self._function(*args, **kwargs)
                if eager_fallback.is_needed(_tensors(args, kwargs))
                else self._run_watched(None, args, kwargs)
            )
        try:
            found = self._watched.situation(args, kwargs)
        except CaptureError as error:
            return self._without_program(error, args, kwargs)
        done, result = self._watched.run(found)
        if done:
            self._in_vain, self._failures, self._rest = 0, 0, _FIRST_REST
            return result
        tensors = _tensors(args, kwargs)
        if eager_fallback.is_needed(tensors):
            return self._function(*args, **kwargs)
        if self._in_vain >= _MOST_IN_VAIN and not at_once:
            return self._without_program(
                CaptureError("the step's arguments, or the objects that it can reach, differ at each call"), args, kwargs
            )
        if not at_once and not self._watched.has_seen(found):
            shapes = tuple(tensor.shape for tensor in tensors)
            if shapes in self._shapes or len(self._shapes) >= self._options.executables:
                self._in_vain += 1
            else:
                self._shapes.add(shapes)
            return self._run_watched(found, args, kwargs)
        try:
            program, initial = self._watched.capture(args, kwargs)
        except (Exception, Refused) as error:  # the step's own error, or one that fake tensors have caused
            if isinstance(error, DynaxlaError) and not isinstance(error, CaptureError):
                raise
            return self._without_program(error, args, kwargs)
        self._in_vain = 0
        self._shapes.clear()
        return self._watched.run_first(program, initial, args, kwargs)

    def _run_watched(self, found: Snapshot | None, args: Any, kwargs: Any) -> Any:
        """Run in eager mode, and note whether a program would have done the same."""
        metrics.add("eager_steps")
        is_first = not self._watched.has_seen_anything
        with without_cached_casts():
            result, reason, is_new = self._watched.observe(found, args, kwargs)
        if is_new and not is_first:  # earlier situations have to be seen once more
            self._in_vain += 1
            self._shapes.clear()
        if reason and not is_first:
            self._fail(reason)
        return _detached(result)

    def _fail(self, reason: str) -> None:
        """Note that a call could not have run as a program. After several such calls in a row the step rests."""
        self._failures += 1
        if self._failures >= _MOST_FAILURES or self._in_vain >= _MOST_IN_VAIN:
            if self._rest == _FIRST_REST:
                self._tell(reason)
            self._resting, self._rest = self._rest, 2 * self._rest
            self._failures, self._in_vain = _MOST_FAILURES - 1, _MOST_IN_VAIN - _MOST_AFTER_REST

    def _without_program(self, error: BaseException, args: Any, kwargs: Any) -> Any:
        """Run a call in eager mode after its recording has failed, without effects. Raises: the error, with fullgraph."""
        if self._fullgraph:
            if isinstance(error, Refused):
                hint = "do that outside the step, or leave fullgraph=True out"
                raise CaptureError(
                    f"the step does something that a program cannot repeat: {error}", where=error.effect.where, hint=hint
                ) from None
            raise error
        self._fail(str(error) or type(error).__name__)
        return self._run_in_eager_mode(args, kwargs)

    def _tell(self, reason: str) -> None:
        _log.warning("%s runs in eager mode: %s (this call and the next %d; fullgraph=True raises the error)", self, reason, self._rest)
        if events.has_listeners():
            events.emit(events.StepFellBack(getattr(self._function, "__qualname__", repr(self._function)), "in eager mode", reason))

    def anew(self, options: Options | None = None) -> CompiledStep[P, R]:
        """Return a new compiled step of the same function, which has not been called, with other options if they are given."""
        return CompiledStep(self._function, options or self._options, self._fullgraph)

    @property
    def eager_calls(self) -> int:
        """The number of calls that run in eager mode before one is compiled, if all calls are alike."""
        return 0 if self._fullgraph else 2

    @property
    def function(self) -> Callable[P, R]:
        """The function that was compiled."""
        return self._function

    @property
    def options(self) -> Options:
        return self._options

    def _run_in_eager_mode(self, args: Any, kwargs: Any) -> Any:
        metrics.add("eager_steps")
        with without_cached_casts():
            return _detached(self._watched.run_eagerly(args, kwargs))

    def __repr__(self) -> str:
        return f"<compiled step {getattr(self._function, '__qualname__', self._function)}>"


def _detached(result: Any) -> Any:
    """Return a step's result with detached tensors, which keep nothing alive that autograd has saved."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor if tensor.is_leaf else tensor.detach(), result)


def _tensors(args: Any, kwargs: Any) -> list[torch.Tensor]:
    return [item for item in tree_leaves((args, kwargs)) if isinstance(item, torch.Tensor)]


class _Inside(threading.local):
    """Counts, for each thread, the steps that it is inside of."""

    depth = 0

    def get(self) -> bool:
        return self.depth > 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1


_inside = _Inside()
