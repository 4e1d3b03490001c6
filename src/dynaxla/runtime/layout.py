"""Maps strided torch tensors to the row-major arrays that are passed to and from XLA.

The arguments and results of a program are row-major, except for those whose memory order XLA chooses on a GPU (`open_inputs` and
`free_results` of `buffers.protocol.Buffers`). The *packed* array of a tensor is the row-major array of its distinct elements in memory
order: its dimensions are sorted by stride, and a broadcast dimension (stride 0) has size 1. For example, a transposed tensor of shape (3,
4) and strides (1, 3) is passed as an array of shape (4, 3). The program begins (or ends) with the transpose, which XLA folds into other
operations. So no tensor is copied, unless its distinct elements have gaps or overlaps in memory.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import jax
import torch
from jax import lax

# The classes of ordinary tensors. (nn.Buffer creates a torch.Tensor.) Other subclasses of torch.Tensor may override any op.
ORDINARY = (torch.Tensor, torch.nn.Parameter)


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the strides, in elements, of a contiguous tensor of this shape."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(shape[dim + 1], 1)
    return tuple(strides)


@dataclass(frozen=True)
class Layout:
    """The memory order of a strided tensor.

    Attributes:
        shape: The tensor's shape.
        packed_shape: The shape of the packed array (see the module's docstring).
        permutation: Dimension i of the packed array is dimension permutation[i] of the tensor.
        dense: True if the distinct elements fill their memory without gaps or overlaps.
    """

    shape: tuple[int, ...]
    packed_shape: tuple[int, ...]
    permutation: tuple[int, ...]
    dense: bool

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def of(shape: tuple[int, ...], stride: tuple[int, ...]) -> Layout:
        """Returns the layout of a tensor with this shape and these strides."""
        packed = [1 if step == 0 else size for size, step in zip(shape, stride, strict=True)]
        order = tuple(range(len(shape)))
        if not _is_row_major(packed, stride):
            # The stride of a dimension of size 1 is meaningless, so the dimension is sorted as if it had the stride of its right neighbour.
            sort_strides = list(stride)
            for dim in range(len(shape) - 2, -1, -1):
                if packed[dim] == 1:
                    sort_strides[dim] = sort_strides[dim + 1]
            order = tuple(sorted(order, key=lambda dim: -sort_strides[dim]))
        packed_shape = tuple(packed[dim] for dim in order)
        dense = _is_row_major(packed_shape, tuple(stride[dim] for dim in order))
        return Layout(shape, packed_shape, order, dense)

    @staticmethod
    def ordered(shape: tuple[int, ...], order: tuple[int, ...]) -> Layout:
        """Returns the dense layout of a tensor whose dimension order[i] is dimension i in memory (dimension 0 is the outermost)."""
        return Layout(shape, tuple(shape[dim] for dim in order), order, True)

    @property
    def is_non_overlapping_and_dense(self) -> bool:
        """True if the layout is dense and has no broadcast dimension. torch calls such tensors non-overlapping and dense."""
        return self.dense and math.prod(self.packed_shape) == math.prod(self.shape)

    @property
    def strides(self) -> tuple[int, ...]:
        """The strides, in elements, of a tensor with this layout. Only for dense layouts."""
        packed = row_major(self.packed_shape)
        strides = [0] * len(self.shape)
        for position, dim in enumerate(self.permutation):
            strides[dim] = packed[position] if self.packed_shape[position] == self.shape[dim] else 0
        return tuple(strides)

    @functools.cached_property
    def is_row_major(self) -> bool:
        """True if the tensor is contiguous, so that the packed array has the tensor's shape."""
        return self.dense and self.packed_shape == self.shape and self.permutation == tuple(range(len(self.shape)))

    def pack_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the tensor's distinct elements as a contiguous tensor: an alias if the layout is dense, a copy otherwise."""
        stride = tensor.stride()
        packed = torch.as_strided(tensor.detach(), self.packed_shape, [stride[dim] for dim in self.permutation])
        return packed.contiguous()

    def unpack(self, array: jax.Array) -> jax.Array:
        """Under jit: converts a packed array to an array of the tensor's shape."""
        if self.permutation != tuple(range(len(self.shape))):
            inverse = sorted(range(len(self.permutation)), key=self.permutation.__getitem__)
            array = lax.transpose(array, inverse)
        if array.shape != self.shape:
            array = lax.broadcast_in_dim(array, self.shape, range(len(self.shape)))
        return array

    def pack(self, array: jax.Array) -> jax.Array:
        """Under jit: converts an array of the tensor's shape to the packed array."""
        limits = [self.packed_shape[self.permutation.index(dim)] for dim in range(len(self.shape))]
        if tuple(limits) != array.shape:
            array = lax.slice(array, [0] * len(limits), limits)
        if self.permutation != tuple(range(len(self.shape))):
            array = lax.transpose(array, self.permutation)
        return array


def _is_row_major(shape: list[int] | tuple[int, ...], stride: tuple[int, ...]) -> bool:
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True


def storage_extent(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Returns the number of storage elements from a tensor's first element to its last, both included."""
    if math.prod(shape) == 0:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
