"""Calls of a program with rounded sizes: for each combination of true sizes, how inputs are padded and results are cut."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..buffers.overlaps import shares_with_itself
from ..lowering import SymbolValues, TensorSpec
from ..passes.padding.padded_graph import ComputedOutput, InputOutput, NumberOutput, Padded, ViewOutput
from ..passes.padding.valid_sizes import Extents
from ..runtime import private, transfer
from ..runtime.cache import LeastRecentlyUsed
from ..runtime.layout import row_major
from .race import Race

# Fills a tensor in place: the padding of an input. No result depends on it; tests fill it with NaN.
Fill = Callable[[torch.Tensor], object]


@dataclass(frozen=True)
class ValidRegion:
    """The valid part of a padded tensor.

    Attributes:
        shape: The shape of the padded tensor.
        factors: The same shape, with one dimension for each factor of a size.
        true: The number of valid positions in each of these dimensions.
    """

    shape: tuple[int, ...]
    factors: tuple[int, ...]
    true: tuple[int, ...]

    @functools.cached_property
    def strides(self) -> tuple[int, ...]:
        return row_major(self.shape)

    @functools.cached_property
    def is_whole(self) -> bool:
        return self.factors == self.true

    @functools.cached_property
    def cuts(self) -> list[tuple[int, int, int]]:
        """The dimensions among `factors` that have padding, with the number of their valid positions, and of the others."""
        sizes = enumerate(zip(self.true, self.factors, strict=True))
        return [(dim, true, factor - true) for dim, (true, factor) in sizes if true != factor]

    def part(self, padded: torch.Tensor) -> torch.Tensor:
        """Returns the valid part, with one dimension for each factor.

        padded: A tensor that is row-major, or in which each dimension has one factor (except dimensions of size 1, which have none).
        """
        part = padded if self.factors == self.shape else padded.reshape(self.factors)
        for dim, size, _ in self.cuts:
            part = part.narrow(dim, 0, size)
        return part

    def padded(self, tensor: torch.Tensor, fill: Fill | None) -> torch.Tensor:
        """Returns the tensor in row-major memory, with padding after the valid part. fill: None leaves all values uninitialised."""
        if self.is_whole and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
            # Strides of dimensions of size 1 are arbitrary, and could depend on the true sizes.
            return tensor if tensor.stride() == self.strides else tensor.as_strided(self.shape, self.strides)
        result = tensor.new_empty(self.shape)
        if fill is None:
            return result
        part = result.view(self.factors)
        for dim, size, rest in self.cuts:
            fill(part.narrow(dim, size, rest))
            part = part.narrow(dim, 0, size)
        part.copy_(tensor.reshape(self.true))
        return result


@dataclass(frozen=True)
class _CutOutput:
    """An output that the program computes.

    Attributes:
        index: Its index among the program's results.
        region: The valid part of the result.
        wanted: The shape, strides and dtype of the output.
    """

    index: int
    region: ValidRegion
    wanted: TensorSpec

    def of(self, results: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns the output, given the program's results."""
        return _as_wanted(self.region.part(results[self.index]), self.wanted)


@dataclass(frozen=True)
class _CutView:
    """An output that is a view of a value that the program computes.

    Attributes:
        base: That value.
        spec: The shape, strides and offset of the view.
        start: The storage offset of the base.
    """

    base: _CutOutput
    spec: TensorSpec
    start: int


@dataclass(frozen=True)
class _GivenOutput:
    """An output that follows from the inputs: an input, a view of one, or a number.

    Attributes:
        of: Returns the output, given the graph's inputs.
    """

    of: Callable[[Sequence[Any]], Any]


_PlannedOutput = _CutOutput | _CutView | _GivenOutput


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


