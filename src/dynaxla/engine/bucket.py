"""One executable for many sizes: sizes are rounded up, and the program for the rounded sizes gets padded inputs and the true sizes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..buffers.overlaps import shares_with_itself
from ..capture.graph import AtenGraph, graph_device
from ..capture.inputs import Sizes
from ..config import Options
from ..lowering import SymbolValues, TensorSpec
from ..lowering.torch_equivalence import is_interchangeable
from ..observe import dump, metrics
from ..passes import pipeline
from ..passes.padding.padded_graph import ComputedOutput, InputOutput, NumberOutput, Padded, ViewOutput
from ..passes.padding.valid_sizes import Extents
from ..runtime import background, eager_fallback, late_checks, private, transfer
from ..runtime.cache import LeastRecentlyUsed
from ..runtime.layout import row_major
from .eager_executable import Kernels
from .executable import Executable
from .protocol import Engine, Runner
from .xla import Program

_EXACT, _FIRST = "exact", "first"
# The number of combinations of sizes that get exact executables before others get buckets, with the option `sizes="auto"`. A user with few
# combinations (a smaller last batch, another batch size for evaluation) pays for at most four compilations, and for no padding.
FIRST = 4

# Makes a tensor with a shape, and with the dtype and device of another tensor: a padded input before the input is copied into it.
Filled = Callable[[Sequence[int], torch.Tensor], torch.Tensor]


def zeros(shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    return torch.zeros(shape, dtype=like.dtype, device=like.device)


class Bucket:
    """An engine for graphs with dynamic sizes (options `sizes="buckets"` and "auto"). Programs of the inner engine run with rounded sizes.

    Args:
        inner: The engine of the programs.
        options: The options of the compilation.
        filled: Makes the memory of a padded input. No result depends on the padding; tests fill it with NaN.
    """

    def __init__(self, inner: Engine, options: Options, filled: Filled = zeros) -> None:
        self._inner, self._options, self._filled = inner, options, filled

    def runner(self, graph: AtenGraph) -> Runner:
        padded = pipeline.PADDING(graph)
        if isinstance(padded, str):
            level = logging.INFO if self._options.sizes == "auto" else logging.WARNING  # with "auto" the user has not asked for buckets
            dump.log.log(level, "%s is compiled for each combination of sizes, without buckets: %s", graph.name, padded)
        if not isinstance(padded, Padded):
            return self._inner.runner(graph)
        first = FIRST if self._options.sizes == "auto" else 0
        return BucketProgram(self._inner, graph, padded, self._options.executables, self._filled, first)


class BucketProgram:
    """The runner of a graph whose sizes are rounded up: one program serves all sizes that are rounded to the same values.

    While another thread compiles the program, torch's kernels run the graph itself with its true sizes.

    Args:
        engine: Compiles the padded graph, and the graph itself for exact sizes, which runs where an assumption on sizes does not hold for
            the rounded ones.
        graph: The graph.
        padded: The graph for rounded sizes.
        kept: The number of executables that are kept. The plans of calls are remembered for 64 times as many combinations of true sizes.
        filled: Makes the memory of a padded input.
        first: The number of combinations of sizes that get exact executables before others get buckets.
    """

    def __init__(self, engine: Engine, graph: AtenGraph, padded: Padded, kept: int, filled: Filled, first: int = 0) -> None:
        self._boxed_call = True
        self.name = graph.name
        self._engine, self._graph, self._padded, self._filled = engine, graph, padded, filled
        self._sizes = Sizes(graph.module.graph.find_nodes(op="placeholder"))
        self._device = graph_device(graph.module)
        self._calls: LeastRecentlyUsed[_CallPlan | str] = LeastRecentlyUsed(64 * kept)
        self._first = first

    @functools.cached_property
    def _run(self) -> Runner:
        run = self._engine.runner(dataclasses.replace(self._graph, module=self._padded.module, rederived_outputs=frozenset()))
        if isinstance(run, Program):
            run.cache.in_background &= is_interchangeable(self._graph.module)
        return run

    @functools.cached_property
    def _exact(self) -> Runner:
        return self._engine.runner(self._graph)

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        if eager_fallback.is_being_traced() or eager_fallback.is_needed(args):
            return self._exact(args)
        key = self._sizes.key(args)
        call = self._calls.get(key)
        if call is None:
            call = self._prepare(args)
            self._calls.put(key, call)
        if isinstance(call, str):
            if call is _EXACT:
                metrics.add("exact_sizes")
            return self._exact(args)
        given = args.copy()
        args.clear()
        results = self._results(call, given)
        if results is None:
            return self._meanwhile(call, given)
        with eager_fallback.kernels():
            return call.cut(given, results)

    def _results(self, call: _CallPlan, given: Sequence[Any]) -> Sequence[Any] | None:
        """Returns the program's results; None if it is not yet compiled."""
        executable, run = None, self._run
        if isinstance(run, Program) and run.cache.in_background:
            with eager_fallback.kernels():
                padded = call.padded(given, self._filled if call.is_ready else None)
            executable = run.ready(padded)
            was_ready, call.is_ready = call.is_ready, executable is not None
            if executable is None:
                return None
            if was_ready:
                return executable(executable.take(padded))
        with eager_fallback.kernels():
            padded = call.padded(given, self._filled)
        return run(padded) if executable is None else executable(executable.take(padded))

    def _meanwhile(self, call: _CallPlan, given: Sequence[Any]) -> list[Any]:
        """Returns the graph's outputs, computed by torch's kernels."""
        late_checks.look(self._device)
        profiled = torch.profiler.record_function(self.name) if private.is_profiling() else contextlib.nullcontext()
        with profiled, background.in_its_place():
            values = dict(zip(self._kernels.nodes, self._kernels.values(given), strict=True))
        metrics.add("meanwhile")
        others = [value for value in given if isinstance(value, torch.Tensor)] + self._kernels.constants
        with eager_fallback.kernels():
            return call.exact(given, [values[node] for node in self._padded.computed], others)

    @functools.cached_property
    def _kernels(self) -> Kernels:
        return Kernels(self._graph.module, self._padded.computed)

    def executables(self) -> list[Executable]:
        runners = [vars(self)[name] for name in ("_run", "_exact") if name in vars(self)]
        return [executable for runner in runners for executable in runner.executables()]

    def _prepare(self, args: Sequence[Any]) -> _CallPlan | str:
        """Plans calls with these sizes. Returns _EXACT if the sizes cannot be rounded, _FIRST for the first combinations of sizes."""
        if self._first > 0:
            self._first -= 1
            return _FIRST
        padded, true = self._padded, self._sizes.values(args)
        rounded = padded.rounding({symbol: size for symbol, size in true.values.items() if symbol.is_symbol})
        if rounded is None:
            return _EXACT
        whole = SymbolValues(rounded)
        lengths = [_value(size, true) for size in padded.sizes]
        if not all(0 < length <= _value(size, whole) for length, size in zip(lengths, padded.sizes, strict=True)):
            return _EXACT
        computed = [output.base if isinstance(output, ViewOutput) else output for output in padded.outputs]
        if any(isinstance(output, ComputedOutput) and _overlaps(whole.spec(output.fake)) for output in computed):
            return _EXACT  # padding would overlap valid elements
        return _CallPlan(
            torch.tensor(lengths, dtype=torch.int64, device=self._device),
            {position: _ValidRegion.of(extents, true, whole) for position, extents in padded.inputs.items()},
            {position: _value(size, whole) for position, size in padded.numbers.items()},
            [_output(output, true, whole) for output in padded.outputs],
        )


