"""Products with an updated tensor, computed from the old tensor and the new slices: overwritten values do not reach the result."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from cases.cache_readers import READERS, Inputs, by_chance
from support import internals
from support.forced_implementations import backend_with

# The programs run twice, and their optimization would take seconds.
OPTIONS = {"fallback": "error", "xla": {"xla_backend_optimization_level": 0}}
BY_PARTS = backend_with({"product_of_update": "parts"})


@pytest.fixture
def first_operands(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The first operands of all products with an old tensor and with new slices."""
    return internals.products_with_updated_operands(monkeypatch)


def compare(functions: dict[str, Callable[[Inputs], object]], dtype: torch.dtype) -> None:
    """Compares one program for all functions with eager mode."""

    def run(*tensors: Tensor) -> dict[str, object]:
        return {name: function(Inputs(*tensors)) for name, function in functions.items()}

    compiled = torch.compile(run, backend=BY_PARTS, fullgraph=True, options=OPTIONS)
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 3e-2, "atol": 3e-2}
    for is_finite in (False, True):
        tensors = list(vars(Inputs.make(dtype, is_finite=is_finite)).values())
        with torch.no_grad():
            results, expected = compiled(*tensors), run(*tensors)
        for name in functions:
            torch.testing.assert_close(
                results[name], expected[name], **tolerance, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}"
            )
            assert isinstance(results[name], tuple) or torch.isfinite(results[name]).all(), name


@pytest.mark.thorough
def test_decoders(first_operands: list[Tensor]) -> None:
    compare({name: reader.run for name, reader in READERS.items()}, torch.float32)
    # Scores are two products: with the old tensor and with the new slices. Sums are three: there are two with the old tensor, one of them
    # for values that are not finite.
    pairs = sum(reader.by_parts == 2 for reader in READERS.values())
    # Two readers have sums alone, and two have scores alone. Eight have slices at positions in several dimensions, which are multiplied
    # separately, and one more has scores alone.
    assert len(first_operands) == pairs * 5 + 2 * 3 + 2 * 2 - 8 * 2 + 1


def test_decoders_in_bfloat16(first_operands: list[Tensor]) -> None:
    names = ["by hand", "fused", "in rows", "a single query"]
    compare({name: READERS[name].run for name in names}, torch.bfloat16)
    assert len(first_operands) == len(names) * 5


def test_random_readers(first_operands: list[Tensor]) -> None:
    compare({f"program {seed}": by_chance(seed) for seed in range(8)}, torch.float32)
    assert first_operands


def decode(keys: Tensor, values: Tensor, query: Tensor, key: Tensor, value: Tensor, at: Tensor) -> Tensor:
    keys, values = keys.index_copy(2, at, key), values.index_copy(2, at, value)
    return torch.nn.functional.scaled_dot_product_attention(query, keys, values)


def operands(length: int) -> list[Tensor]:
    shapes = [(1, 2, length, 16)] * 2 + [(1, 2, 1, 16)] * 3
    return [*map(torch.randn, shapes), torch.tensor([length - 1])]


def test_index_is_checked(first_operands: list[Tensor]) -> None:
    """The first size uses the old tensor; the second, small one does not."""
    compiled = torch.compile(decode, backend="dynaxla", fullgraph=True, dynamic=True, options=OPTIONS)
    with torch.no_grad():
        for length in (2048, 16):
            tensors = operands(length)
            torch.testing.assert_close(compiled(*tensors), decode(*tensors))
            assert len(first_operands) == 5
        tensors[-1] += 1
        with pytest.raises(IndexError):
            compiled(*tensors)


def test_gradients() -> None:
    """In training, the updated tensor is saved for the backward pass."""
    compiled = torch.compile(decode, backend=BY_PARTS, fullgraph=True, options=OPTIONS)
    tensors = operands(64)
    for tensor in tensors[:5]:
        tensor.requires_grad_()
    grads = torch.autograd.grad(compiled(*tensors).square().sum(), tensors[:5])
    expected = torch.autograd.grad(decode(*tensors).square().sum(), tensors[:5])
    torch.testing.assert_close(grads, expected, rtol=1e-4, atol=1e-5)