class CallPlan:
    """The plan of a call with certain sizes.

    Args:
        lengths: int64[n], the true sizes that the program reads.
        inputs: The padded inputs, by position.
        numbers: The inputs that are rounded sizes, by position.
        outputs: The plans of the graph's outputs.
        race: The times of calls with these rounded sizes.

    Attributes:
        is_ready: Whether the program was compiled at the previous call.
        share: The number of valid elements of the padded inputs, divided by the number of all their elements.
    """

    def __init__(
        self,
        lengths: torch.Tensor,
        inputs: Mapping[int, ValidRegion],
        numbers: Mapping[int, int],
        outputs: Sequence[_PlannedOutput],
        race: Race,
    ) -> None:
        self._lengths, self._inputs, self._numbers, self._outputs = lengths, inputs, numbers, outputs
        self.race, self.is_ready = race, False
        elements = sum(math.prod(region.shape) for region in inputs.values())
        self.share = sum(math.prod(region.true) for region in inputs.values()) / elements if elements else 1.0

    def padded(self, given: Sequence[Any], fill: Fill | None) -> list[Any]:
        """Returns the program's arguments. fill: None leaves the values of padded tensors uninitialised."""
        found = [*given, self._lengths]
        for position, region in self._inputs.items():
            if isinstance(given[position], torch.Tensor):  # autograd passes None as the gradient of an output that the loss does not use
                found[position] = region.padded(given[position], fill)
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

        def own(output: _CutOutput) -> torch.Tensor:
            value, wanted = values[output.index], output.wanted
            if (value.shape, value.dtype) != (wanted.shape, wanted.dtype):
                raise RuntimeError(
                    f"an op returned {value.dtype} of shape {list(value.shape)}, but its fake (meta) implementation promised {wanted}"
                )
            return _as_wanted(_alone(value, used), wanted)

        return self._each(given, own)

    def _each(self, given: Sequence[Any], make: Callable[[_CutOutput], torch.Tensor]) -> list[Any]:
        """Returns the graph's outputs. Several of them may be, or may be views of, one output of the program; these share memory."""
        made: dict[int, torch.Tensor] = {}
        found: list[Any] = []
        for output in self._outputs:
            if isinstance(output, _GivenOutput):
                found.append(output.of(given))
                continue
            base = output.base if isinstance(output, _CutView) else output
            is_new = base.index not in made
            first = made[base.index] = make(base) if is_new else made[base.index]
            if isinstance(output, _CutView):
                found.append(_view(first, output.spec, output.start))
            else:
                found.append(first if is_new else torch.as_strided(first, first.shape, first.stride(), int(first.storage_offset())))
        return found


@dataclass(frozen=True)
class _SymbolicSpec:
    """A fake tensor's metadata with expressions in place of numbers. A fake tensor makes new objects at each read of its sizes."""

    shape: tuple[Any, ...]
    stride: tuple[Any, ...]
    offset: Any
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(fake: torch.Tensor) -> _SymbolicSpec:
        shape, stride = tuple(map(_expression, fake.shape)), tuple(map(_expression, fake.stride()))
        return _SymbolicSpec(shape, stride, _expression(fake.storage_offset()), fake.dtype, fake.device)

    def concrete(self, symbols: SymbolValues) -> TensorSpec:
        shape, stride = ([_value(size, symbols) for size in sizes] for sizes in (self.shape, self.stride))
        return TensorSpec(tuple(shape), tuple(stride), self.dtype, self.device, _value(self.offset, symbols))


def _expression(size: int | torch.SymInt) -> Any:
    return size if isinstance(size, int) else size.node.expr


def _value(size: Any, symbols: SymbolValues) -> int:
    return size if isinstance(size, int) else symbols.number(size)


class _CallSizes:
    """The sizes of a call. Regions and specs are made once for all tensors that have them.

    Args:
        true: The true sizes.
        whole: The rounded sizes.
    """

    def __init__(self, true: SymbolValues, whole: SymbolValues) -> None:
        self.true, self.whole = true, whole
        self._regions: dict[int, ValidRegion] = {}
        self._specs: dict[int, TensorSpec] = {}

    def region(self, extents: Extents) -> ValidRegion:
        found = self._regions.get(id(extents))
        if found is None:
            sizes = [[_value(factor, self.whole) for factor in extent.factors] for extent in extents]
            true = tuple(_value(factor, self.true) for extent in extents for factor in extent.factors)
            found = ValidRegion(tuple(map(math.prod, sizes)), tuple(size for dims in sizes for size in dims), true)
            self._regions[id(extents)] = found
        return found

    def spec(self, symbolic: _SymbolicSpec) -> TensorSpec:
        found = self._specs.get(id(symbolic))
        if found is None:
            found = self._specs[id(symbolic)] = symbolic.concrete(self.true)
        return found


@dataclass(frozen=True)
class _RoundedSizes:
    """A combination of rounded sizes.

    Attributes:
        values: The sizes.
        overlaps: True if padding would overlap valid elements of a result.
        race: The times of calls with these rounded sizes.
    """

    values: SymbolValues
    overlaps: bool
    race: Race


