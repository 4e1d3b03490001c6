"""Calls of torch's kernels from an XLA:CPU program, on the program's own buffers, through XLA's foreign function interface."""

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
    """Returns results that `write` computes from the operands while the program runs.

    Args:
        write: Called with the buffers of the results and the operands, as contiguous tensors. It must write all buffers, and nothing else.
        operands: Arrays of the program.
        results: The shape and dtype of each result.
    """
    views = [(operand.shape, torch.empty(operand.shape, device="meta").stride()) for operand in operands]
    arrays: list[Array] = buffer_callback(Kernel(write, views), [jax.ShapeDtypeStruct(*result) for result in results])(*operands)
    return arrays
