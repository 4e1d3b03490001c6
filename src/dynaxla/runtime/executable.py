"""A compiled program and its call: alias the arguments, execute, alias the results."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch

from ..errors import CompilationError, ExecutionError, OutOfMemory
from ..observe import metrics
from . import affinity, heap, kernels, transfer
from .arguments import Arguments

Assemble = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], list[Any]]


class Executable:
    """Owns the XLA program, and the aliases of what it was last called with.

    Call it with the tensors it takes; it returns the graph's outputs. No call returns while XLA may still read torch's memory (on a GPU:
    torch's current stream waits for XLA's).
    """

    def __init__(
        self,
        name: str,
        program: transfer.XlaProgram | None,
        arguments: Arguments,
        assemble: Assemble,
        seed: Callable[[], jax.Array] | None,
        torch_device: torch.device,
        positions: Sequence[int],
        checks: Sequence[tuple[type[Exception], str]] = (),
    ) -> None:
        self.name = name
        self.program = program
        self.arguments = arguments
        self._call = program.call if program is not None else None
        self._assemble = assemble
        self._seed = seed
        self._torch_device = torch_device
        self.positions = list(positions)
        self._checks = checks
        self._kernels = kernels.call if program is not None and program.calls_back else contextlib.nullcontext
        self._codes: deque[torch.Tensor | None] = deque([None])
        # The first calls take what the heap has left between the holes that compiling made; later ones find what those gave back.
        self._unsettled_calls = 2 if program is not None and program.is_large else 0
        self._takes_all = self.positions == list(range(len(self.positions)))

    def take(self, args: list[Any]) -> list[torch.Tensor]:
        """The tensors that the executable wants, in its order, of all the graph's inputs. Empties args."""
        everything = self._takes_all and len(args) == len(self.positions)
        tensors = args.copy() if everything else [args[position] for position in self.positions]
        args.clear()
        return tensors

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """tensors: the program's arguments first, then those that only outputs alias.

        Raises: ExecutionError (OutOfMemory among them), what a torch kernel inside the program raised, and what the program's own checks
        raise; the arguments are unchanged then.
        """
        if torch.autograd.profiler._is_profiler_enabled:
            with torch.profiler.record_function(self.name):
                return self._run(tensors)
        return self._run(tensors)

    def _run(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        if self._call is None:
            return self._assemble((), tensors)
        count = len(self.arguments.parameters)
        affinity.processors()
        try:
            with transfer.below_caller(), self._kernels():
                arrays = self.arguments.arrays(tensors if len(tensors) == count else tensors[:count])
                results = self._call(arrays if self._seed is None else (self._seed(), *arrays))
                stream = _torch_stream(self._torch_device) if self._torch_device.type == "cuda" else None
                buffers = [transfer.export_array(result, stream) for result in results]
        except jax.errors.JaxRuntimeError as error:
            raise execution_error(self.name, error) from error
        if self._checks:
            self._raise_failed(buffers.pop())
        metrics.add("calls")
        if self._unsettled_calls > 0:
            self._settle()
        return self._assemble(buffers, tensors)

    def _settle(self) -> None:
        self._unsettled_calls -= 1
        if not self._unsettled_calls:
            heap.return_freed_memory()

    def _raise_failed(self, code: torch.Tensor) -> None:
        """code: the index of the first check that failed, or the number of checks. A GPU's is read at the next call: it is done by then."""
        if self._torch_device.type != "cpu":
            self._codes.append(code)
            earlier = self._codes.popleft()  # every code is looked at once, whatever threads call at the same time
            if earlier is None:
                return
            code = earlier
        index = int(code)
        if index < len(self._checks):
            error, message = self._checks[index]
            raise error(message)


def _torch_stream(device: torch.device) -> int:
    """torch's current stream, as DLPack writes it: CUDA's default stream is 1."""
    return torch.cuda.current_stream(device).cuda_stream or 1


def execution_error(name: str, error: Exception) -> ExecutionError:
    text = str(error)
    if "RESOURCE_EXHAUSTED" in text or "Out of memory" in text or "out of memory" in text:
        return OutOfMemory(f"{name} ran out of memory: {text}", hint="a smaller batch, or free tensors first; the inputs are unchanged")
    return ExecutionError(f"{name} failed while it ran: {text}", hint="the inputs are unchanged; options={'dump': DIR} writes the program")


def compilation_error(name: str, error: Exception) -> CompilationError:
    return CompilationError(
        f"XLA could not compile {name}: {error}",
        hint="options={'dump': DIR} writes the program; check options={'xla': ...} if you gave any",
    )
