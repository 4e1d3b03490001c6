"""torch's kernels in a program write to the buffers of the results, and get contiguous operands."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import torch

from dynaxla.lowering.cpu.torch_kernels import call
from dynaxla.runtime import clients, programs


def run(function: object, *arrays: np.ndarray) -> list[np.ndarray]:
    device = clients.cpu_device()
    with jax.enable_x64(True), jax.default_device(device):
        lowered = jax.jit(function).lower(*(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays))
        results = programs.compile_lowered(lowered, device, {}).call([jax.device_put(array, device) for array in arrays])
    return [np.asarray(result) for result in results]


def test_results_and_operands() -> None:
    operands_of_calls: list[tuple[bool, tuple[int, ...]]] = []

    def write(results: object, operands: object) -> None:
        product, total = results
        x, y = operands
        operands_of_calls.append((x.is_contiguous(), tuple(x.shape)))
        torch.mm(x, y, out=product)
        total.copy_(x.sum())

    x, y = np.arange(6.0, dtype=np.float32).reshape(2, 3), np.ones((2, 4), np.float32)
    specs = [((3, 4), np.dtype(np.float32)), ((), np.dtype(np.float64))]
    product, total = run(lambda x, y: [item * 2 for item in call(write, [x.T + 1, y], specs)], x, y)
    np.testing.assert_array_equal(product, (x.T + 1) @ y * 2)
    assert (product.dtype, total.dtype, total.item()) == (np.float32, np.float64, 42)
    assert operands_of_calls == [(True, (3, 2))], "the kernel runs once per call of the program, and not while it is traced"


def test_error_of_a_kernel_fails_the_call() -> None:
    def write(results: object, operands: object) -> None:
        raise KeyError("no such kernel")

    with pytest.raises(Exception, match="no such kernel"):
        run(lambda x: call(write, [x], [((2,), np.dtype(np.float32))]), np.ones(2, np.float32))
