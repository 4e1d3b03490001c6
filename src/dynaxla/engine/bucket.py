"""One executable for many sizes: sizes are rounded up; the program for those gets padded inputs, and the true sizes."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..capture.aten_graph import AtenGraph, graph_device
from ..capture.extents import Extents
from ..capture.inputs import Sizes
from ..capture.padded_graph import Computed, Given, Number, Padded, pad
from ..config import Options
from ..lowering import SymbolValues, TensorSpec
from ..observe import dump, metrics
from ..runtime import by_torch
from ..runtime.cache import LeastRecentlyUsed
from .executable import Executable
from .protocol import Engine, Runner

Output = Callable[[Sequence[Any], Sequence[Any]], Any]  # of a graph's inputs and a program's results

_EXACT = "exact"

# Makes the tensor that an input is written to: of a shape, like another tensor.
Filled = Callable[[Sequence[int], torch.Tensor], torch.Tensor]


def zeros(shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    return torch.zeros(shape, dtype=like.dtype, device=like.device)


class Bucket:
    """An engine for graphs with dynamic sizes (option `sizes="buckets"`): programs of another engine run them with rounded ones.

    filled: what padding holds. No result depends on it, which tests show with NaN.
    """

    def __init__(self, inner: Engine, options: Options, filled: Filled = zeros) -> None:
        self._inner, self._options, self._filled = inner, options, filled

    def runner(self, graph: AtenGraph) -> Runner:
        padded = pad(graph)
        if isinstance(padded, str):
            dump.log.warning("%s is compiled for each combination of sizes, not for buckets: %s", graph.name, padded)
        if not isinstance(padded, Padded):
            return self._inner.runner(graph)
        return BucketProgram(self._inner, graph, padded, self._options.executables, self._filled)


class BucketProgram:
    """A graph of which one program serves all sizes that are rounded to the same ones. engine: of that program, and of the one for exact
    sizes, which runs where something that was assumed of sizes does not hold for the rounded ones. kept: how many combinations of true
    sizes are remembered, with what a call does for each.
    """

    def __init__(self, engine: Engine, graph: AtenGraph, padded: Padded, kept: int, filled: Filled) -> None:
        self._boxed_call = True
        self.name = graph.name
        self._engine, self._graph, self._padded, self._filled = engine, graph, padded, filled
        self._sizes = Sizes(graph.module.graph.find_nodes(op="placeholder"))
        self._device = graph_device(graph.module)
        self._calls: LeastRecentlyUsed[_Call | str] = LeastRecentlyUsed(64 * kept)
        self._run = engine.runner(dataclasses.replace(graph, module=padded.module, remade=frozenset()))

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
            metrics.add("exact_sizes")
            return self._exact(args)
        given = args.copy()
        args.clear()
        with by_torch.kernels():
            padded = call.padded(given, self._filled)
        results = self._run(padded)
        with by_torch.kernels():
            return call.cut(given, results)

    def executables(self) -> list[Executable]:
        exact = [self._exact] if "_exact" in vars(self) else []
        return [executable for runner in (self._run, *exact) for executable in runner.executables()]

    def _prepare(self, args: Sequence[Any]) -> _Call | str:
        """What a call with sizes like these does; _EXACT where sizes cannot be rounded."""
        padded, true = self._padded, self._sizes.values(args)
        rounded = padded.rounding({symbol: size for symbol, size in true.values.items() if symbol.is_symbol})
        if rounded is None:
            return _EXACT
        whole = SymbolValues(rounded)
        lengths = [_value(size, true) for size in padded.sizes]
        if not all(0 < length <= _value(size, whole) for length, size in zip(lengths, padded.sizes, strict=True)):
            return _EXACT
        return _Call(
            torch.tensor(lengths, dtype=torch.int64, device=self._device),
            {position: _Block.of(extents, true, whole) for position, extents in padded.inputs.items()},
            {position: _value(size, whole) for position, size in padded.numbers.items()},
            [_output(output, true, whole) for output in padded.outputs],
        )


def _value(size: Any, symbols: SymbolValues) -> int:
    return size if isinstance(size, int) else int(size.xreplace(symbols.values))


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

    @property
    def is_whole(self) -> bool:
        return self.factors == self.true

    def part(self, padded: torch.Tensor) -> torch.Tensor:
        """What counts, with a dimension for each factor. padded: row-major, or of one factor for each dimension but those of size 1."""
        part = padded.reshape(self.factors)
        for dim, size in enumerate(self.true):
            part = part.narrow(dim, 0, size)
        return part

    def padded(self, tensor: torch.Tensor, filled: Filled) -> torch.Tensor:
        """The tensor in row-major memory, with padding behind what counts."""
        if self.is_whole and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
            return tensor
        result = filled(self.shape, tensor)
        self.part(result).copy_(tensor.reshape(self.true))
        return result


def _output(output: Given | Computed | Number, true: SymbolValues, whole: SymbolValues) -> Output:
    """What a call does for an output."""
    if isinstance(output, Number):
        number = output.value if output.value is None or isinstance(output.value, (int, float, str)) else _value(output.value, true)
        return lambda given, results: number
    if isinstance(output, Given):
        if output.fake is None:
            return lambda given, results: given[output.position]
        spec, start = true.spec(output.fake), true.spec(output.source).offset
        return lambda given, results: _view(given[output.position], spec, start)
    block, wanted = _Block.of(output.extents, true, whole), true.spec(output.fake)
    return lambda given, results: _as_wanted(results[output.index] if block.is_whole else block.part(results[output.index]), wanted)


def _view(tensor: torch.Tensor, spec: TensorSpec, start: int) -> torch.Tensor:
    return torch.as_strided(tensor, spec.shape, spec.stride, tensor.storage_offset() + spec.offset - start)


def _as_wanted(tensor: torch.Tensor, wanted: TensorSpec) -> torch.Tensor:
    """A tensor's values with this shape and these strides; no copy if its own strides are these."""
    tensor = tensor.reshape(wanted.shape)
    if all(size < 2 or own == step for size, own, step in zip(wanted.shape, tensor.stride(), wanted.stride, strict=True)):
        return torch.as_strided(tensor, wanted.shape, wanted.stride)
    once = [slice(0, 1) if step == 0 else slice(None) for step in wanted.stride]
    shape = [1 if step == 0 else size for size, step in zip(wanted.shape, wanted.stride, strict=True)]
    result = torch.empty_strided(shape, wanted.stride, dtype=tensor.dtype, device=tensor.device)
    result.copy_(tensor[tuple(once)])
    return torch.as_strided(result, wanted.shape, wanted.stride)


class _Call:
    """What a call with certain sizes does.

    lengths: the true sizes that the program asks for. inputs: those that are padded, by position; numbers: rounded sizes, by position;
    outputs.
    """

    def __init__(self, lengths: torch.Tensor, inputs: Mapping[int, _Block], numbers: Mapping[int, int], outputs: Sequence[Output]) -> None:
        self._lengths, self._inputs, self._numbers, self._outputs = lengths, inputs, numbers, outputs

    def padded(self, given: Sequence[Any], filled: Filled) -> list[Any]:
        """The program's arguments."""
        found = [*given, self._lengths]
        for position, block in self._inputs.items():
            if isinstance(given[position], torch.Tensor):  # for an output that the loss does not use, autograd has no gradient
                found[position] = block.padded(given[position], filled)
        for position, size in self._numbers.items():
            found[position] = size
        return found

    def cut(self, given: Sequence[Any], results: Sequence[Any]) -> list[Any]:
        """The graph's outputs."""
        return [output(given, results) for output in self._outputs]
