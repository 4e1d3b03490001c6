"""`compile_step`: for each call of a step, decides between the replay of a program, eager mode, and a recording.

A call whose state and arguments match a recorded call runs a program in place of the step's Python code (replayed_steps.py). The first call
in a new state runs in eager mode and is observed. If that call has only computed with tensors (it has not printed, or read tensors'
values), the next call in the same state is recorded and compiled. So every program repeats a step that has succeeded in eager mode. The
very first call shows which state the step can read. A step that repeatedly does more than compute, or repeatedly meets new states, backs
off: it runs in eager mode without observation, for twice as many calls each time.

With `fullgraph` every call without a program is recorded at once. If the recording fails, the call raises the error and has no effect.
Each of several processes decides alone: in eager mode a step calls the same collectives as in a program (eager_collectives.py).
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
from .replayed_steps import ProgramFailed, StepPrograms

P = ParamSpec("P")
R = TypeVar("R")
_log = logging.getLogger("dynaxla")

# The number of calls in new states, without a replay between them, after which the step backs off: it runs unobserved for some calls. The
# second number applies after a backoff. Tensors of new shapes do not count, up to the option `executables`.
_MAX_NEW_STATES = 8
_MAX_NEW_STATES_AFTER_BACKOFF = 2
# The number of calls that a program could not replace, without a replay between them, after which the step backs off. The first call does
# not count.
_MAX_FAILURES = 2
# The number of unobserved calls of the first backoff. Each further backoff is twice as long, because an observed call takes about as long
# as twenty unobserved calls.
_FIRST_BACKOFF = 256


@overload
def compile_step(function: Callable[P, R], *, fullgraph: bool = False, options: Mapping[str, Any] | None = None) -> CompiledStep[P, R]: ...


@overload
def compile_step(
    function: None = None, *, fullgraph: bool = False, options: Mapping[str, Any] | None = None
) -> Callable[[Callable[P, R]], CompiledStep[P, R]]: ...


def compile_step(function: Any = None, *, fullgraph: bool = False, options: Mapping[str, Any] | None = None) -> Any:
    """Compiles a training step to one XLA program.

    A training step is a function that runs a model, calls `loss.backward()`, steps an optimizer, and zeroes gradients. Its first two calls
    run in eager mode and are observed. If the step has only computed with tensors, the third call records it as one program without Python.
    All state that the function reads besides its arguments (modules, optimizers, closures, globals) is guarded. If anything but tensors'
    values and numbers has changed, the step runs in eager mode once more, and is recorded again. A Python number that changes, such as a
    learning rate or a counter, is an input of the program. If the step compares such a number, the outcome is guarded. State outside of
    Python, such as files, is not guarded.

    A step runs in eager mode, with a warning in the log, if its Python code has effects or reads tensors' values: if it prints, for
    example, or contains `if loss > 3` or `losses.append(loss.item())`. `dynaxla.metrics.snapshot()` counts calls in eager mode as
    "eager_steps". One of several processes may run in eager mode while others replay the program: DistributedDataParallel and
    `fully_shard` call the same collectives in both.

    Parameters, buffers, gradients and optimizer state are read and written in place.

    Args:
        function: the training step. It may return tensors, Python values, and containers of both; returned tensors are detached. Without a
            function, `compile_step` returns a decorator: `@compile_step(options={...})`.
        fullgraph: True to raise CaptureError for a step that cannot be one program, at its first call, before it has any effect.
        options: as for `torch.compile(..., backend="dynaxla", options=...)`, but without `engines`, `sizes="buckets"` and
            `distributed="spmd"`.

    Raises:
        OptionError: an option is not valid for a step, or `function` is not callable.

    A call of the compiled step raises the function's exceptions, CaptureError (with fullgraph), and ExecutionError. A step whose program
    fails has written nothing. Only the in-place updates after the program may fail halfway, if torch runs out of memory.
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
        self._programs = StepPrograms(function, options)
        # The number of calls that will still run unobserved in this backoff, and the number of calls of the next backoff.
        self._eager_calls_left, self._next_backoff = 0, _FIRST_BACKOFF
        # Since the last replay: the number of calls that a program could not replace (`_MAX_FAILURES`), and of calls in new states.
        self._failures = self._new_states = 0
        # The state's key in the last call for which there was no program.
        self._last_new_key: Any = None
        # The shapes of the tensors among the arguments of calls in new states, since the last recording and the last new code.
        self._seen_shapes: set[tuple[torch.Size, ...]] = set()
        self._lock = forks.lock()

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if _running_steps.any() or eager_fallback.is_being_traced():  # called inside another step, or while torch traces
            return self._function(*args, **kwargs)
        with _running_steps:
            if self._eager_calls_left > 0:
                self._eager_calls_left -= 1
                return self._run_in_eager_mode(args, kwargs)
            with self._lock:
                return self._call_or_catch(args, kwargs, self._fullgraph)

    def call_as_program(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls the step. A step without a program is recorded at this call, as with `fullgraph`.

        If the recording fails, the call runs in eager mode, or raises the error with `fullgraph`. Reports about programs, such as
        sharding/traffic.py, use this method.
        """
        with _running_steps, self._lock:
            return self._call_or_catch(args, kwargs, record_now=True)

    def _call_or_catch(self, args: Any, kwargs: Any, record_now: bool) -> Any:
        """Does what `_call` does. If a program fails whose code catches exceptions, the call runs in eager mode."""
        try:
            return self._call(args, kwargs, record_now)
        except ProgramFailed:
            return self._run_in_eager_mode(args, kwargs)

    def _call(self, args: Any, kwargs: Any, record_now: bool) -> Any:
        """Replays a program, runs the function in eager mode, or records it.

        With `record_now`, a call without a program is recorded even if no earlier call in this state has run in eager mode.
        """
        if not record_now and not self._programs.has_run:
            return (
                self._function(*args, **kwargs)
                if eager_fallback.is_needed(_tensors(args, kwargs))
                else self._run_observed(None, args, kwargs)
            )
        try:
            snapshot = self._programs.take_snapshot(args, kwargs)
        except CaptureError as error:
            return self._handle_refusal(error, args, kwargs)
        has_program, result = self._programs.run(snapshot)
        if has_program:
            self._new_states, self._failures, self._next_backoff = 0, 0, _FIRST_BACKOFF
            return result
        tensors = _tensors(args, kwargs)
        if eager_fallback.is_needed(tensors):
            return self._function(*args, **kwargs)
        if not record_now and self._programs.is_refused(snapshot):
            return self._run_in_eager_mode(args, kwargs)
        if self._new_states >= _MAX_NEW_STATES and not record_now:
            difference = self._programs.difference(self._last_new_key, snapshot) if self._last_new_key is not None else ""
            subject = f"{difference}, which the step can reach, differs" if difference else "the objects that the step can reach differ"
            return self._handle_refusal(CaptureError(f"{subject} at each call"), args, kwargs)
        self._last_new_key = snapshot.key
        if not record_now and not self._programs.is_recordable(snapshot):
            shapes = tuple(tensor.shape for tensor in tensors)
            if shapes in self._seen_shapes or len(self._seen_shapes) >= self._options.executables:
                self._new_states += 1
            else:
                self._seen_shapes.add(shapes)
            return self._run_observed(snapshot, args, kwargs)
        if not record_now and not self._programs.has_room(snapshot):
            message = (
                f"comparisons of numbers that change need more programs than the option executables allows ({self._options.executables})"
            )
            return self._handle_refusal(CaptureError(message), args, kwargs)
        is_first_program = not self._programs.has_programs(snapshot)
        try:
            program, initial = self._programs.capture(args, kwargs)
        except (Exception, Refused) as error:  # an error of the step itself, or an error that fake tensors have caused
            if isinstance(error, DynaxlaError) and not isinstance(error, CaptureError):
                raise
            return self._handle_refusal(error, args, kwargs)
        self._new_states = 0 if is_first_program else self._new_states + 1
        self._seen_shapes.clear()
        return self._programs.run_first(program, initial, args, kwargs)

    def _run_observed(self, snapshot: Snapshot | None, args: Any, kwargs: Any) -> Any:
        """Runs a call in eager mode. Except for the first call, it counts as a failure if a program would not have done the same."""
        metrics.add("eager_steps")
        is_first = not self._programs.has_run
        with without_cached_casts():
            result, reason, is_new = self._programs.observe(snapshot, args, kwargs)
        if is_new and not is_first:  # new code may read more state, so each state needs another observed call
            self._new_states += 1
            self._seen_shapes.clear()
        if reason and not is_first:
            self._count_failure(reason)
        return _detached(result)

    def _count_failure(self, reason: str) -> None:
        """Counts a call that a program could not replace. After several such calls, or calls in new states, the step backs off."""
        self._failures += 1
        if self._failures >= _MAX_FAILURES or self._new_states >= _MAX_NEW_STATES:
            if self._next_backoff == _FIRST_BACKOFF:
                self._warn(reason)
            self._eager_calls_left, self._next_backoff = self._next_backoff, 2 * self._next_backoff
            self._failures, self._new_states = _MAX_FAILURES - 1, _MAX_NEW_STATES - _MAX_NEW_STATES_AFTER_BACKOFF

    def _handle_refusal(self, error: BaseException, args: Any, kwargs: Any) -> Any:
        """Runs a call in eager mode whose recording was refused before it had any effect.

        Raises: the error, with fullgraph; a CaptureError in place of `Refused`.
        """
        if self._fullgraph:
            if isinstance(error, Refused):
                hint = "do that outside the step, or leave fullgraph=True out"
                raise CaptureError(
                    f"the step does something that a program cannot repeat: {error}", where=error.effect.where, hint=hint
                ) from None
            raise error
        self._count_failure(str(error) or type(error).__name__)
        return self._run_in_eager_mode(args, kwargs)

    def _warn(self, reason: str) -> None:
        _log.warning(
            "%s runs in eager mode: %s (this call and the next %d; fullgraph=True raises the error)", self, reason, self._next_backoff
        )
        if events.has_listeners():
            events.emit(events.StepFellBack(getattr(self._function, "__qualname__", repr(self._function)), "in eager mode", reason))

    def fresh_copy(self, options: Options | None = None) -> CompiledStep[P, R]:
        """Returns a new compiled step of the same function, which has not been called. Without `options` it has the same options."""
        return CompiledStep(self._function, options or self._options, self._fullgraph)

    @property
    def eager_calls(self) -> int:
        """The number of calls that run in eager mode before the first recording, if all calls have the same state."""
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
            return _detached(self._programs.run_eagerly(args, kwargs))

    def __repr__(self) -> str:
        return f"<compiled step {getattr(self._function, '__qualname__', self._function)}>"


def _detached(result: Any) -> Any:
    """Returns a step's result with detached tensors. So the result does not keep the tensors alive that autograd has saved."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor if tensor.is_leaf else tensor.detach(), result)


def _tensors(args: Any, kwargs: Any) -> list[torch.Tensor]:
    return [item for item in tree_leaves((args, kwargs)) if isinstance(item, torch.Tensor)]


class _RunningSteps(threading.local):
    """Counts the compiled steps that are running in each thread."""

    depth = 0

    def any(self) -> bool:
        return self.depth > 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1


_running_steps = _RunningSteps()
