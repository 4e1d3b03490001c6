"""`compile_step`: which way a call of a step goes.

A call whose surroundings and arguments have been recorded runs a program and nothing else (watched.py). Else the step is recorded. Where
that fails, because Python does something that no program can (prints, counts, looks at values), nothing has happened yet: this call runs in
eager mode, since at the first call many things happen that never happen again, and if the next one cannot be recorded either, the step
runs lazily from then on (lazy.py). Where there are other processes it runs lazily at once (`Watched.begins_lazily`).
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any, Generic, ParamSpec, TypeVar, overload

import torch
from torch.utils._pytree import tree_leaves

from .. import forks
from ..config import Options
from ..errors import CaptureError, DynaxlaError, OptionError
from ..observe import events, metrics
from ..runtime import by_torch
from . import lazy
from .likenesses import detached
from .observation import Refused
from .torch_state import without_cached_casts
from .traces import Traces
from .watched import Watched

P = ParamSpec("P")
R = TypeVar("R")
_log = logging.getLogger("dynaxla")

# How many calls in a row may need programs of their own before the step runs lazily.
_MOST_IN_VAIN = 4
# How many calls may fail to be recorded before the step runs lazily.
_MOST_FAILURES = 2


@overload
def compile_step(function: Callable[P, R], *, fullgraph: bool = False, options: Mapping[str, Any] | None = None) -> CompiledStep[P, R]: ...


@overload
def compile_step(
    function: None = None, *, fullgraph: bool = False, options: Mapping[str, Any] | None = None
) -> Callable[[Callable[P, R]], CompiledStep[P, R]]: ...


def compile_step(function: Any = None, *, fullgraph: bool = False, options: Mapping[str, Any] | None = None) -> Any:
    """Compile a training step: a function that runs a model, calls `loss.backward()`, steps an optimizer, zeroes gradients.

    function: ordinary code; what it returns may be tensors (detached), Python values, and containers of both. fullgraph: refuse a step that
    cannot be one program, instead of running it in parts. options: as for `torch.compile(..., backend="dynaxla", options=...)`, but for
    `sizes="buckets"` and `partition="xla"`. Without a function it is a decorator: `@compile_step(options={...})`.

    A step that does nothing but compute with tensors is recorded and becomes one program without Python: all that the function reads
    besides its arguments (modules, optimizers, closures, globals) is watched, and if anything but tensors' values and learning rates has
    changed, the step is recorded again. What lies outside Python (files, the environment) is not watched.

    A step whose Python has effects or looks at values (prints, counters, `if loss > 3`, `losses.append(loss.item())`, schedulers) runs
    lazily: its Python runs at every call, once and in order, and its tensors are computed by as many programs as it looks at values, plus
    one. `dynaxla.observe.metrics` counts them ("parts").

    Parameters, buffers, gradients and optimizer state are read and written in place.

    Raises: OptionError. Raises, when called: what the function raises; CaptureError, with fullgraph; ExecutionError. A program that fails
    has written nothing (unless torch's own update in place after it fails, for want of memory); what parts before it did stays done.
    """
    if function is None:
        return functools.partial(compile_step, fullgraph=fullgraph, options=options)
    if not callable(function):
        raise OptionError(f"compile_step takes a function, not {function!r}", hint="@dynaxla.compile_step, or compile_step(options={...})")
    parsed = Options.parse(options, None)
    if parsed.engines:
        hint = "torch.compile the model with that option, and leave loss.backward() and the optimizer's step to Python"
        raise OptionError("compile_step makes one program of a step: it has no option engines", hint=hint)
    if parsed.sizes == "buckets":
        hint = "torch.compile the model with that option, and leave loss.backward() and the optimizer's step to Python"
        raise OptionError("compile_step records each size by itself: it has no sizes='buckets'", hint=hint)
    if parsed.partition == "xla":
        hint = "torch.compile the model with that option, and leave loss.backward() and the optimizer's step to Python"
        raise OptionError("compile_step records what DTensors do to their local tensors: it has no partition='xla'", hint=hint)
    return CompiledStep(function, parsed, fullgraph)


class CompiledStep(Generic[P, R]):
    """A compiled step; see `compile_step`."""

    def __init__(self, function: Callable[P, R], options: Options, fullgraph: bool) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._options = options
        self._fullgraph = fullgraph
        self._watched = Watched(function, options)
        self._traces = Traces(options)
        # Why the step runs lazily; "" if it does not.
        self._lazy = ""
        self._failures = 0
        # Recordings since a program has last been found.
        self._in_vain = 0
        self._lock = forks.lock()

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if _inside.get() or by_torch.is_looked_at():  # a part of another step, or of what somebody traces
            return self._function(*args, **kwargs)
        with self._lock, _inside:
            if self._lazy:
                return self._run_lazily(args, kwargs)
            try:
                found = self._watched.situation(args, kwargs)
            except CaptureError as error:
                return self._without_program(error, args, kwargs)
            done, result = self._watched.run(found)
            if done:
                self._in_vain = 0
                return result
            if by_torch.is_needed([item for item in tree_leaves((args, kwargs)) if isinstance(item, torch.Tensor)]):
                return self._function(*args, **kwargs)
            try:
                if self._in_vain >= _MOST_IN_VAIN and not self._fullgraph:
                    raise CaptureError("its surroundings or arguments are others at each call")
                program, initial = self._watched.capture(args, kwargs)
            except (Exception, Refused) as error:  # the step's own, or what it met because its tensors are fakes
                if isinstance(error, DynaxlaError) and not isinstance(error, CaptureError):
                    raise
                return self._without_program(error, args, kwargs)
            self._in_vain += 1
            return self._watched.run_first(program, initial, args, kwargs)

    def _without_program(self, error: BaseException, args: Any, kwargs: Any) -> Any:
        """The step could not be recorded, and nothing has happened. Raises: the error, with fullgraph."""
        if self._fullgraph:
            if isinstance(error, Refused):
                hint = "do that outside the step, or leave fullgraph out"
                raise CaptureError(f"a step does what a program would not: {error}", where=error.effect.where, hint=hint) from None
            raise error
        self._failures += 1
        if self._failures < _MOST_FAILURES and not self._watched.begins_lazily(args, kwargs):
            self._tell("in eager mode once", str(error))
            return self._run_in_eager_mode(args, kwargs)
        result = self._run_lazily(args, kwargs)
        if self._failures >= _MOST_FAILURES:
            self._lazy = str(error) or type(error).__name__
            self._tell("lazily", self._lazy)
        return result

    def _tell(self, way: str, reason: str) -> None:
        _log.info("%s runs %s: %s", self, way, reason)
        if events.is_heard():
            events.tell(events.WentOn(getattr(self._function, "__qualname__", repr(self._function)), way, reason))

    def anew(self, options: Options | None = None) -> CompiledStep[P, R]:
        """The same step, which has not been called. options: others than its own."""
        return CompiledStep(self._function, options or self._options, self._fullgraph)

    @property
    def function(self) -> Callable[P, R]:
        """What was compiled."""
        return self._function

    @property
    def options(self) -> Options:
        return self._options

    def _run_in_eager_mode(self, args: Any, kwargs: Any) -> Any:
        metrics.add("eager_steps")
        with without_cached_casts():
            return detached(self._function(*args, **kwargs))

    def _run_lazily(self, args: Any, kwargs: Any) -> Any:
        modules = self._watched.parallel_modules(args, kwargs)
        modules.prepare()
        if reason := modules.why_not_averaged():
            self._tell("in eager mode", f"it has {reason}")
            return self._run_in_eager_mode(args, kwargs)
        exposed = self._watched.exposed(args, kwargs)
        before = len(exposed)
        try:
            with modules.in_a_step():
                return lazy.run(self._traces, self._function, args, kwargs, exposed)
        finally:
            if len(exposed) > before:  # the step has got at memory, and may have kept what reaches it
                self._watched.has_holders = True

    def __repr__(self) -> str:
        return f"<compiled step {getattr(self._function, '__qualname__', self._function)}>"


class _Inside(threading.local):
    """Whether this thread is inside a step."""

    depth = 0

    def get(self) -> bool:
        return self.depth > 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1


_inside = _Inside()
