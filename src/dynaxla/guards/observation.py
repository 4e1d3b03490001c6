"""Observes one run of a function: the code that runs, its side effects, and its reads of state outside Python, such as files and clocks.

Python reports a thread's calls to its profile function (`sys.setprofile`), including calls of functions written in C. It does not report
constructors and iteration of types written in C, nor functions of Cython. Constructors are found by their names in the executed code.
Iterators and objects of Cython have hidden state. A later walk (object_walker.py) finds such objects and lists them as incomparable.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any

import numpy as np
import torch

from ..runtime import private
from ..runtime.guards import unobserved_code
from .code_names import ExecutedCode, names_of
from .pure_functions import constructor_effect_of, effect_of
from .torch_state import global_state
from .trusted_code import is_trusted_namespace, module_of

# Python 3.12.0 to 3.12.4 do not report calls of a method that is a C function, as pybind11's are (python/cpython#122029).
_HIDES_METHODS = (3, 12) <= sys.version_info < (3, 12, 5)

_IMPORTING = ("_find_and_load", "_handle_fromlist")
_IMPORTLIB = "<frozen importlib._bootstrap>"


@dataclass(frozen=True)
class Effect:
    """A side effect, or a read of state outside Python, that a program would not repeat.

    Attributes:
        what: the name of the called function, or another description of the effect.
        where: the user's file, line and function; "" if unknown.
    """

    what: str
    where: str

    def __str__(self) -> str:
        return f"{self.what} at {self.where}" if self.where else self.what


@dataclass(frozen=True)
class Observation:
    """The result of observing a run.

    Attributes:
        codes: each code object that ran, with the globals that it ran in.
        effects: the distinct effects, in the order in which they happened.
        changes_settings: True if torch's settings differ after the run.
    """

    codes: Mapping[types.CodeType, Sequence[dict[str, Any]]] = field(repr=False)
    effects: Sequence[Effect]
    changes_settings: bool

    @functools.cached_property
    def executed_code(self) -> ExecutedCode:
        """The names that the executed code uses."""
        return ExecutedCode.of(self.codes)

    @property
    def is_pure(self) -> bool:
        """True if the run had no effects and has not changed torch's settings."""
        return not self.effects and not self.changes_settings


class Refused(BaseException):
    """Raised to stop a function before an effect. A BaseException, so that the function's own handlers do not catch it."""

    def __init__(self, effect: Effect) -> None:
        super().__init__(str(effect))
        self.effect = effect


def observe(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    refuse: bool = False,
) -> tuple[Any, Observation]:
    """Runs a function in this thread, including its backward passes, and observes it. The thread's profile function is restored.

    Calls of `runtime.guards.unobserved_code`, and code inside these calls, are not observed.

    With `refuse`, the function is stopped before its first detected effect.

    Returns:
        The function's result, and the observation.

    Raises:
        Refused: the function was stopped before an effect.
        Exception: any exception of the function.
    """
    observer = _Observer(refuse)
    before = global_state()
    with torch.autograd.set_multithreading_enabled(False):
        result = observer.run(function, args, kwargs)
    return result, observer.observation(global_state() != before)


