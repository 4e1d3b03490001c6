"""Products with weights of eight bits, dequantized a few rows at a time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dynaxla.lowering.ops.quantized_weights import QUANTIZED_PRODUCT, QuantizedProductProblem
from support import internals
from support.forced_implementations import backend_with

OPTIONS = {"fallback": "error", "xla": {"xla_backend_optimization_level": 0}}
COLUMNS = 11

# The operands are x (rows, size), a weight (COLUMNS, size) and scales (COLUMNS, 4).
Product = Callable[[Tensor, Tensor, Tensor], Tensor]


def grouped(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    """A product with zero points and scales for four groups of elements of each row."""
    zero = torch.arange(4) - 1
    return F.linear(x, ((w.view(COLUMNS, 4, -1).to(x.dtype) - zero[:, None]) * s[:, :, None]).reshape(w.shape))


# The functions, and the number of their products that dequantize the weight in parts.
PRODUCTS: dict[str, tuple[Product, int]] = {
    "scaled before": (lambda x, w, s: F.linear(x, w.to(x.dtype) * s[:, :1]), 1),
    "scaled after": (lambda x, w, s: F.linear(x, w.to(x.dtype)) * s[:, 0], 1),
    "a bias": (lambda x, w, s: F.linear(x[None], w.to(x.dtype) * s[:, :1], s[:, 1]), 1),
    "in groups": (grouped, 1),
    "groups as rows": (lambda x, w, s: F.linear(x, (w.view(COLUMNS * 4, -1).to(x.dtype) * s.view(-1, 1)).view(w.shape)), 0),
    "unsigned": (lambda x, w, s: x @ ((w.view(torch.uint8).to(x.dtype) - 128) / s[:, 2:3]).t(), 1),
    "scales of columns": (lambda x, w, s: F.linear(x, w.to(x.dtype) * torch.linspace(0.5, 2, x.shape[1], dtype=x.dtype)), 1),
    "two weights": (lambda x, w, s: F.linear(x, w.to(x.dtype) + w.flip(0).to(x.dtype)), 1),
    "packed": (lambda x, w, s: torch._weight_int8pack_mm(x, w, s[:, 0].contiguous()), 0),
    "weight not transposed": (lambda x, w, s: x[:, :COLUMNS] @ w.to(x.dtype), 0),
    "cumulative sum of a weight": (lambda x, w, s: F.linear(x, (w.to(x.dtype) * s[:, :1]).cumsum(1)), 0),
    "promoted": (lambda x, w, s: F.linear(x, (w * s[:, :1]).to(torch.float64).to(x.dtype)), 1),
    "floats": (lambda x, w, s: F.linear(x, x.flip(0) * s[: len(x), :1]), 0),
}


@pytest.mark.parametrize(("implementation", "rows", "size"), [("blocks", 3, 32), ("one_row", 1, 256)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products(dtype: torch.dtype, implementation: str, rows: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks have four rows, and the last block overlaps the one before."""
    is_in_parts = internals.quantized_products(monkeypatch)
    internals.bytes_of_quantized_blocks(monkeypatch, 4 * size * 4)
    backend = backend_with({"quantized_product": implementation})

    def run(x: Tensor, w: Tensor, s: Tensor) -> dict[str, Tensor]:
        return {name: product(x, w, s) for name, (product, _) in PRODUCTS.items()}

    generator = torch.Generator().manual_seed(0)
    w = torch.randint(-128, 128, (COLUMNS, size), generator=generator, dtype=torch.int8)
    args = torch.randn(rows, size, generator=generator).to(dtype), w, torch.rand(COLUMNS, 4, generator=generator).to(dtype) + 0.1
    with torch.no_grad():
        results, expected = torch.compile(run, backend=backend, fullgraph=True, options=OPTIONS)(*args), run(*args)
    tolerance = {"rtol": 1e-4, "atol": 1e-3} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 4.0}
    torch.testing.assert_close(results, expected, **tolerance)
    assert sum(is_in_parts) == sum(count for _, count in PRODUCTS.values())


def test_numbers_are_not_rounded_to_half_types() -> None:
    """The weight times 0.0123 would have a relative error of 2.3e-3 in every element, if 0.0123 were rounded to bfloat16."""

    def product(x: Tensor, w: Tensor) -> Tensor:
        return F.linear(x, w.to(x.dtype) * 0.0123)

    x, w = torch.ones(1, 256, dtype=torch.bfloat16), torch.full((COLUMNS, 256), 100, dtype=torch.int8)
    compiled = torch.compile(product, backend=backend_with({"quantized_product": "one_row"}), fullgraph=True, options=OPTIONS)
    torch.testing.assert_close(compiled(x, w), product(x, w), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("rows", "shape", "dtype", "read_bytes", "platform", "name"),
    [
        (1, (4096, 4096), "float32", 1 << 24, "cpu", "one_row"),
        (1, (256, 1008), "bfloat16", 256 * 1008, "cpu", "one_row"),
        (1, (128, 256), "float32", 1 << 15, "cpu", "whole"),
        (2, (4096, 4096), "float32", 1 << 24, "cpu", "blocks"),
        (16, (1024, 1024), "float32", 1 << 20, "cpu", "blocks"),
        (17, (4096, 4096), "float32", 1 << 24, "cpu", "whole"),
        (1, (1024, 1023), "float32", 1 << 20, "cpu", "whole"),
        (1, (1 << 17, 128), "float32", 1 << 24, "cpu", "blocks"),
        (1, (4096, 4096), "float16", 1 << 24, "cpu", "one_row"),
        (2, (4096, 4096), "float16", 1 << 24, "cpu", "whole"),
        (1, (4096, 4096), "float32", 3 << 24, "cpu", "whole"),
        (0, (4096, 4096), "float32", 1 << 24, "cpu", "whole"),
        (1, (4096, 4096), "float32", 1 << 24, "cuda", "whole"),
    ],
)
def test_choice_of_implementation(rows: int, shape: tuple[int, int], dtype: str, read_bytes: int, platform: str, name: str) -> None:
    assert QUANTIZED_PRODUCT.choose(QuantizedProductProblem(rows, shape, np.dtype(dtype), read_bytes, platform), {}).name == name