def _overlaps(spec: TensorSpec) -> bool:
    """True if elements share memory other than by a dimension of stride 0."""
    sizes = [1 if step == 0 else size for size, step in zip(spec.shape, spec.stride, strict=True)]
    return shares_with_itself(torch.empty_strided(sizes, spec.stride, device="meta"))


def _value(size: Any, symbols: SymbolValues) -> int:
    return size if isinstance(size, int) else symbols.number(size)


@dataclass(frozen=True)
class _ValidRegion:
    """The valid part of a padded tensor.

    Attributes:
        shape: The shape of the padded tensor.
        factors: The same shape, with one dimension for each factor of a size.
        true: The number of valid positions in each of these dimensions.
    """

    shape: tuple[int, ...]
    factors: tuple[int, ...]
    true: tuple[int, ...]

    @staticmethod
    def of(extents: Extents, true: SymbolValues, whole: SymbolValues) -> _ValidRegion:
        factors = [factor for extent in extents for factor in extent.factors]
        sizes = [[_value(factor, whole) for factor in extent.factors] for extent in extents]
        return _ValidRegion(
            tuple(map(math.prod, sizes)),
            tuple(size for dims in sizes for size in dims),
            tuple(_value(factor, true) for factor in factors),
        )

    @functools.cached_property
    def strides(self) -> tuple[int, ...]:
        return row_major(self.shape)

    @property
    def is_whole(self) -> bool:
        return self.factors == self.true

    def part(self, padded: torch.Tensor) -> torch.Tensor:
        """Returns the valid part, with one dimension for each factor.

        padded: A tensor that is row-major, or in which each dimension has one factor (except dimensions of size 1, which have none).
        """
        part = padded.reshape(self.factors)
        for dim, size in enumerate(self.true):
            part = part.narrow(dim, 0, size)
        return part

    def padded(self, tensor: torch.Tensor, filled: Filled | None) -> torch.Tensor:
        """Returns the tensor in row-major memory, with padding after the valid part. filled: None leaves the values uninitialised."""
        if self.is_whole and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
            # Strides of dimensions of size 1 are arbitrary, and could depend on the true sizes.
            return tensor if tensor.stride() == self.strides else tensor.as_strided(self.shape, self.strides)
        if filled is None:
            return tensor.new_empty(self.shape)
        result = filled(self.shape, tensor)
        self.part(result).copy_(tensor.reshape(self.true))
        return result


