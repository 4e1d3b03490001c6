"""torch's own kernels as forms: called by the program on its own buffers, through XLA's foreign function interface."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import torch
from jax import Array
from jax.experimental.buffer_callback import buffer_callback

from ...runtime.callbacks import Kernel
from ..dtypes import DType

Write = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], object]


def call(write: Write, operands: Sequence[Array], results: Sequence[tuple[tuple[int, ...], DType]]) -> list[Array]:
    """What `write` makes of the operands while the program runs.

    write: gets the results' buffers and the operands as contiguous tensors, and writes the former. results: shape and dtype of each.
    """
    views = [(operand.shape, torch.empty(operand.shape, device="meta").stride()) for operand in operands]
    found: list[Array] = buffer_callback(Kernel(write, views), [jax.ShapeDtypeStruct(*result) for result in results])(*operands)
    return found
