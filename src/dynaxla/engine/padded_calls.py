"""Calls of a program with rounded sizes: for each combination of true sizes, a plan that pads the inputs and crops the results.

The *true* sizes are those of a call's inputs. The *rounded* sizes are those for which the program was compiled. A size may be a product,
such as batch * length for a flattened tensor. Then each factor is rounded, and padded, by itself.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..buffers.overlaps import has_internal_overlap
from ..lowering import SymbolValues, TensorSpec
from ..passes.padding.padded_graph import ComputedOutput, InputOutput, NumberOutput, PaddedGraph, ViewOutput
from ..passes.padding.valid_sizes import Extents
from ..runtime import private, transfer
from ..runtime.cache import LeastRecentlyUsed
from ..runtime.layout import row_major
from .eager_timings import EagerTimings

# Fills a tensor, the padding of an input, in place. No result may depend on the padding; tests fill it with NaN.
Fill = Callable[[torch.Tensor], object]


@dataclass(frozen=True)
class ValidRegion:
    """The valid part of a padded tensor.

    Attributes:
        shape: The shape of the padded tensor.
        factors: The same shape, with one dimension for each factor of a size: (24,) becomes (3, 8) for a size of 3 * 8.
        valid: The number of valid positions in each dimension of `factors`.
    """

    shape: tuple[int, ...]
    factors: tuple[int, ...]
    valid: tuple[int, ...]

    @functools.cached_property
    def strides(self) -> tuple[int, ...]:
        """The row-major strides of the padded tensor."""
        return row_major(self.shape)

    @functools.cached_property
    def has_no_padding(self) -> bool:
        """True if all elements of the tensor are valid."""
        return self.factors == self.valid

    @functools.cached_property
    def padded_dims(self) -> list[tuple[int, int, int]]:
        """The dimensions of `factors` that have padding, as (dimension, number of valid positions, number of padded positions)."""
        sizes = enumerate(zip(self.valid, self.factors, strict=True))
        return [(dim, valid, factor - valid) for dim, (valid, factor) in sizes if valid != factor]

    def crop(self, padded: torch.Tensor) -> torch.Tensor:
        """Returns the valid part of a tensor, with the dimensions of `factors`.

        Args:
            padded: The padded tensor. It is row-major, or each of its dimensions has one factor (none if its size is 1).
        """
        valid_part = padded if self.factors == self.shape else padded.reshape(self.factors)
        for dim, size, _ in self.padded_dims:
            valid_part = valid_part.narrow(dim, 0, size)
        return valid_part

    def pad(self, tensor: torch.Tensor, fill: Fill | None) -> torch.Tensor:
        """Returns the padded tensor in row-major memory.

        Args:
            tensor: The valid values.
            fill: Fills the padding. None for a tensor whose values nothing reads: all of them, also the valid ones, are uninitialised.
        """
        if self.has_no_padding and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
            # The strides of dimensions of size 1 are arbitrary. Here they must not depend on the true sizes.
            return tensor if tensor.stride() == self.strides else tensor.as_strided(self.shape, self.strides)
        result = tensor.new_empty(self.shape)
        if fill is None:
            return result
        valid_part = result.view(self.factors)
        for dim, size, padding in self.padded_dims:
            fill(valid_part.narrow(dim, size, padding))
            valid_part = valid_part.narrow(dim, 0, size)
        valid_part.copy_(tensor.reshape(self.valid))
        return result


@dataclass(frozen=True)
class _CroppedOutput:
    """An output that the program computes.

    Attributes:
        index: Its index among the program's results.
        region: The valid part of the result.
        spec: The shape, strides and dtype of the output.
    """

    index: int
    region: ValidRegion
    spec: TensorSpec

    def crop(self, results: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns the output, cropped from the program's results."""
        return _with_spec(self.region.crop(results[self.index]), self.spec)


@dataclass(frozen=True)
class _ViewOfCropped:
    """An output that is a view of a value which the program computes.

    Attributes:
        base: The value.
        spec: The shape, strides and offset of the view.
        base_offset: The storage offset of the base.
    """

    base: _CroppedOutput
    spec: TensorSpec
    base_offset: int


@dataclass(frozen=True)
class _OutputOfInputs:
    """An output that follows from the inputs: an input, a view of one, or a number.

    Attributes:
        compute: Returns the output, given the graph's inputs.
    """

    compute: Callable[[Sequence[Any]], Any]


_PlannedOutput = _CroppedOutput | _ViewOfCropped | _OutputOfInputs


