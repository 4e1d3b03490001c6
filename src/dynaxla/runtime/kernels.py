"""torch's own kernels inside an XLA program: what XLA calls back for an op without a lowering."""

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
    """One call of a torch op on the buffers of a running program. XLA calls it from whatever thread it likes.

    Attributes:
        name: the op's.
        call: gets the operands as tensors, returns the op's results that are tensors.
        operands: the shape and strides with which each operand's buffer is read.
        results: the shape and dtype of each result.
        errors: where an exception of the op is left for the caller of the program; XLA hands on only its text.
    """

    name: str
    call: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]
    operands: Sequence[Strided]
    results: Sequence[tuple[tuple[int, ...], torch.dtype]]
    errors: deque[Exception] = field(default_factory=deque)

    def __call__(self, context: Any, outputs: Sequence[Any], *inputs: Any) -> None:
        """context, outputs, inputs: XLA's (`jax.experimental.buffer_callback`). The operands must not be written."""
        try:
            with _disable_current_modes(), transfer.below_autograd(), transfer.on_stream(context, (*inputs, *outputs)[0]):
                self._run(outputs, inputs)
        except Exception as error:
            self.errors.append(error)
            raise

    def _run(self, outputs: Sequence[Any], inputs: Sequence[Any]) -> None:
        tensors = [transfer.reinterpret(torch.from_dlpack(buffer), *view) for buffer, view in zip(inputs, self.operands, strict=True)]
        found = self.call(tensors)
        metrics.add("kernels")
        for output, result, (shape, dtype) in zip(outputs, found, self.results, strict=True):
            if tuple(result.shape) != shape or result.dtype != dtype:
                raise RuntimeError(
                    f"{self.name} returned {result.dtype} of shape {list(result.shape)}, "
                    f"its fake (meta) implementation promised {dtype} of shape {list(shape)}"
                )
            torch.from_dlpack(output).copy_(result)
