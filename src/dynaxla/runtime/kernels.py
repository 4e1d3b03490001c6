"""torch's own kernels inside an XLA program: what XLA calls back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ..observe import metrics
from . import transfer

Strided = tuple[tuple[int, ...], tuple[int, ...]]  # shape and strides


@dataclass(eq=False)
class Kernel:
    """Work of torch's on the buffers of a running program. XLA calls it from whatever thread it likes.

    Attributes:
        write: gets the results' buffers and the operands, as tensors; it writes the former and leaves the latter alone.
        operands: the shape and strides with which each operand's buffer is read.
        errors: where an exception is left for the caller of the program; XLA hands on only its text.
    """

    write: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], object]
    operands: Sequence[Strided]
    errors: deque[Exception] = field(default_factory=deque)

    def __call__(self, context: Any, outputs: Sequence[Any], *inputs: Any) -> None:
        """context, outputs, inputs: XLA's (`jax.experimental.buffer_callback`)."""
        try:
            with _disable_current_modes(), transfer.below_autograd(), transfer.on_stream(context, (*inputs, *outputs)[0]):
                tensors = [
                    transfer.reinterpret(torch.from_dlpack(buffer), *view) for buffer, view in zip(inputs, self.operands, strict=True)
                ]
                self.write([torch.from_dlpack(buffer) for buffer in outputs], tensors)
        except Exception as error:
            self.errors.append(error)
            raise
        metrics.add("kernels")
