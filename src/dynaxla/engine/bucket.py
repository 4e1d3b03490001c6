"""One executable for many sizes: sizes are rounded up; the program for those gets padded inputs, and the true sizes."""

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
from ..capture.aten_graph import AtenGraph, graph_device
from ..capture.extents import Extents
from ..capture.inputs import Sizes
from ..capture.padded_graph import Computed, Given, Number, Padded, Viewed, pad
from ..config import Options
from ..lowering import SymbolValues, TensorSpec
from ..lowering.interchange import is_interchangeable
from ..observe import dump, metrics
from ..runtime import background, by_torch, late_checks, private, transfer
from ..runtime.cache import LeastRecentlyUsed
from ..runtime.layout import row_major
from .executable import Executable
from .pending import Kernels
from .protocol import Engine, Runner
from .xla import Program

_EXACT, _FIRST = "exact", "first"
# How many combinations of sizes have exact executables before others have buckets, with the option `sizes="auto"`. Who has few of them (a
# last batch, another one for evaluation) pays for four compilations, and for no padding.
FIRST = 4

# Makes the tensor that an input is written to: of a shape, like another tensor.
Filled = Callable[[Sequence[int], torch.Tensor], torch.Tensor]


def zeros(shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    return torch.zeros(shape, dtype=like.dtype, device=like.device)


class Bucket:
    """An engine for graphs with dynamic sizes (options `sizes="buckets"` and "auto"): programs of another engine run them with rounded
    ones.

    filled: what padding holds. No result depends on it, which tests show with NaN.
    """

    def __init__(self, inner: Engine, options: Options, filled: Filled = zeros) -> None:
        self._inner, self._options, self._filled = inner, options, filled

    def runner(self, graph: AtenGraph) -> Runner:
        padded = pad(graph)
        if isinstance(padded, str):
            level = logging.INFO if self._options.sizes == "auto" else logging.WARNING  # nobody asked for buckets
            dump.log.log(level, "%s is compiled for each combination of sizes, not for buckets: %s", graph.name, padded)
        if not isinstance(padded, Padded):
            return self._inner.runner(graph)
        first = FIRST if self._options.sizes == "auto" else 0
        return BucketProgram(self._inner, graph, padded, self._options.executables, self._filled, first)


class BucketProgram:
    """A graph of which one program serves all sizes that are rounded to the same ones. engine: of that program, and of the one for exact
    sizes, which runs where something that was assumed of sizes does not hold for the rounded ones. kept: how many combinations of true
    sizes are remembered, with what a call does for each. first: how many of them have exact executables, before others have buckets.

    While another thread compiles the program, torch's kernels run the graph itself, with its true sizes.
    """

    def __init__(self, engine: Engine, graph: AtenGraph, padded: Padded, kept: int, filled: Filled, first: int = 0) -> None:
        self._boxed_call = True
        self.name = graph.name
        self._engine, self._graph, self._padded, self._filled = engine, graph, padded, filled
        self._sizes = Sizes(graph.module.graph.find_nodes(op="placeholder"))
        self._device = graph_device(graph.module)
        self._calls: LeastRecentlyUsed[_Call | str] = LeastRecentlyUsed(64 * kept)
        self._first = first

    @functools.cached_property
    def _run(self) -> Runner:
        run = self._engine.runner(dataclasses.replace(self._graph, module=self._padded.module, remade=frozenset()))
        if isinstance(run, Program):
            run.in_background &= is_interchangeable(self._graph.module)
        return run

    @functools.cached_property
    def _exact(self) -> Runner:
        return self._engine.runner(self._graph)

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        if by_torch.is_looked_at() or by_torch.is_needed(args):
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
        with by_torch.kernels():
            return call.cut(given, results)

    def _results(self, call: _Call, given: Sequence[Any]) -> Sequence[Any] | None:
        """The program's; None if it is not ready."""
        executable, run = None, self._run
        if isinstance(run, Program) and run.in_background:
            with by_torch.kernels():
                padded = call.padded(given, self._filled if call.is_ready else None)
            executable = run.ready(padded)
            was_ready, call.is_ready = call.is_ready, executable is not None
            if executable is None:
                return None
            if was_ready:
                return executable(executable.take(padded))
        with by_torch.kernels():
            padded = call.padded(given, self._filled)
        return run(padded) if executable is None else executable(executable.take(padded))

    def _meanwhile(self, call: _Call, given: Sequence[Any]) -> list[Any]:
        """The graph's outputs, by torch's kernels."""
        late_checks.look(self._device)
        profiled = torch.profiler.record_function(self.name) if private.is_profiling() else contextlib.nullcontext()
        with profiled, background.in_its_place():
            values = dict(zip(self._kernels.nodes, self._kernels.values(given), strict=True))
        metrics.add("meanwhile")
        others = [value for value in given if isinstance(value, torch.Tensor)] + self._kernels.constants
        with by_torch.kernels():
            return call.exact(given, [values[node] for node in self._padded.computed], others)

    @functools.cached_property
    def _kernels(self) -> Kernels:
        return Kernels(self._graph.module, self._padded.computed)

    def executables(self) -> list[Executable]:
        runners = [vars(self)[name] for name in ("_run", "_exact") if name in vars(self)]
        return [executable for runner in runners for executable in runner.executables()]

    def _prepare(self, args: Sequence[Any]) -> _Call | str:
        """What a call with sizes like these does; _EXACT where sizes cannot be rounded, _FIRST where they need not be yet."""
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
        computed = [output.base if isinstance(output, Viewed) else output for output in padded.outputs]
        if any(isinstance(output, Computed) and _overlaps(whole.spec(output.fake)) for output in computed):
            return _EXACT  # what does not count would lie where something does
        return _Call(
            torch.tensor(lengths, dtype=torch.int64, device=self._device),
            {position: _Block.of(extents, true, whole) for position, extents in padded.inputs.items()},
            {position: _value(size, whole) for position, size in padded.numbers.items()},
            [_output(output, true, whole) for output in padded.outputs],
        )


def _overlaps(spec: TensorSpec) -> bool:
    """Whether elements share memory, but for those that are one, repeated."""
    sizes = [1 if step == 0 else size for size, step in zip(spec.shape, spec.stride, strict=True)]
    return shares_with_itself(torch.empty_strided(sizes, spec.stride, device="meta"))


def _value(size: Any, symbols: SymbolValues) -> int:
    return size if isinstance(size, int) else symbols.number(size)


@dataclass(frozen=True)
class _Block:
    """What counts of a tensor. Attributes: shape (of the padded tensor); factors (the same, with a dimension for each factor); true (how
    many positions count of each of these)."""

    shape: tuple[int, ...]
    factors: tuple[int, ...]
    true: tuple[int, ...]

    @staticmethod
    def of(extents: Extents, true: SymbolValues, whole: SymbolValues) -> _Block:
        factors = [factor for extent in extents for factor in extent.factors]
        sizes = [[_value(factor, whole) for factor in extent.factors] for extent in extents]
        return _Block(
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
        """What counts, with a dimension for each factor. padded: row-major, or of one factor for each dimension but those of size 1."""
        part = padded.reshape(self.factors)
        for dim, size in enumerate(self.true):
            part = part.narrow(dim, 0, size)
        return part

    def padded(self, tensor: torch.Tensor, filled: Filled | None) -> torch.Tensor:
        """The tensor in row-major memory, with padding behind what counts. filled: None, if its numbers do not matter."""
        if self.is_whole and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
            # Strides of dimensions of size 1 may be anything, and could depend on the true sizes.
            return tensor if tensor.stride() == self.strides else tensor.as_strided(self.shape, self.strides)
        if filled is None:
            return tensor.new_empty(self.shape)
        result = filled(self.shape, tensor)
        self.part(result).copy_(tensor.reshape(self.true))
        return result


@dataclass(frozen=True)
class _Made:
    """An output that the program computes. Attributes: index (among its results); block (what counts of that); wanted."""

    index: int
    block: _Block
    wanted: TensorSpec

    def of(self, results: Sequence[torch.Tensor]) -> torch.Tensor:
        """From a program's results."""
        result = results[self.index]
        return _as_wanted(result if self.block.is_whole else self.block.part(result), self.wanted)


@dataclass(frozen=True)
class _Seen:
    """An output in the memory of what the program computes. Attributes: base (this); spec (the view's); start (where the base begins)."""

    base: _Made
    spec: TensorSpec
    start: int


@dataclass(frozen=True)
class _Told:
    """An output that the inputs tell. Attributes: of (from the graph's inputs to the output)."""

    of: Callable[[Sequence[Any]], Any]


def _output(output: Given | Computed | Viewed | Number, true: SymbolValues, whole: SymbolValues) -> _Made | _Seen | _Told:
    """What a call does for an output."""
    if isinstance(output, Computed):
        return _Made(output.index, _Block.of(output.extents, true, whole), true.spec(output.fake))
    if isinstance(output, Viewed):
        base = _Made(output.base.index, _Block.of(output.base.extents, true, whole), true.spec(output.base.fake))
        return _Seen(base, true.spec(output.fake), base.wanted.offset)
    if isinstance(output, Number):
        number = output.value if output.value is None or isinstance(output.value, (int, float, str)) else _value(output.value, true)
        return _Told(lambda given: number)
    if output.fake is None:
        return _Told(lambda given: given[output.position])
    spec, start = true.spec(output.fake), true.spec(output.source).offset
    return _Told(lambda given: _view(given[output.position], spec, start))


def _view(tensor: torch.Tensor, spec: TensorSpec, start: int) -> torch.Tensor:
    return torch.as_strided(tensor, spec.shape, spec.stride, tensor.storage_offset() + spec.offset - start)


def _as_wanted(tensor: torch.Tensor, wanted: TensorSpec) -> torch.Tensor:
    """A tensor's values with this shape and these strides; no copy if its own strides are these, and no view in autograd's eyes."""
    tensor = tensor.reshape(wanted.shape)
    if all(size < 2 or own == step for size, own, step in zip(wanted.shape, tensor.stride(), wanted.stride, strict=True)):
        return transfer.reinterpret(tensor, wanted.shape, wanted.stride)
    once = [slice(0, 1) if step == 0 else slice(None) for step in wanted.stride]
    shape = [1 if step == 0 else size for size, step in zip(wanted.shape, wanted.stride, strict=True)]
    result = torch.empty_strided(shape, wanted.stride, dtype=tensor.dtype, device=tensor.device)
    result.copy_(tensor[tuple(once)])
    return transfer.reinterpret(result, wanted.shape, wanted.stride)


def _alone(tensor: torch.Tensor, used: set[int]) -> torch.Tensor:
    """The tensor in memory of its own. used: other memory, to which this is added."""
    tensor = tensor.resolve_conj().resolve_neg()
    if private.storage_id(tensor) in used or tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size():
        tensor = tensor.clone()
    used.add(private.storage_id(tensor))
    return tensor


class _Call:
    """What a call with certain sizes does.

    lengths: the true sizes that the program asks for. inputs: those that are padded, by position; numbers: rounded sizes, by position;
    outputs.
    Attributes: is_ready (whether the program was compiled when it was asked for last).
    """

    def __init__(
        self, lengths: torch.Tensor, inputs: Mapping[int, _Block], numbers: Mapping[int, int], outputs: Sequence[_Made | _Seen | _Told]
    ) -> None:
        self._lengths, self._inputs, self._numbers, self._outputs = lengths, inputs, numbers, outputs
        self.is_ready = False

    def padded(self, given: Sequence[Any], filled: Filled | None) -> list[Any]:
        """The program's arguments. filled: None, if numbers in padded tensors do not matter."""
        found = [*given, self._lengths]
        for position, block in self._inputs.items():
            if isinstance(given[position], torch.Tensor):  # for an output that the loss does not use, autograd has no gradient
                found[position] = block.padded(given[position], filled)
        for position, size in self._numbers.items():
            found[position] = size
        return found

    def cut(self, given: Sequence[Any], results: Sequence[Any]) -> list[Any]:
        """The graph's outputs."""
        return self._each(given, lambda output: output.of(results))

    def exact(self, given: Sequence[Any], values: Sequence[Any], others: Sequence[torch.Tensor]) -> list[Any]:
        """The graph's outputs, each in memory of its own, if torch's kernels have computed the graph.

        values: what they gave for each of the program's outputs. others: tensors in whose memory no output may lie.
        Raises: RuntimeError for a value of another shape or dtype than the graph says.
        """
        used = {private.storage_id(tensor) for tensor in others}

        def own(output: _Made) -> torch.Tensor:
            value, wanted = values[output.index], output.wanted
            if (value.shape, value.dtype) != (wanted.shape, wanted.dtype):
                raise RuntimeError(f"an op returned {value.dtype} of shape {list(value.shape)}, its fake (meta) implementation {wanted}")
            return _as_wanted(_alone(value, used), wanted)

        return self._each(given, own)

    def _each(self, given: Sequence[Any], make: Callable[[_Made], torch.Tensor]) -> list[Any]:
        """The graph's outputs: one that the program gives once may be several of the graph's, or have several in it, in the same memory."""
        made: dict[int, torch.Tensor] = {}
        found: list[Any] = []
        for output in self._outputs:
            if isinstance(output, _Told):
                found.append(output.of(given))
                continue
            base = output.base if isinstance(output, _Seen) else output
            is_new = base.index not in made
            first = made[base.index] = make(base) if is_new else made[base.index]
            if isinstance(output, _Seen):
                found.append(_view(first, output.spec, output.start))
            else:
                found.append(first if is_new else torch.as_strided(first, first.shape, first.stride(), int(first.storage_offset())))
        return found
