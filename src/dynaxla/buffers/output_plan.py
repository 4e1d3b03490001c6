"""The plan of a graph's outputs: the input or buffer whose memory each output uses, and the buffers that the program must return.

A *buffer* is one result of the program. Several outputs may be in one buffer, as views of one tensor are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import torch
from jax import lax
from jax import numpy as jnp
from torch._functorch._aot_autograd import descriptors
from torch.fx import Node

from ..capture.inputs import check_tensor
from ..lowering import SymbolValues, TensorSpec
from ..lowering.graphs import is_undeclared_view, storage_of, view_source
from ..runtime.layout import Layout, storage_extent
from ..torch_ops import aten


@dataclass(frozen=True)
class NonTensor:
    """An output that is not a tensor: a constant such as None, or a number that is a function of the inputs' sizes.

    Attributes:
        node: The node of the number; None if the output is `value`.
        value: The output, if `node` is None.
    """

    node: Node | None
    value: Any = None


@dataclass(frozen=True)
class FromInput:
    """An output in the memory of an input.

    Attributes:
        position: The input's position among the graph's inputs.
        shape, stride: The output's shape and strides.
        offset: The distance from the input's first element to the output's first element, in elements of `dtype`.
        dtype: The output's dtype.
        is_input: True if the output is the input tensor itself.
        is_conj, is_neg: torch's conjugate and negative bits of the output: True if the output's value is the conjugate, or the negative,
            of the memory's content.
        detached: True if autograd must not treat the output as a view of the input.
    """

    position: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    is_input: bool
    is_conj: bool = False
    is_neg: bool = False
    detached: bool = False


@dataclass(frozen=True)
class FromBuffer:
    """An output in a buffer that the program returns.

    Attributes:
        buffer: The buffer's index.
        shape, stride: The output's shape and strides.
        offset: The offset of the output's first element in the buffer, in elements of `dtype`.
        dtype: The output's dtype.
        device: The output's device in eager mode. A rank-0 tensor may be on the CPU although the graph is on another device.
        is_conj, is_neg: As in `FromInput`.
    """

    buffer: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    is_conj: bool = False
    is_neg: bool = False


@dataclass(frozen=True)
class Empty:
    """An output without elements, which torch creates.

    Attributes:
        spec: The output's metadata.
        is_conj, is_neg: As in `FromInput`.
    """

    spec: TensorSpec
    is_conj: bool = False
    is_neg: bool = False


Output = NonTensor | FromInput | FromBuffer | Empty


@dataclass(frozen=True)
class Buffer:
    """One result of the program: the distinct elements of a node's value, in memory order.

    Attributes:
        node: The node whose value is in the buffer.
        spec: The metadata of the node's value.
        layout: The memory order of the node's value.
        scattered: True if the buffer is the whole storage of the node's value, with zeros in the gaps between its elements. False if the
            buffer is the packed array (see `Layout`).
        is_conj, is_neg: The conjugate and negative bits of the node's value: True if the buffer holds the value's conjugate, or negative.
        offset: If `scattered`, the number of the storage's elements in front of the first element of the node's value.
    """

    node: Node
    spec: TensorSpec
    layout: Layout
    scattered: bool
    is_conj: bool = False
    is_neg: bool = False
    offset: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the program's result."""
        if self.scattered:
            return (self.offset + storage_extent(self.spec.shape, self.spec.stride),)
        return self.layout.packed_shape

    def pack_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Converts the node's value, computed by torch, to this buffer.

        Returns: a contiguous tensor, which may be the value itself or alias its memory.
        """
        tensor = tensor.conj() if self.is_conj else tensor
        tensor = tensor.resolve_conj() if tensor.is_conj() else tensor
        tensor = torch.neg(tensor) if self.is_neg else tensor
        tensor = tensor.resolve_neg() if tensor.is_neg() else tensor
        if not self.scattered:
            return tensor if self.layout.is_row_major and tensor.is_contiguous() else self.layout.pack_tensor(tensor)
        flat = torch.zeros(self.shape, dtype=tensor.dtype, device=tensor.device)
        positions = torch.full((), self.offset, device=tensor.device)
        for size, step in zip(self.spec.shape, self.spec.stride, strict=True):
            positions = positions.unsqueeze(-1) + torch.arange(size, device=tensor.device) * step
        flat[positions] = tensor
        return flat

    def pack(self, array: jax.Array) -> jax.Array:
        """Under jit: converts the node's value to this buffer, an array of shape `self.shape`."""
        array = lax.conj(array) if self.is_conj else array
        array = lax.neg(array) if self.is_neg else array
        if not self.scattered:
            return self.layout.pack(array)
        if self.layout.dense:
            return lax.pad(lax.reshape(self.layout.pack(array), (array.size,)), jnp.zeros((), array.dtype), [(self.offset, 0, 0)])
        positions = jnp.full((), self.offset, jnp.int64)
        for dim, step in enumerate(self.spec.stride):
            positions = positions + lax.broadcasted_iota(jnp.int64, self.spec.shape, dim) * step
        return jnp.zeros(self.shape, array.dtype).at[positions].set(array)


