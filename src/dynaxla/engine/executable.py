"""A compiled program and its call: alias the arguments, execute, alias the results."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import torch

from ..buffers.protocol import Binding
from ..errors import CompilationError, ExecutionError, OutOfMemory, UnsupportedOp
from ..observe import events, metrics
from ..runtime import affinity, callbacks, heap, private, programs, user_frames

_watching: list[list[Ran]] = []


@contextlib.contextmanager
def watched() -> Iterator[list[Ran]]:
    """Inside, in all threads: the programs that run, as they come; of eager ops and recordings those on a mesh alone."""
    seen: list[Ran] = []
    _watching.append(seen)
    try:
        yield seen
    finally:
        _watching[:] = [other for other in _watching if other is not seen]


def is_watched() -> bool:
    """Whether somebody wants to know what runs."""
    return bool(_watching)


class Bare:
    """A program on a mesh without a binding: an eager op's, or that of a recording. Call it with arrays. Attributes: name; program."""

    def __init__(self, name: str, program: programs.XlaProgram) -> None:
        self.name, self.program = name, program

    def __call__(self, arrays: Sequence[jax.Array]) -> Sequence[jax.Array]:
        if _watching:
            ran = Ran(self.name, self.program, user_frames.line())
            for seen in _watching:
                seen.append(ran)
        return self.program.call(arrays)


class Ran(NamedTuple):
    """A program that has run. Attributes: name; program; line (the user's that has called it, if it is `Bare`)."""

    name: str
    program: programs.XlaProgram | None
    line: str = ""


class Executable:
    """Owns the XLA program (None: there is nothing to compute), and its binding to tensors.

    Call it with the tensors it takes; it returns the graph's outputs. No call returns while XLA may still read torch's memory (on a GPU:
    torch's current stream waits for XLA's). checks: the exceptions and messages that the program's last result chooses among. acts: whether
    it does more than compute: calls kernels of torch's, or other processes. first: the checks, if they are a program of their own that
    comes before. among: what a program with collectives of XLA's own runs in.
    """

    def __init__(
        self,
        name: str,
        program: programs.XlaProgram | None,
        binding: Binding,
        checks: Sequence[tuple[type[Exception], str]] = (),
        acts: bool = True,
        first: programs.XlaProgram | None = None,
        among: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self.name = name
        self.program = program
        self.binding = binding
        self.take = binding.take
        self._call = program.call if program is not None else None
        self._first = first.call if first is not None else None
        self._execute = program.execute if program is not None else None
        self._results = program.results if program is not None else list
        self._acts = acts
        self._checks = checks
        self._kernels = callbacks.call if program is not None and program.calls_back else contextlib.nullcontext
        self._among = among
        # The first calls take what the heap has left between the holes that compiling made; later ones find what those gave back.
        self._is_new = True
        self._unsettled_calls = 2 if program is not None and program.is_large else 0

    def show(self) -> None:
        """That it runs, to those who watch; a program for a plan only seems to."""
        for seen in _watching:
            seen.append(Ran(self.name, self.program))

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """tensors: as `take` gives them.

        Raises: ExecutionError (OutOfMemory among them), what a torch kernel inside the program raised, and what the program's own checks
        raise; the arguments are unchanged then.
        """
        if private.is_profiling():
            with torch.profiler.record_function(self.name):
                return self._run(tensors)
        return self._run(tensors)

    def _run(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        self.show()
        binding = self.binding
        if self._call is None:
            return binding.outputs((), tensors)
        affinity.processors()
        try:
            with programs.below_caller(), self._kernels(), self._among():
                start = metrics.now()
                if binding.lends:
                    results = self._run_in_place(self._call, tensors)
                else:
                    arrays = binding.arrays(tensors)
                    try:
                        results = binding.export(self._call(arrays), tensors)
                    except jax.errors.JaxRuntimeError as error:
                        results = self._repeat(self._call, arrays, error, tensors)
                seconds, is_first = metrics.ran(start, self._is_new), self._is_new
                self._is_new = False
                if events.is_heard():
                    events.tell(events.Ran(self, seconds, is_first))
        except jax.errors.JaxRuntimeError as error:
            raise execution_error(self.name, error) from error
        if self._checks and self._first is None:
            binding.report(results.pop(), self._checks, self.name)
        if self._unsettled_calls > 0:
            self._settle()
        return binding.outputs(results, tensors)

    def _run_in_place(self, call: Callable[[Sequence[jax.Array]], Sequence[jax.Array]], tensors: Sequence[torch.Tensor]) -> list[Any]:
        """A call of a program that writes to its arguments: its results must not be lost once it has run."""
        done: list[Any] = []
        try:
            arrays = self.binding.arrays(tensors)
            if self._first is not None:
                self.binding.report(self._first(arrays)[0], self._checks, self.name)
            # In C as far as possible: Ctrl-C comes before the program, or behind it.
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
        """What a call gives that has failed with `error`, at its second trial, if there is memory now that was missing.

        A program writes nothing but its own memory, so it may start again, unless it calls kernels of torch's, which may act.
        """
        if not self.binding.abandon(is_exhausted(error), tensors) or self._acts:
            raise error
        metrics.add("repeated")
        try:
            return self.binding.export(call(arrays), tensors)
        except jax.errors.JaxRuntimeError:
            self.binding.abandon(False, tensors)
            raise

    def _settle(self) -> None:
        self._unsettled_calls -= 1
        if not self._unsettled_calls:
            heap.return_freed_memory()


def is_exhausted(error: Exception) -> bool:
    """Whether XLA had too little memory."""
    return any(text in str(error) for text in ("RESOURCE_EXHAUSTED", "Out of memory", "out of memory"))


def execution_error(name: str, error: Exception) -> ExecutionError:
    """What a caller gets for an exception of XLA's while a program ran: OutOfMemory if that is what it was."""
    text = str(error)
    if is_exhausted(error):
        return OutOfMemory(f"{name} ran out of memory: {text}", hint="a smaller batch, or free tensors first; the inputs are unchanged")
    return ExecutionError(f"{name} failed while it ran: {text}", hint="the inputs are unchanged; options={'dump': DIR} writes the program")


def compilation_error(name: str, error: Exception) -> CompilationError:
    """What a caller gets for an exception of XLA's while it compiled a program."""
    return CompilationError(
        f"XLA could not compile {name}: {error}",
        hint="options={'dump': DIR} writes the program; check options={'xla': ...} if you gave any",
    )


def drawing_under_trace(name: str) -> UnsupportedOp:
    """What a caller gets for random numbers under jax.jit, where each call would draw those of the first."""
    return UnsupportedOp(
        f"{name} draws random numbers from torch's generator inside a function that JAX traces: all calls would have the same ones",
        hint="switch it off (model.eval()), or draw with jax.random and give the numbers as an argument",
    )