@dataclass(frozen=True)
class _ComputedOutput:
    """An output that the program computes.

    Attributes:
        index: Its index among the program's results.
        block: The valid part of the result.
        wanted: The shape, strides and dtype of the output.
    """

    index: int
    block: _ValidRegion
    wanted: TensorSpec

    def of(self, results: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns the output, given the program's results."""
        result = results[self.index]
        return _as_wanted(result if self.block.is_whole else self.block.part(result), self.wanted)


@dataclass(frozen=True)
class _ViewOutput:
    """An output that is a view of a value that the program computes.

    Attributes:
        base: That value.
        spec: The shape, strides and offset of the view.
        start: The storage offset of the base.
    """

    base: _ComputedOutput
    spec: TensorSpec
    start: int


@dataclass(frozen=True)
class _InputOutput:
    """An output that follows from the inputs: an input, a view of one, or a number.

    Attributes:
        of: Returns the output, given the graph's inputs.
    """

    of: Callable[[Sequence[Any]], Any]


def _output(
    output: InputOutput | ComputedOutput | ViewOutput | NumberOutput, true: SymbolValues, whole: SymbolValues
) -> _ComputedOutput | _ViewOutput | _InputOutput:
    """Returns the plan for an output."""
    if isinstance(output, ComputedOutput):
        return _ComputedOutput(output.index, _ValidRegion.of(output.extents, true, whole), true.spec(output.fake))
    if isinstance(output, ViewOutput):
        base = _ComputedOutput(output.base.index, _ValidRegion.of(output.base.extents, true, whole), true.spec(output.base.fake))
        return _ViewOutput(base, true.spec(output.fake), base.wanted.offset)
    if isinstance(output, NumberOutput):
        number = output.value if output.value is None or isinstance(output.value, (int, float, str)) else _value(output.value, true)
        return _InputOutput(lambda given: number)
    if output.fake is None:
        return _InputOutput(lambda given: given[output.position])
    spec, start = true.spec(output.fake), true.spec(output.source).offset
    return _InputOutput(lambda given: _view(given[output.position], spec, start))


def _view(tensor: torch.Tensor, spec: TensorSpec, start: int) -> torch.Tensor:
    return torch.as_strided(tensor, spec.shape, spec.stride, tensor.storage_offset() + spec.offset - start)


def _as_wanted(tensor: torch.Tensor, wanted: TensorSpec) -> torch.Tensor:
    """Returns a tensor's values with the wanted shape and strides, without a copy if the strides match. For autograd it is not a view."""
    tensor = tensor.reshape(wanted.shape)
    if all(size < 2 or own == step for size, own, step in zip(wanted.shape, tensor.stride(), wanted.stride, strict=True)):
        return transfer.reinterpret(tensor, wanted.shape, wanted.stride)
    once = [slice(0, 1) if step == 0 else slice(None) for step in wanted.stride]
    shape = [1 if step == 0 else size for size, step in zip(wanted.shape, wanted.stride, strict=True)]
    result = torch.empty_strided(shape, wanted.stride, dtype=tensor.dtype, device=tensor.device)
    result.copy_(tensor[tuple(once)])
    return transfer.reinterpret(result, wanted.shape, wanted.stride)


def _alone(tensor: torch.Tensor, used: set[int]) -> torch.Tensor:
    """Returns the tensor in a storage of its own, copied if needed. used: ids of storages in use, to which the result's is added."""
    tensor = tensor.resolve_conj().resolve_neg()
    if private.storage_id(tensor) in used or tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size():
        tensor = tensor.clone()
    used.add(private.storage_id(tensor))
    return tensor


class _CallPlan:
    """The plan of a call with certain sizes.

    Args:
        lengths: int64[n], the true sizes that the program reads.
        inputs: The padded inputs, by position.
        numbers: The inputs that are rounded sizes, by position.
        outputs: The plans of the graph's outputs.

    Attributes:
        is_ready: Whether the program was compiled at the previous call.
    """

    def __init__(
        self,
        lengths: torch.Tensor,
        inputs: Mapping[int, _ValidRegion],
        numbers: Mapping[int, int],
        outputs: Sequence[_ComputedOutput | _ViewOutput | _InputOutput],
    ) -> None:
        self._lengths, self._inputs, self._numbers, self._outputs = lengths, inputs, numbers, outputs
        self.is_ready = False

    def padded(self, given: Sequence[Any], filled: Filled | None) -> list[Any]:
        """Returns the program's arguments. filled: None leaves the values of padded tensors uninitialised."""
        found = [*given, self._lengths]
        for position, block in self._inputs.items():
            if isinstance(given[position], torch.Tensor):  # autograd passes None as the gradient of an output that the loss does not use
                found[position] = block.padded(given[position], filled)
        for position, size in self._numbers.items():
            found[position] = size
        return found

    def cut(self, given: Sequence[Any], results: Sequence[Any]) -> list[Any]:
        """Returns the graph's outputs, cut from the program's results."""
        return self._each(given, lambda output: output.of(results))

    def exact(self, given: Sequence[Any], values: Sequence[Any], others: Sequence[torch.Tensor]) -> list[Any]:
        """Returns the graph's outputs, each in its own memory, from values that torch's kernels have computed.

        Args:
            given: The graph's inputs.
            values: The kernels' value for each output of the program.
            others: Tensors that no output may alias.

        Raises: RuntimeError for a value whose shape or dtype differs from that in the graph.
        """
        used = {private.storage_id(tensor) for tensor in others}

        def own(output: _ComputedOutput) -> torch.Tensor:
            value, wanted = values[output.index], output.wanted
            if (value.shape, value.dtype) != (wanted.shape, wanted.dtype):
                raise RuntimeError(
                    f"an op returned {value.dtype} of shape {list(value.shape)}, but its fake (meta) implementation promised {wanted}"
                )
            return _as_wanted(_alone(value, used), wanted)

        return self._each(given, own)

    def _each(self, given: Sequence[Any], make: Callable[[_ComputedOutput], torch.Tensor]) -> list[Any]:
        """Returns the graph's outputs. Several of them may be, or may be views of, one output of the program; these share memory."""
        made: dict[int, torch.Tensor] = {}
        found: list[Any] = []
        for output in self._outputs:
            if isinstance(output, _InputOutput):
                found.append(output.of(given))
                continue
            base = output.base if isinstance(output, _ViewOutput) else output
            is_new = base.index not in made
            first = made[base.index] = make(base) if is_new else made[base.index]
            if isinstance(output, _ViewOutput):
                found.append(_view(first, output.spec, output.start))
            else:
                found.append(first if is_new else torch.as_strided(first, first.shape, first.stride(), int(first.storage_offset())))
        return found