class Storages:
    """The storages that a graph's values have in eager mode. Symbolic sizes do not change which values share a storage.

    Attributes:
        of_output: By output, for outputs that are tensors, the id of the output's storage.
        inputs: By a storage's id, the position of the first input in that storage.
        first_nodes: By a storage's id, the first node in that storage, inputs excluded.
        outputs_in: By a storage's id, the outputs in that storage.
        candidates: The nodes whose values may be buffers in the plan of `plan_outputs` for some sizes, and the outputs that are numbers.

    Raises:
        UnsupportedTensor: XLA cannot hold an output.
    """

    def __init__(self, graph: torch.fx.Graph) -> None:
        self.inputs: dict[int, int] = {}
        self.first_nodes: dict[int, Node] = {}
        for position, node in enumerate(graph.find_nodes(op="placeholder")):
            if isinstance(node.meta["val"], torch.Tensor) and node.meta["val"].layout == torch.strided:
                self.inputs.setdefault(storage_of(node), position)
        for node in graph.nodes:
            if node.op != "placeholder" and isinstance(node.meta.get("val"), torch.Tensor):
                self.first_nodes.setdefault(storage_of(node), node)
        outputs: Any = graph.output_node().args[0]
        nodes = [node for node in outputs if isinstance(node, Node)]
        self.of_output = {node: storage_of(node) for node in nodes if isinstance(node.meta["val"], torch.Tensor)}
        self.outputs_in: dict[int, set[Node]] = {}
        for node, storage in self.of_output.items():
            check_tensor(node.meta["val"], "an output")
            self.outputs_in.setdefault(storage, set()).add(node)
        self.candidates = list(dict.fromkeys([*nodes, *(self.first_nodes.get(storage, node) for node, storage in self.of_output.items())]))


def plan_outputs(
    placeholders: Sequence[Node], outputs: Sequence[Any], storages: Storages, symbols: SymbolValues
) -> tuple[list[Output], list[Buffer]]:
    """Assigns each output of a graph to memory.

    Outputs that share a storage in eager mode share memory here, too: the memory of an input, or one buffer, which is the value of the
    first node in that storage. An output becomes a buffer of its own if it is the only output in its storage, and has neither gaps nor a
    conjugate or negative bit.

    Args:
        placeholders: The graph's inputs.
        outputs: The graph's outputs: nodes, or constants.
        storages: The graph's storages.
        symbols: The values of the graph's size symbols.

    Returns: the plan of each output, and the buffers.
    """
    plan = _OutputPlan(placeholders, storages, symbols)
    return [plan.memory_of(node) for node in outputs], plan.buffers


