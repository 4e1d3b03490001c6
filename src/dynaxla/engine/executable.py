"""Compiled programs and their calls: alias the arguments, execute, alias the results."""

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
from ..runtime import affinity, callbacks, heap, private, programs

# The lists of all active `recorded_runs` contexts.
_recorders: list[list[ProgramRun]] = []


@contextlib.contextmanager
def recorded_runs() -> Iterator[list[ProgramRun]]:
    """Collects the programs that run inside the context, in all threads and in order. Programs of eager ops and of recordings are collected
    only if they run on a mesh."""
    runs: list[ProgramRun] = []
    _recorders.append(runs)
    try:
        yield runs
    finally:
        _recorders[:] = [other for other in _recorders if other is not runs]


def is_recording_runs() -> bool:
    """True inside `recorded_runs`, in any thread."""
    return bool(_recorders)


class UnboundProgram:
    """A program on a mesh that is called with arrays and has no binding: the program of an eager op or of a recording."""

    def __init__(self, name: str, program: programs.XlaProgram) -> None:
        self.name, self.program = name, program

    def __call__(self, arrays: Sequence[jax.Array]) -> Sequence[jax.Array]:
        if _recorders:
            run = ProgramRun(self.name, self.program, user_frames.line())
            for runs in _recorders:
                runs.append(run)
        return self.program.call(arrays)


class ProgramRun(NamedTuple):
    """A program that has run.

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

    Call it with the tensors from `take`; it returns the graph's outputs. No call returns while XLA may still read torch's memory (on a GPU:
    torch's current stream waits for XLA's).

    Args:
        name: The graph's name.
        program: The program, owned by the executable; None if there is nothing to compute.
        binding: Converts tensors to arrays and back.
        checks: The exception class and message of each check. The program's last result is the index of the first check that failed, or the
            number of checks if all hold.
        has_side_effects: True if the program calls torch kernels, or communicates with other processes.
        precheck: The program of the checks, if they are a separate program that runs first.
        collectives: Makes the context manager in which a program with XLA's own collectives runs.
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
        # Makes the context in which the program runs.
        self._run_context: Callable[[], contextlib.AbstractContextManager[Any]] = programs.below_caller
        calls_back = program is not None and program.calls_back
        if calls_back or collectives is not contextlib.nullcontext:
            self._run_context = functools.partial(_entered, callbacks.call if calls_back else contextlib.nullcontext, collectives)
        # The first calls allocate from a heap that compilation has fragmented; later calls reuse the memory that these release.
        self._is_new = True
        self._unsettled_calls = 2 if program is not None and program.is_large else 0

    def record_run(self) -> None:
        """Reports to all active `recorded_runs` contexts that the program runs. A planned program is reported without running."""
        for runs in _recorders:
            runs.append(ProgramRun(self.name, self.program))

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """Runs the program on the tensors that `take` returned, and returns the graph's outputs.

        Raises: ExecutionError (including OutOfMemory), exceptions of torch kernels inside the program, and errors of the program's checks.
        The arguments are unchanged in these cases.
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
        affinity.processors()
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
        if self._unsettled_calls > 0:
            self._settle()
        return binding.outputs(results, tensors)

    def _run_in_place(self, call: Callable[[Sequence[jax.Array]], Sequence[jax.Array]], tensors: Sequence[torch.Tensor]) -> list[Any]:
        """Calls a program that writes to donated arguments. Once it has run, its results must be exported even if an exception occurs."""
        done: list[Any] = []
        try:
            arrays = self.binding.arrays(tensors)
            if self._precheck is not None:
                self.binding.report(self._precheck(arrays)[0], self._checks, self.name)
            # `extend` and `map` keep execution and the store of its result in C, so that Ctrl-C arrives before or after both.
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
        """Repeats a call that has failed with `error`, if XLA ran out of memory and torch could give back some.

        A program writes only to its own memory and may therefore run again, unless it has side effects.

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

    def _settle(self) -> None:
        """Returns freed memory to the system after the last of the first calls."""
        self._unsettled_calls -= 1
        if not self._unsettled_calls:
            heap.return_freed_memory()


@contextlib.contextmanager
def _entered(*contexts: Callable[[], contextlib.AbstractContextManager[Any]]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for context in (programs.below_caller, *contexts):
            stack.enter_context(context())
        yield


def is_exhausted(error: Exception) -> bool:
    """True if the error says that XLA ran out of memory."""
    return any(text in str(error) for text in ("RESOURCE_EXHAUSTED", "Out of memory", "out of memory"))


def execution_error(name: str, error: Exception) -> ExecutionError:
    """Returns the error to raise for an exception of XLA while a program ran; OutOfMemory if memory was exhausted."""
    text = str(error)
    if is_exhausted(error):
        return OutOfMemory(f"{name} ran out of memory: {text}", hint="use a smaller batch, or free tensors first; the inputs are unchanged")
    return ExecutionError(f"{name} failed while it ran: {text}", hint="the inputs are unchanged; options={'dump': DIR} writes the program")


def compilation_error(name: str, error: Exception) -> CompilationError:
    """Returns the error to raise for an exception of XLA while it compiled a program."""
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
