"""Compiled programs and their calls. A call aliases the arguments as arrays, executes the program, and aliases the results as tensors."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import torch

from .. import user_frames
from ..buffers.protocol import Binding
from ..errors import CompilationError, ExecutionError, OutOfMemory, UnsupportedOp
from ..observe import events, metrics
from ..runtime import callbacks, heap, private, programs

# The lists of all active `recorded_runs` contexts.
_recorders: list[list[ProgramRun]] = []


@contextlib.contextmanager
def recorded_runs() -> Iterator[list[ProgramRun]]:
    """Collects the programs that run while the context is active, in all threads and in order.

    Programs of eager ops and of recorded ops (device "jax") are collected only if they run on a mesh.
    """
    runs: list[ProgramRun] = []
    _recorders.append(runs)
    try:
        yield runs
    finally:
        _recorders[:] = [active for active in _recorders if active is not runs]


def is_recording_runs() -> bool:
    """True while any thread is inside `recorded_runs`."""
    return bool(_recorders)


class UnboundProgram:
    """A program on a mesh that is called with arrays and has no binding to tensors: the program of an eager op, or of recorded ops."""

    def __init__(self, name: str, program: programs.XlaProgram) -> None:
        self.name, self.program = name, program

    def __call__(self, arrays: Sequence[jax.Array]) -> Sequence[jax.Array]:
        if _recorders:
            run = ProgramRun(self.name, self.program, user_frames.short_location())
            for runs in _recorders:
                runs.append(run)
        return self.program.call(arrays)


class ProgramRun(NamedTuple):
    """A run of a program.

    Attributes:
        name: The program's name.
        program: The program; None if there was nothing to compute.
        line: The line of user code that called an `UnboundProgram`; "" for other programs.
    """

    name: str
    program: programs.XlaProgram | None
    line: str = ""


class Executable:
    """An XLA program with its binding to tensors.

    `executable(executable.take(args))` returns the graph's outputs. When the call returns, XLA no longer reads torch's memory. (On a GPU
    the call returns earlier, but torch's current stream waits for XLA's stream.)

    Args:
        name: The graph's name.
        program: The program, owned by the executable; None if there is nothing to compute.
        binding: Converts tensors to arrays and back.
        checks: The exception class and message of each check. The program's last result is the index of the first check that failed, or the
            number of checks if all hold.
        has_side_effects: True if the program calls torch kernels, or communicates with other processes.
        precheck: The program of the checks, if the checks are a separate program that runs first.
        collectives: For a program with XLA's own collectives: creates the context manager in which each call runs.
    """

    def __init__(
        self,
        name: str,
        program: programs.XlaProgram | None,
        binding: Binding,
        checks: Sequence[tuple[type[Exception], str]] = (),
        has_side_effects: bool = True,
        precheck: programs.XlaProgram | None = None,
        collectives: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self.name = name
        self.program = program
        self.binding = binding
        self.take = binding.take
        self._call = program.call if program is not None else None
        self._precheck = precheck.call if precheck is not None else None
        self._execute = program.execute if program is not None else None
        self._results = program.results if program is not None else list
        self._has_side_effects, self._donates = has_side_effects, binding.donates_inputs
        self._checks = checks
        # Creates the context manager in which a call runs.
        self._run_context: Callable[[], contextlib.AbstractContextManager[Any]] = programs.without_outer_frames
        calls_back = program is not None and program.calls_back
        if calls_back or collectives is not contextlib.nullcontext:
            self._run_context = functools.partial(_entered, callbacks.call if calls_back else contextlib.nullcontext, collectives)
        self._is_new = True
        # The number of calls after which freed memory is returned to the system. The first calls of a large program allocate from a heap
        # that compilation has fragmented. Later calls reuse the memory that the first calls have freed.
        self._calls_until_trim = 2 if program is not None and program.is_large else 0

    def record_run(self) -> None:
        """Adds a run of the program to the list of each active `recorded_runs` context. Planning adds programs that do not run, too."""
        for runs in _recorders:
            runs.append(ProgramRun(self.name, self.program))

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """Runs the program on the tensors that `take` returned, and returns the graph's outputs.

        Raises: ExecutionError (including OutOfMemory), exceptions of torch kernels inside the program, and errors of the program's checks.
        If it raises, the arguments are unchanged.
        """
        if private.is_profiling():
            with torch.profiler.record_function(self.name):
                return self._run(tensors)
        return self._run(tensors)

    def _run(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        if _recorders:
            self.record_run()
        binding = self.binding
        if self._call is None:
            return binding.outputs((), tensors)
        try:
            with self._run_context():
                start = metrics.now()
                if self._donates:
                    results = self._run_in_place(self._call, tensors)
                else:
                    arrays = binding.arrays(tensors)
                    try:
                        results = binding.export(self._call(arrays), tensors)
                    except jax.errors.JaxRuntimeError as error:
                        results = self._repeat(self._call, arrays, error, tensors)
                seconds, is_first = metrics.count_run(start, self._is_new), self._is_new
                self._is_new = False
                if events.has_listeners():
                    events.emit(events.ProgramRan(self, seconds, is_first))
        except jax.errors.JaxRuntimeError as error:
            raise execution_error(self.name, error) from error
        if self._checks and self._precheck is None:
            binding.report(results.pop(), self._checks, self.name)
        if self._calls_until_trim > 0:
            self._count_down_to_trim()
        return binding.outputs(results, tensors)

    def _run_in_place(self, call: Callable[[Sequence[jax.Array]], Sequence[jax.Array]], tensors: Sequence[torch.Tensor]) -> list[Any]:
        """Calls a program that overwrites donated arguments.

        After the program has run, the old values are lost, so its results are exported even if an exception occurs (such as Ctrl-C).
        """
        done: list[Any] = []
        try:
            arrays = self.binding.arrays(tensors)
            if self._precheck is not None:
                self.binding.report(self._precheck(arrays)[0], self._checks, self.name)
            # `extend` and `map` run the program and store its result without returning to Python in between. So Ctrl-C arrives either
            # before the program runs or after its result is stored.
            done.extend(map(self._execute or call, (arrays,)))
            return self.binding.export(self._results(done[0]), tensors)
        except BaseException:
            if done:
                self.binding.export(self._results(done[0]), tensors)
            else:
                self.binding.abandon(False, tensors)
            raise

    def _repeat(
        self,
        call: Callable[[Sequence[jax.Array]], Sequence[jax.Array]],
        arrays: Sequence[jax.Array],
        error: Exception,
        tensors: Sequence[torch.Tensor],
    ) -> list[torch.Tensor]:
        """Repeats a call that has failed with `error`, if XLA ran out of memory and torch could release cached memory.

        A program without side effects may run again, because it writes only to its own memory.

        Raises: `error` if the call cannot be repeated; JaxRuntimeError if the second attempt fails.
        """
        if not self.binding.abandon(is_exhausted(error), tensors) or self._has_side_effects:
            raise error
        metrics.add("repeated")
        try:
            return self.binding.export(call(arrays), tensors)
        except jax.errors.JaxRuntimeError:
            self.binding.abandon(False, tensors)
            raise

    def _count_down_to_trim(self) -> None:
        """Returns freed memory to the system after the last of the first calls."""
        self._calls_until_trim -= 1
        if not self._calls_until_trim:
            heap.return_freed_memory()


@contextlib.contextmanager
def _entered(*contexts: Callable[[], contextlib.AbstractContextManager[Any]]) -> Iterator[None]:
    """Enters `programs.without_outer_frames()` and then the context managers that these functions create."""
    with contextlib.ExitStack() as stack:
        for context in (programs.without_outer_frames, *contexts):
            stack.enter_context(context())
        yield


def is_exhausted(error: Exception) -> bool:
    """True if the error says that XLA ran out of memory."""
    return any(text in str(error) for text in ("RESOURCE_EXHAUSTED", "Out of memory", "out of memory"))


def execution_error(name: str, error: Exception) -> ExecutionError:
    """Returns the error to raise in place of XLA's exception while a program ran: OutOfMemory if memory was exhausted."""
    text = str(error)
    if is_exhausted(error):
        return OutOfMemory(f"{name} ran out of memory: {text}", hint="use a smaller batch, or free tensors first; the inputs are unchanged")
    return ExecutionError(f"{name} failed while it ran: {text}", hint="the inputs are unchanged; options={'dump': DIR} writes the program")


def compilation_error(name: str, error: Exception) -> CompilationError:
    """Returns the error to raise in place of XLA's exception while it compiled a program."""
    return CompilationError(
        f"XLA could not compile {name}: {error}",
        hint="options={'dump': DIR} writes the program; check options={'xla': ...} if you gave any",
    )


def random_numbers_under_jit(name: str) -> UnsupportedOp:
    """Returns the error to raise for random numbers under jax.jit, where each call would draw the numbers of the first call again."""
    return UnsupportedOp(
        f"{name} draws random numbers from torch's generator inside a function that JAX traces: all calls would get the same numbers",
        hint="turn it off (model.eval()), or draw the numbers with jax.random and pass them as an argument",
    )