class _OutputPlan:
    """The state of `plan_outputs`, which plans one output after another. The arguments are those of `plan_outputs`.

    Attributes:
        buffers: The buffers planned so far.
    """

    def __init__(self, placeholders: Sequence[Node], storages: Storages, symbols: SymbolValues) -> None:
        self._placeholders, self._storages, self._symbols = placeholders, storages, symbols
        self._positions = {node: position for position, node in enumerate(placeholders)}
        self._is_dynamic = any(not isinstance(node.meta["val"], torch.Tensor) for node in placeholders)
        self.buffers: list[Buffer] = []
        self._buffer_of: dict[Node, int] = {}

    def _buffer(self, node: Node, offset: int = 0) -> int:
        """Returns the index of the buffer for a node's value. The first call for a node adds the buffer."""
        if node not in self._buffer_of:
            value = node.meta["val"]
            spec = self._symbols.spec(value)
            layout = Layout.of(spec.shape, spec.stride)
            self._buffer_of[node] = len(self.buffers)
            self.buffers.append(Buffer(node, spec, layout, not layout.dense or offset > 0, value.is_conj(), value.is_neg(), offset))
        return self._buffer_of[node]

    def memory_of(self, node: Any) -> Output:
        """Returns the plan of an output, which is a node or a constant."""
        if not isinstance(node, Node):
            return NonTensor(None, node)
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return NonTensor(node)
        spec, shared = self._symbols.spec(value), self._storages.inputs.get(self._storages.of_output[node])
        flags = {"is_conj": value.is_conj(), "is_neg": value.is_neg()}
        if shared is not None and (found := self._in_input(node, value, spec, shared, flags)) is not None:
            return found
        if 0 in spec.shape:
            return Empty(spec, **flags)
        return self._in_buffer(node, spec, shared is not None, flags)

    def _in_input(self, node: Node, value: torch.Tensor, spec: TensorSpec, position: int, flags: dict[str, bool]) -> FromInput | None:
        """Returns an output in the memory of the input at `position`; None if the output's item size does not divide the input's offset."""
        if node in self._positions:
            return FromInput(self._positions[node], spec.shape, spec.stride, 0, spec.dtype, True)
        source = self._placeholders[position].meta["val"]
        start = self._symbols.spec(source).offset * source.element_size()
        if start % value.element_size():
            return None
        offset = spec.offset - start // value.element_size()
        return FromInput(position, spec.shape, spec.stride, offset, spec.dtype, False, detached=is_undeclared_view(node), **flags)

    def _in_buffer(self, node: Node, spec: TensorSpec, is_shared: bool, flags: dict[str, bool]) -> FromBuffer:
        """Returns an output in a buffer: its own, or that of the first node in its storage. `is_shared`: an input has that storage, too."""
        storage = self._storages.of_output[node]
        is_only_output = len(self._storages.outputs_in[storage]) == 1
        first = self._storages.first_nodes.get(storage, node)
        first_spec = self._symbols.spec(first.meta["val"])
        lost = _lost_offset(first, self._symbols) if self._is_dynamic else 0
        is_alone = is_only_output and Layout.of(spec.shape, spec.stride).dense
        is_first = first is node and not first_spec.offset + lost
        if is_shared or is_first or (is_alone and not any(flags.values())) or 0 in first_spec.shape:
            return FromBuffer(self._buffer(node), spec.shape, spec.stride, 0, spec.dtype, spec.device, **flags)
        # AOTAutograd regenerates aliases of a mutated input with the storage offsets of these outputs, so the offsets must be those of
        # eager mode.
        offset = 0 if is_only_output else first_spec.offset + lost
        start = spec.offset + (offset - first_spec.offset) * first_spec.dtype.itemsize // spec.dtype.itemsize
        return FromBuffer(self._buffer(first, offset), spec.shape, spec.stride, start, spec.dtype, spec.device, **flags)


# The descriptors of tensors saved for the backward graph. torch 2.13 has a second class, for tensors whose version counter is not checked.
_SAVED_DESCRIPTORS = tuple(
    getattr(descriptors, name)
    for name in ("SavedForBackwardsAOTOutput", "SavedForBackwardsNoVcCheckAOTOutput")
    if hasattr(descriptors, name)
)


def only_saved(outputs: Sequence[Output], buffers: Sequence[Buffer], output_node: Node) -> list[int]:
    """Returns the indices of the buffers whose outputs all cover the whole buffer, and are saved by AOTAutograd for the backward graph.

    The memory order of such a buffer is free, because only the backward graph reads the buffer.
    """
    descriptions = output_node.meta.get("desc") or [None] * len(outputs)
    fixed = set()
    for output, description in zip(outputs, descriptions, strict=True):
        if not isinstance(output, FromBuffer):
            continue
        buffer = buffers[output.buffer]
        spec = buffer.spec
        is_all = (output.shape, output.stride, output.dtype, output.offset) == (spec.shape, spec.stride, spec.dtype, 0)
        has_bits = output.is_conj or output.is_neg or buffer.is_conj or buffer.is_neg
        is_dense = not buffer.scattered and buffer.layout.is_non_overlapping_and_dense
        if not isinstance(description, _SAVED_DESCRIPTORS) or not is_all or has_bits or not is_dense:
            fixed.add(output.buffer)
    return [index for index in range(len(buffers)) if index not in fixed]


_SCATTERS = (aten.slice_scatter.default, aten.select_scatter.default, aten.diagonal_scatter.default, aten.as_strided_scatter.default)


def _lost_offset(node: Node, symbols: SymbolValues) -> int:
    """Returns the storage offset of a node's value in eager mode minus the storage offset of its fake value.

    The difference is 0 except for scatter ops. In eager mode a scatter op copies its operand with the operand's strides and storage offset,
    but its fake result starts at 0. In a graph without symbolic sizes, the offset does not matter: there AOTAutograd creates aliases by
    calling the view ops again.

    Source: ATen clone_preserve_strides.
    """
    if node.target not in _SCATTERS or not isinstance(node.args[0], Node):
        return 0
    spec, source = symbols.spec(node.meta["val"]), symbols.spec(node.args[0].meta["val"])
    base = node.args[0]
    while (source_node := view_source(base)) is not None:
        base = source_node
    is_expanded = any(step == 0 and size > 1 for step, size in zip(source.stride, source.shape, strict=True))
    return 0 if is_expanded else source.offset + _lost_offset(base, symbols) - spec.offset
