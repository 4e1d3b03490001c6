"""Calls of cuDNN's attention: equal to the calls that JAX writes, and correct values with a simulated cuDNN."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from dynaxla.lowering.cuda import fused_attention
from dynaxla.lowering.cuda.fused_attention import AttentionSettings, backward, forward
from support import internals
from support.fakes import simulated_cudnn

BF16, F16 = np.dtype(jnp.bfloat16), np.dtype(np.float16)
JAX = "jax._src.cudnn.fused_attention_stablehlo"


def calls(function: Callable[..., Any], *args: jax.ShapeDtypeStruct) -> list[tuple[Any, str]]:
    """The configuration and the remaining text of each cuDNN call in a program for CUDA."""
    text = jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    lines = [line for line in text.splitlines() if "custom_call @__cudnn" in line]
    return [parsed(line) for line in lines]


def parsed(line: str) -> tuple[Any, str]:
    found = re.search(r'backend_config = "([^"]*)"', line)
    assert found is not None
    config = re.sub(r"\\([0-9A-F]{2})", lambda code: chr(int(code[1], 16)), found[1])
    rest = re.sub(r"%\w+(:\d+)?(#\d+)?", "%", line.replace(found[0], "")).strip()
    return without_defaults(json.loads(config)), re.sub(r"mhlo[^,}]*,? ?", "", rest)


def without_defaults(value: Any) -> Any:
    """A message without fields that have their default value, and with numbers as text."""
    if isinstance(value, dict):
        fields = {name: without_defaults(item) for name, item in value.items()}
        return {name: item for name, item in fields.items() if item not in ({}, [], "0", "0.0", "", "False", "PRIMITIVE_TYPE_INVALID")}
    return [str(item) for item in value] if isinstance(value, list) else str(value)


@pytest.mark.parametrize("heads_inside", [True, False])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(("key_heads", "dtype"), [(4, BF16), (2, F16)], ids=str)
def test_calls_equal_those_of_jax(
    heads_inside: bool, is_causal: bool, key_heads: int, dtype: np.dtype[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("check_cudnn_version", 91000), ("check_compute_capability", True), ("is_cuda_compute_capability_equal", False)):
        monkeypatch.setattr(f"{JAX}.{name}", lambda *_, value=value: value)
    order = fused_attention.HEADS_INSIDE if heads_inside else (0, 1, 2, 3)
    columns = 16 if is_causal else 24
    shapes = [(2, 4, 16, 64), *[(2, key_heads, columns, 64)] * 2]
    args = [jax.ShapeDtypeStruct([shape[dim] for dim in order], dtype) for shape in shapes]
    bias = jax.ShapeDtypeStruct((2, 1, 16, columns), dtype)
    settings = AttentionSettings(0.125, is_causal, heads_inside)
    jax_attention = pytest.importorskip(JAX)

    def jax_forward(query: Array, key: Array, value: Array, bias: Array | None = None) -> Any:
        kind = jax_attention.MaskType.CAUSAL if is_causal else jax_attention.MaskType.NO_MASK
        layout = "BTNH" if heads_inside else "BNTH"
        return jax_attention.dot_product_attention(
            query, key, value, bias, scale=0.125, mask_type=kind, qkv_layout=layout, return_residual=True
        )

    def jax_backward(*args: Array) -> Any:
        out, pull = jax.vjp(lambda *args: jax_forward(*args)[0], *args)
        return pull(out)

    def ours(query: Array, key: Array, value: Array, bias: Array | None = None) -> Any:
        return forward(*(x.transpose(order) for x in (query, key, value)), bias, settings)

    def ours_backward(*args: Array) -> Any:
        packed = [x.transpose(order) for x in args]
        out, logsumexp = forward(*packed, None, settings)
        return backward(out, *packed, None, out, logsumexp, settings)

    assert calls(ours, *args) == calls(jax_forward, *args) != []
    assert calls(ours, *args, bias) == calls(jax_forward, *args, bias) != []
    assert calls(ours_backward, *args) == calls(jax_backward, *args)
    assert len(calls(ours_backward, *args)) == 2


def reference(query: Array, key: Array, value: Array, mask: Array | None, settings: AttentionSettings) -> tuple[Array, Array]:
    """Attention by its definition. A row in which the mask hides all columns is zero."""
    groups = query.shape[1] // key.shape[1]
    scores = jnp.einsum("bhrs,bhcs->bhrc", query, jnp.repeat(key, groups, 1)) * settings.scale
    if mask is not None:
        scores = jnp.where(mask, scores, -np.inf) if mask.dtype == bool else scores + mask
    if settings.is_causal:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[2:], bool)), scores, -np.inf)
    largest = scores.max(3, keepdims=True)
    largest = jnp.where(jnp.isinf(largest), 0, largest)
    weights = jnp.exp(scores - largest)
    total = weights.sum(3, keepdims=True)
    total = jnp.where(total == 0, 1, total)
    out = jnp.einsum("bhrc,bhcs->bhrs", weights / total, jnp.repeat(value, groups, 1))
    return out, (jnp.log(total) + largest)[..., 0]


def additive_mask(rows: int, columns: int, dtype: np.dtype[Any]) -> Array:
    """An additive mask with special rows.

    Row 0 hides three columns with -inf, row 1 all columns with -inf, row 2 all columns with the lowest finite number, row 3 all columns
    with either. Row 4 has low numbers.
    """
    generator = np.random.default_rng(1)
    mask = generator.standard_normal((2, 1, rows, columns)).astype(np.float32)
    mask[:, :, 0, :3] = -np.inf
    mask[:, :, 1] = -np.inf
    mask[:, :, 2] = jnp.finfo(dtype).min
    mask[:, :, 3] = -np.inf
    mask[:, :, 3, ::2] = jnp.finfo(dtype).min
    mask[:, :, 4] -= 1e4
    return jnp.asarray(mask, dtype)


MASKS: dict[str, Callable[[np.dtype[Any]], Array | None]] = {
    "none": lambda _: None,
    "added": lambda dtype: additive_mask(6, 8, dtype),
    "bool": lambda dtype: additive_mask(6, 8, dtype) > 0,
}


@pytest.mark.sample(usual=2)
@pytest.mark.parametrize("mask_name", MASKS)
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize(("heads_inside", "key_heads"), [(True, 4), (False, 2)])
def test_values(mask_name: str, dtype: np.dtype[Any], heads_inside: bool, key_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    simulated_cudnn.install(monkeypatch)
    generator = np.random.default_rng(0)
    with jax.enable_x64(True):
        mask = MASKS[mask_name](dtype)
        shapes = [(2, 4, 6, 8), (2, key_heads, 8, 8), (2, key_heads, 8, 8), (2, 4, 6, 8)]
        *operands, grad = (jnp.asarray(generator.standard_normal(shape), dtype) for shape in shapes)
        settings = AttentionSettings(0.3, False, heads_inside)
        wide = [x.astype(np.float64) for x in operands]
        wide_mask = None if mask is None else mask if mask.dtype == bool else mask.astype(np.float64)
        (expected, expected_logsumexp), pull = jax.vjp(jax.jit(lambda *args: reference(*args, wide_mask, settings)), *wide)
        out, logsumexp = jax.jit(lambda *args: forward(*args, settings))(*operands, mask)
        # In bfloat16, adding the lowest number loses the scores of rows 2 and 3, and the logarithm of the columns' count.
        rows = slice(None) if mask_name != "added" or dtype == F16 else np.array([0, 1, 4, 5])
        np.testing.assert_allclose(out[:, :, rows], expected[:, :, rows], rtol=0.02, atol=0.02)
        np.testing.assert_allclose(logsumexp, expected_logsumexp, rtol=1e-5, atol=1e-2 if dtype == F16 else 1e-4)
        assert mask is None or mask_name == "bool" or not out[:, :, 1].any()
        grad = grad.at[:, :, 2:4].set(0) if dtype == BF16 else grad
        grads = jax.jit(lambda *args: backward(*args, settings))(grad, *operands, mask, out, logsumexp)
        for mine, theirs in zip(grads, pull((grad.astype(np.float64), jnp.zeros_like(expected_logsumexp))), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=0.03, atol=0.03)


def test_causal_values(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated_cudnn.install(monkeypatch)
    with jax.enable_x64(True):
        query, key, value = (jnp.asarray(np.random.default_rng(seed).standard_normal((1, 2, 5, 8)), F16) for seed in range(3))
        settings = AttentionSettings(0.5, True, True)
        found, expected = forward(query, key, value, None, settings), reference(query, key, value, None, settings)
        for mine, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("dtype", "size", "taken"),
    [
        (BF16, 64, True),
        (F16, 128, True),
        (F16, 8, True),
        (BF16, 68, False),
        (BF16, 136, False),
        (BF16, 0, False),
        (np.dtype("f4"), 64, False),
    ],
    ids=str,
)
def test_takes(dtype: np.dtype[Any], size: int, taken: bool) -> None:
    assert fused_attention.supports(dtype, size) == taken


@pytest.mark.parametrize(("version", "known"), [("0.10.2", True), ("0.11.0", True), ("0.13.0", False), ("1.10.0", False)])
def test_an_unknown_jaxlib_may_read_a_call_otherwise(version: str, known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    internals.jaxlib_release(monkeypatch, version)
    assert fused_attention.is_known() == known