def _view(tensor: torch.Tensor, spec: TensorSpec, base_offset: int) -> torch.Tensor:
    """Returns the view of a tensor with the shape, strides and offset of a spec. The graph assumes `base_offset` as the tensor's offset."""
    return torch.as_strided(tensor, spec.shape, spec.stride, tensor.storage_offset() + spec.offset - base_offset)


def _with_spec(tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """Returns a tensor's values with the shape and strides of a spec, without a copy if the strides match. To autograd it is not a view."""
    tensor = tensor.reshape(spec.shape)
    if all(size < 2 or stride == step for size, stride, step in zip(spec.shape, tensor.stride(), spec.stride, strict=True)):
        return transfer.reinterpret(tensor, spec.shape, spec.stride)
    distinct = [slice(0, 1) if step == 0 else slice(None) for step in spec.stride]
    shape = [1 if step == 0 else size for size, step in zip(spec.shape, spec.stride, strict=True)]
    result = torch.empty_strided(shape, spec.stride, dtype=tensor.dtype, device=tensor.device)
    result.copy_(tensor[tuple(distinct)])
    return transfer.reinterpret(result, spec.shape, spec.stride)


def _in_own_storage(tensor: torch.Tensor, used: set[int]) -> torch.Tensor:
    """Returns the tensor if it alone uses its storage and uses all of it, else a copy.

    Args:
        tensor: The tensor.
        used: The ids of the storages that other tensors use. The id of the result's storage is added.
    """
    tensor = tensor.resolve_conj().resolve_neg()
    if private.storage_id(tensor) in used or tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size():
        tensor = tensor.clone()
    used.add(private.storage_id(tensor))
    return tensor


class CallPlan:
    """The plan of calls with one combination of true sizes.

    Args:
        true_sizes: int64[n], the true sizes that the program reads. It is the program's last argument.
        inputs: The valid regions of the inputs that are padded, by position.
        numbers: The rounded values of the inputs that are sizes, by position.
        outputs: The plans of the graph's outputs.
        timings: The timings of calls with these rounded sizes.

    Attributes:
        is_ready: True if the program was already compiled at the previous call.
        valid_fraction: The number of valid elements of the padded inputs, divided by the number of all their elements.
    """

    def __init__(
        self,
        true_sizes: torch.Tensor,
        inputs: Mapping[int, ValidRegion],
        numbers: Mapping[int, int],
        outputs: Sequence[_PlannedOutput],
        timings: EagerTimings,
    ) -> None:
        self._true_sizes, self._inputs, self._numbers, self._outputs = true_sizes, inputs, numbers, outputs
        self.timings, self.is_ready = timings, False
        elements = sum(math.prod(region.shape) for region in inputs.values())
        self.valid_fraction = sum(math.prod(region.valid) for region in inputs.values()) / elements if elements else 1.0

    def pad_inputs(self, inputs: Sequence[Any], fill: Fill | None) -> list[Any]:
        """Returns the program's arguments.

        Args:
            inputs: The graph's inputs.
            fill: Fills the padding. None if the program will not run: the padded tensors are then uninitialised.
        """
        arguments = [*inputs, self._true_sizes]
        for position, region in self._inputs.items():
            if isinstance(inputs[position], torch.Tensor):  # autograd passes None as the gradient of an output that the loss does not use
                arguments[position] = region.pad(inputs[position], fill)
        for position, size in self._numbers.items():
            arguments[position] = size
        return arguments

    def crop_results(self, inputs: Sequence[Any], results: Sequence[Any]) -> list[Any]:
        """Returns the graph's outputs, cropped from the program's results."""
        return self._assemble(inputs, lambda output: output.crop(results))

    def wrap_values(self, inputs: Sequence[Any], values: Sequence[Any], no_alias_of: Sequence[torch.Tensor]) -> list[Any]:
        """Returns the graph's outputs, from values that torch's kernels have computed. Each value gets memory of its own.

        Args:
            inputs: The graph's inputs.
            values: The kernels' value for each output of the program.
            no_alias_of: Tensors whose memory no output may share: a value in their memory is copied.

        Raises: RuntimeError for a value whose shape or dtype differs from that in the graph.
        """
        used = {private.storage_id(tensor) for tensor in no_alias_of}

        def make(output: _CroppedOutput) -> torch.Tensor:
            value, spec = values[output.index], output.spec
            if (value.shape, value.dtype) != (spec.shape, spec.dtype):
                raise RuntimeError(
                    f"an op returned {value.dtype} of shape {list(value.shape)}, but its fake (meta) implementation declared {spec}"
                )
            return _with_spec(_in_own_storage(value, used), spec)

        return self._assemble(inputs, make)

    def _assemble(self, inputs: Sequence[Any], make: Callable[[_CroppedOutput], torch.Tensor]) -> list[Any]:
        """Returns the graph's outputs. Outputs that are one value, or views of one value, share memory.

        Args:
            inputs: The graph's inputs.
            make: Returns the tensor of a value that the program computes. It is called once for each value.
        """
        bases: dict[int, torch.Tensor] = {}
        outputs: list[Any] = []
        for output in self._outputs:
            if isinstance(output, _OutputOfInputs):
                outputs.append(output.compute(inputs))
                continue
            planned = output.base if isinstance(output, _ViewOfCropped) else output
            is_new = planned.index not in bases
            base = bases[planned.index] = make(planned) if is_new else bases[planned.index]
            if isinstance(output, _ViewOfCropped):
                outputs.append(_view(base, output.spec, output.base_offset))
            else:
                outputs.append(base if is_new else torch.as_strided(base, base.shape, base.stride(), int(base.storage_offset())))
        return outputs


@dataclass(frozen=True)
class _SymbolicSpec:
    """A fake tensor's metadata with sympy expressions in place of numbers.

    It is read once from the fake tensor, which creates new objects each time its sizes are read.
    """

    shape: tuple[Any, ...]
    stride: tuple[Any, ...]
    offset: Any
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(fake: torch.Tensor) -> _SymbolicSpec:
        """Returns the metadata of a fake tensor."""
        shape, stride = tuple(map(_expression, fake.shape)), tuple(map(_expression, fake.stride()))
        return _SymbolicSpec(shape, stride, _expression(fake.storage_offset()), fake.dtype, fake.device)

    def concrete(self, symbols: SymbolValues) -> TensorSpec:
        """Returns the metadata for these values of the size symbols."""
        shape, stride = ([_value(size, symbols) for size in sizes] for sizes in (self.shape, self.stride))
        return TensorSpec(tuple(shape), tuple(stride), self.dtype, self.device, _value(self.offset, symbols))


def _expression(size: int | torch.SymInt) -> Any:
    """Returns a size as a number or as a sympy expression."""
    return size if isinstance(size, int) else size.node.expr


def _value(size: Any, symbols: SymbolValues) -> int:
    """Returns the value of a size, which is a number or a sympy expression."""
    return size if isinstance(size, int) else symbols.number(size)


class _CallSizes:
    """The true and rounded sizes of a call. Tensors with equal sizes share one region, and one spec.

    Args:
        true: The true sizes.
        rounded: The rounded sizes.
    """

    def __init__(self, true: SymbolValues, rounded: SymbolValues) -> None:
        self.true, self.rounded = true, rounded
        self._regions: dict[int, ValidRegion] = {}
        self._specs: dict[int, TensorSpec] = {}

    def region(self, extents: Extents) -> ValidRegion:
        """Returns the valid region of a padded tensor. Equal extents must be one object (see `PaddedCalls._intern`)."""
        region = self._regions.get(id(extents))
        if region is None:
            sizes = [[_value(factor, self.rounded) for factor in extent.factors] for extent in extents]
            valid = tuple(_value(factor, self.true) for extent in extents for factor in extent.factors)
            region = ValidRegion(tuple(map(math.prod, sizes)), tuple(size for dims in sizes for size in dims), valid)
            self._regions[id(extents)] = region
        return region

    def spec(self, symbolic: _SymbolicSpec) -> TensorSpec:
        """Returns the metadata of a tensor with the true sizes. Equal symbolic specs must be one object."""
        spec = self._specs.get(id(symbolic))
        if spec is None:
            spec = self._specs[id(symbolic)] = symbolic.concrete(self.true)
        return spec


@dataclass(frozen=True)
class _RoundedSizes:
    """A combination of rounded sizes.

    Attributes:
        values: The values of the size symbols.
        overlaps: True if elements of a result would share memory with these sizes. The sizes are then not used.
        timings: The timings of calls with these rounded sizes.
    """

    values: SymbolValues
    overlaps: bool
    timings: EagerTimings


class PaddedCalls:
    """Creates the plans of calls of a padded graph.

    All shapes and strides are expressions of the size symbols. The constructor reads these expressions from the graph once, and a call with
    new sizes evaluates them.

    Args:
        padded: The graph for rounded sizes.
        device: The graph's device.
        capacity: The number of combinations of rounded sizes that are remembered.
    """

    def __init__(self, padded: PaddedGraph, device: torch.device, capacity: int) -> None:
        self._padded, self._device = padded, device
        self._interned: dict[Any, Any] = {}  # see `_intern`
        # The metadata of the outputs that the program computes.
        self._computed: set[_SymbolicSpec] = set()
        self._inputs = {position: self._intern(extents) for position, extents in padded.inputs.items()}
        self._outputs = [self._planner(output) for output in padded.outputs]
        self._rounded: LeastRecentlyUsed[_RoundedSizes] = LeastRecentlyUsed(capacity)

    def plan(self, true: SymbolValues) -> CallPlan | None:
        """Returns the plan of calls with these true sizes; None if they cannot be rounded."""
        padded = self._padded
        values = padded.rounding({symbol: size for symbol, size in true.values.items() if symbol.is_symbol})
        if values is None or (rounded := self._rounded_sizes(values)).overlaps:
            return None
        true_sizes = [_value(size, true) for size in padded.true_size_expressions]
        if not all(
            0 < length <= _value(size, rounded.values) for length, size in zip(true_sizes, padded.true_size_expressions, strict=True)
        ):
            return None
        sizes = _CallSizes(true, rounded.values)
        return CallPlan(
            torch.tensor(true_sizes, dtype=torch.int64, device=self._device),
            {position: sizes.region(extents) for position, extents in self._inputs.items()},
            {position: _value(size, rounded.values) for position, size in padded.numbers.items()},
            [plan_output(sizes) for plan_output in self._outputs],
            rounded.timings,
        )

    def _rounded_sizes(self, values: Mapping[Any, int]) -> _RoundedSizes:
        """Returns the description of a combination of rounded sizes, from the cache if possible."""
        key = tuple(values.values())
        rounded = self._rounded.get(key)
        if rounded is None:
            symbols = SymbolValues(values)
            rounded = _RoundedSizes(symbols, any(_overlaps(symbolic.concrete(symbols)) for symbolic in self._computed), EagerTimings())
            self._rounded.put(key, rounded)
        return rounded

    def _intern(self, value: Any) -> Any:
        """Returns the first object that was equal to this one. `_CallSizes` uses the identity of such objects as keys."""
        return self._interned.setdefault(value, value)

    def _spec(self, fake: torch.Tensor) -> _SymbolicSpec:
        spec: _SymbolicSpec = self._intern(_SymbolicSpec.of(fake))
        return spec

    def _planner(self, output: InputOutput | ComputedOutput | ViewOutput | NumberOutput) -> Callable[[_CallSizes], _PlannedOutput]:
        """Returns a function that plans an output, given the sizes of a call."""
        if isinstance(output, NumberOutput):
            number = output.value
            if number is None or isinstance(number, (int, float, str)):
                return lambda sizes: _OutputOfInputs(lambda inputs: number)
            return lambda sizes: _constant(sizes.true.number(number))
        if isinstance(output, InputOutput):
            return self._input_planner(output)
        if isinstance(output, ViewOutput):
            plan_base, view = self._crop_planner(output.base), self._spec(output.fake)

            def plan_view(sizes: _CallSizes) -> _ViewOfCropped:
                base = plan_base(sizes)
                return _ViewOfCropped(base, sizes.spec(view), base.spec.offset)

            return plan_view
        return self._crop_planner(output)

    def _crop_planner(self, output: ComputedOutput) -> Callable[[_CallSizes], _CroppedOutput]:
        index, extents, symbolic = output.index, self._intern(output.extents), self._spec(output.fake)
        self._computed.add(symbolic)
        return lambda sizes: _CroppedOutput(index, sizes.region(extents), sizes.spec(symbolic))

    def _input_planner(self, output: InputOutput) -> Callable[[_CallSizes], _OutputOfInputs]:
        position = output.position
        if output.fake is None:
            return lambda sizes: _OutputOfInputs(lambda inputs: inputs[position])
        view, source = self._spec(output.fake), self._spec(output.source)

        def plan_view(sizes: _CallSizes) -> _OutputOfInputs:
            spec, base_offset = sizes.spec(view), sizes.spec(source).offset
            return _OutputOfInputs(lambda inputs: _view(inputs[position], spec, base_offset))

        return plan_view


def _constant(value: Any) -> _OutputOfInputs:
    return _OutputOfInputs(lambda inputs: value)


def _overlaps(spec: TensorSpec) -> bool:
    """True if elements share memory other than by a dimension of stride 0."""
    sizes = [1 if step == 0 else size for size, step in zip(spec.shape, spec.stride, strict=True)]
    return has_internal_overlap(torch.empty_strided(sizes, spec.stride, device="meta"))