class PaddedCalls:
    """Makes the plans of calls of a padded graph.

    Everything that depends on sizes is a function of the size symbols, found once for the graph. A call with new sizes evaluates it.

    Args:
        padded: The graph for rounded sizes.
        device: The graph's device.
        kept: The number of combinations of rounded sizes that are remembered.
    """

    def __init__(self, padded: Padded, device: torch.device, kept: int) -> None:
        self._padded, self._device = padded, device
        self._interned: dict[Any, Any] = {}  # equal extents, and equal specs, are one object
        self._computed: set[_SymbolicSpec] = set()
        self._inputs = {position: self._one(extents) for position, extents in padded.inputs.items()}
        self._outputs = [self._planner(output) for output in padded.outputs]
        self._rounded: LeastRecentlyUsed[_RoundedSizes] = LeastRecentlyUsed(kept)

    def plan(self, true: SymbolValues) -> CallPlan | None:
        """Returns the plan of calls with these sizes; None if they cannot be rounded."""
        padded = self._padded
        rounded = padded.rounding({symbol: size for symbol, size in true.values.items() if symbol.is_symbol})
        if rounded is None or (found := self._of_bucket(rounded)).overlaps:
            return None
        whole = found.values
        lengths = [_value(size, true) for size in padded.sizes]
        if not all(0 < length <= _value(size, whole) for length, size in zip(lengths, padded.sizes, strict=True)):
            return None
        sizes = _CallSizes(true, whole)
        return CallPlan(
            torch.tensor(lengths, dtype=torch.int64, device=self._device),
            {position: sizes.region(extents) for position, extents in self._inputs.items()},
            {position: _value(size, whole) for position, size in padded.numbers.items()},
            [planned(sizes) for planned in self._outputs],
            found.race,
        )

    def _of_bucket(self, rounded: Mapping[Any, int]) -> _RoundedSizes:
        key = tuple(rounded.values())
        found = self._rounded.get(key)
        if found is None:
            whole = SymbolValues(rounded)
            found = _RoundedSizes(whole, any(_overlaps(symbolic.concrete(whole)) for symbolic in self._computed), Race())
            self._rounded.put(key, found)
        return found

    def _one(self, value: Any) -> Any:
        return self._interned.setdefault(value, value)

    def _spec(self, fake: torch.Tensor) -> _SymbolicSpec:
        found: _SymbolicSpec = self._one(_SymbolicSpec.of(fake))
        return found

    def _planner(self, output: InputOutput | ComputedOutput | ViewOutput | NumberOutput) -> Callable[[_CallSizes], _PlannedOutput]:
        """Returns a function from the sizes of a call to the plan for an output."""
        if isinstance(output, NumberOutput):
            number = output.value
            if number is None or isinstance(number, (int, float, str)):
                return lambda sizes: _GivenOutput(lambda given: number)
            return lambda sizes: _constant(sizes.true.number(number))
        if isinstance(output, InputOutput):
            return self._input_planner(output)
        if isinstance(output, ViewOutput):
            base, spec = self._cut_planner(output.base), self._spec(output.fake)

            def view(sizes: _CallSizes) -> _CutView:
                cut = base(sizes)
                return _CutView(cut, sizes.spec(spec), cut.wanted.offset)

            return view
        return self._cut_planner(output)

    def _cut_planner(self, output: ComputedOutput) -> Callable[[_CallSizes], _CutOutput]:
        index, extents, wanted = output.index, self._one(output.extents), self._spec(output.fake)
        self._computed.add(wanted)
        return lambda sizes: _CutOutput(index, sizes.region(extents), sizes.spec(wanted))

    def _input_planner(self, output: InputOutput) -> Callable[[_CallSizes], _GivenOutput]:
        position = output.position
        if output.fake is None:
            return lambda sizes: _GivenOutput(lambda given: given[position])
        viewed, source = self._spec(output.fake), self._spec(output.source)

        def planned(sizes: _CallSizes) -> _GivenOutput:
            spec, start = sizes.spec(viewed), sizes.spec(source).offset
            return _GivenOutput(lambda given: _view(given[position], spec, start))

        return planned


def _constant(value: Any) -> _GivenOutput:
    return _GivenOutput(lambda given: value)


def _overlaps(spec: TensorSpec) -> bool:
    """True if elements share memory other than by a dimension of stride 0."""
    sizes = [1 if step == 0 else size for size, step in zip(spec.shape, spec.stride, strict=True)]
    return shares_with_itself(torch.empty_strided(sizes, spec.stride, device="meta"))