class _Observer:
    def __init__(self, refuse: bool) -> None:
        self._refuse = refuse
        # torch calls these two functions at the first op on DTensors, only to query loggers. Such calls are ignored. If a message is
        # logged, `logging` itself calls `isEnabledFor`, and the call is observed.
        self._logging_codes = frozenset(map(id, [logging.getLogger.__code__, logging.Logger.isEnabledFor.__code__]))
        # A garbage collection may run finalizers of objects that do not belong to the function. So nothing is observed between the calls
        # of a gc callback with "start" and with "stop". An existing callback, such as JAX's, is used: a new one would affect other threads.
        collecting = [callback.__code__ for callback in gc.callbacks if isinstance(callback, types.FunctionType)]
        self._gc_callbacks = frozenset(map(id, collecting))
        self._collects = False
        self._ignored = frozenset(map(id, [*unobserved_code, *private.op_lookup_codes(), *collecting]))
        self._codes: dict[int, tuple[types.CodeType, dict[int, dict[str, Any]]]] = {}
        self._effects: dict[Effect, None] = {}
        # For the id of globals: True if they belong to torch; True if they are trusted.
        self._origins: dict[int, tuple[bool, bool]] = {}
        self._alive: list[Any] = []
        self._effect_names: dict[Any, str] = {}
        # The frames of imports, and of calls of ignored code: nothing is observed inside them.
        self._ignored_frames: list[types.FrameType] = []
        self._earlier_profile_function: Any = None
        self._has_refused = False

    def run(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Calls a function under observation. An earlier profile function is called too, and restored afterwards."""
        with _showing_methods(self._method_call):
            return self._run(function, args, kwargs)

    def _run(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self._earlier_profile_function = sys.getprofile()
        profile_function = self._event
        sys.setprofile(profile_function)
        try:
            return function(*args, **kwargs)
        finally:
            current = sys.getprofile()
            # Python removes a profile function that raises an exception.
            if current == profile_function or (current is None and self._has_refused):
                sys.setprofile(None)
                if callable(self._earlier_profile_function):
                    sys.setprofile(self._earlier_profile_function)
                elif self._earlier_profile_function is not None:
                    self._earlier_profile_function.enable()  # a profiler written in C is no function
            else:
                self._effects[Effect("a call of sys.setprofile that stays in effect", "")] = None
            self._ignored_frames.clear()

    def observation(self, changes_settings: bool) -> Observation:
        """Returns the observation so far. `changes_settings`: True if the run has changed a setting of torch."""
        codes = {code: list(namespaces.values()) for code, namespaces in self._codes.values()}
        effects = [*self._effects, *_unreported_effects(codes)]
        return Observation(codes, effects, changes_settings)

    def _event(self, frame: types.FrameType, event: str, argument: Any) -> None:
        if callable(self._earlier_profile_function):
            self._earlier_profile_function(frame, event, argument)
        if event == "call" and id(frame.f_code) in self._gc_callbacks:
            self._collects = _is_start(frame)
        if self._collects:
            return
        if event == "c_call":
            if not self._ignored_frames:
                self._c_call(frame, argument)
        elif event == "call":
            self._call(frame)
        elif event == "return" and self._ignored_frames and self._ignored_frames[-1] is frame:
            self._ignored_frames.pop()
            if not self._ignored_frames and id(frame.f_code) not in self._ignored | self._logging_codes:
                self._imported(frame)

    def _call(self, frame: types.FrameType) -> None:
        code = frame.f_code
        queries_logger = id(code) in self._logging_codes and frame.f_back is not None and frame.f_back.f_globals is not frame.f_globals
        if (code.co_filename == _IMPORTLIB and code.co_name in _IMPORTING) or id(code) in self._ignored or queries_logger:
            self._ignored_frames.append(frame)
        if self._ignored_frames or frame.f_globals is _OWN_GLOBALS:
            return
        entry = self._codes.get(id(code))
        if entry is None:
            self._codes[id(code)] = code, {id(frame.f_globals): frame.f_globals}
        elif id(frame.f_globals) not in entry[1]:
            entry[1][id(frame.f_globals)] = frame.f_globals
        else:
            return
        if self._refuse and (unreported := _unreported_effects({code: [frame.f_globals]})):
            self._has_refused = True
            raise Refused(unreported[0])

    def _imported(self, frame: types.FrameType) -> None:
        """Adds the import of an untrusted module as an effect, because the module's code may do anything."""
        name = frame.f_locals.get("name")
        module = sys.modules.get(name) if isinstance(name, str) else None
        if isinstance(module, types.ModuleType) and not is_trusted_namespace(vars(module)):
            self._effects[Effect(f"import {name}", _user_location(frame))] = None

    def _c_call(self, frame: types.FrameType, function: Any) -> None:
        caller = frame.f_back if frame.f_code is _CURRENT_THREAD and frame.f_back is not None else frame
        origin = self._origins.get(id(caller.f_globals))
        if origin is None:
            within_torch = caller.f_globals is not _OWN_GLOBALS and _is_torch_namespace(caller.f_globals)
            origin = self._origins[id(caller.f_globals)] = within_torch, is_trusted_namespace(caller.f_globals)
            self._alive.append(caller.f_globals)
        if frame.f_globals is _OWN_GLOBALS and (function in (sys.setprofile, sys.getprofile) or function.__module__ == "sys.monitoring"):
            return
        owner = getattr(function, "__self__", None)
        if owner is None or isinstance(owner, (types.ModuleType, type)):
            key: Any = (id(function), origin) if isinstance(owner, types.ModuleType) else None
        else:
            key = type(owner), function.__name__, getattr(function, "__module__", None), origin
        what = self._effect_names.get(key) if key is not None else None
        if what is None:
            what = effect_of(function, *origin)
            if key is not None:
                self._effect_names[key] = what
                self._alive.append(function if isinstance(owner, types.ModuleType) else None)
        if what and not _is_checkpoint_state(function, frame):
            effect = Effect(what, _user_location(frame))
            self._effects[effect] = None
            if self._refuse:
                self._has_refused = True
                raise Refused(effect)

    def _method_call(self, frame: types.FrameType, function: Any) -> None:
        if not self._ignored_frames:
            self._c_call(frame, function)


@contextlib.contextmanager
def _showing_methods(callback: Callable[[types.FrameType, Any], None]) -> Iterator[None]:
    """Inside the context, calls callback(frame, function) before each call of a C method in this thread.

    The context does nothing in versions of Python that report such calls to the profile function.

    Raises: Refused if other tools use all of Python's monitoring tool ids; any exception of `callback`.
    """
    if not _HIDES_METHODS or sys.version_info < (3, 12):  # the latter for type checkers
        yield
        return
    monitoring, thread = sys.monitoring, get_ident()

    def called(code: types.CodeType, offset: int, function: Any, first: Any) -> None:
        if type(function) is types.MethodType and type(function.__func__) is types.BuiltinFunctionType and get_ident() == thread:
            callback(sys._getframe(1), function.__func__)

    for tool in range(6):  # all of Python's tool ids
        with contextlib.suppress(ValueError):  # in use
            monitoring.use_tool_id(tool, "dynaxla")
            break
    else:
        raise Refused(Effect("calls that dynaxla cannot observe, because all six tool ids of sys.monitoring are in use", ""))
    monitoring.register_callback(tool, monitoring.events.CALL, called)
    monitoring.set_events(tool, monitoring.events.CALL)
    try:
        yield
    finally:
        monitoring.set_events(tool, 0)
        monitoring.register_callback(tool, monitoring.events.CALL, None)
        monitoring.free_tool_id(tool)


def _is_start(frame: types.FrameType) -> bool:
    """True if `frame`, which has just been entered, is a call of a gc callback with "start". Its local variables are its arguments."""
    arguments = list(frame.f_locals.values())
    return any(value == "start" or (isinstance(value, tuple) and value[:1] == ("start",)) for value in arguments)


_OWN_GLOBALS = globals()
# The code that identifies the thread in which its caller runs.
_CURRENT_THREAD = threading.current_thread.__code__


def _is_torch_namespace(values: Mapping[str, Any]) -> bool:
    """True if the globals belong to a module of torch or dynaxla, or to functools, whose caches use locks."""
    return str(values.get("__name__")).partition(".")[0] in ("torch", "functorch", "dynaxla", "functools") and is_trusted_namespace(values)


def _is_checkpoint_state(function: Any, frame: types.FrameType | None) -> bool:
    """True if torch.utils.checkpoint saves or restores the state of a generator."""
    if not isinstance(getattr(function, "__self__", None), torch.Generator) or function.__name__ not in ("get_state", "set_state"):
        return False
    while frame is not None and is_trusted_namespace(frame.f_globals):
        if frame.f_globals.get("__name__") == "torch.utils.checkpoint":
            return True
        frame = frame.f_back
    return False


def _user_location(frame: types.FrameType | None) -> str:
    """Returns file, line and function of the innermost frame that does not run trusted code; "" if there is none."""
    while frame is not None:
        if not is_trusted_namespace(frame.f_globals):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""


def _unreported_effects(codes: Mapping[types.CodeType, Sequence[dict[str, Any]]]) -> list[Effect]:
    """Returns effects that Python does not report: untrusted code names NumPy's random functions, or constructors written in C."""
    found = []
    for code, namespaces in codes.items():
        names = names_of(code)
        for values in namespaces:
            if is_trusted_namespace(values):
                continue
            read = {name: values.get(name) for name in names.globals}
            draws = any(_is_of_numpy_random(value) for value in read.values())
            numpy = any(value is np for value in read.values()) or any(name.partition(".")[0] == "numpy" for name in names.imports)
            if draws or (numpy and "random" in names.all):
                found.append(Effect("numpy.random", f"{code.co_filename}:{code.co_firstlineno}, in {code.co_name}"))
            modules = [value for value in (*read.values(), *map(sys.modules.get, names.imports)) if isinstance(value, types.ModuleType)]
            named = [vars(module).get(name) for module in modules for name in names.all & vars(module).keys()]
            for kind in (*read.values(), *named):
                if isinstance(kind, type) and (what := constructor_effect_of(kind)):
                    found.append(Effect(what, f"{code.co_filename}:{code.co_firstlineno}, in {code.co_name}"))
    return found


def _is_of_numpy_random(value: Any) -> bool:
    owner = getattr(value, "__self__", value) if callable(value) else value
    modules = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None), module_of(type(owner))
    return any(isinstance(name, str) and name.startswith("numpy.random") for name in modules)
