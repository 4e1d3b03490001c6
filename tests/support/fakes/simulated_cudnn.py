"""Results of cuDNN's attention calls, computed in plain JAX from the configuration that XLA would read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax

from dynaxla.lowering.cuda import fused_attention


def install(patch: pytest.MonkeyPatch) -> None:
    """Replaces cuDNN's attention by `attention_kernel`."""
    patch.setattr(fused_attention, "_call", attention_kernel)


def attention_kernel(target: str, config: dict[str, Any], operands: Sequence[Array], results: Sequence[Any], settings: Any) -> list[Array]:
    """Replaces `fused_attention._call`. Results have the shape (batch, heads, ...) for any order of the operands' dimensions."""
    attention = config["cudnn_fmha_backend_config"]
    has_bias = "ScaleBias" in target
    double = [x.astype(np.float64) for x in operands]
    if "Backward" in target:
        query, key, value, statistics, grad, *rest = double
        bias, out = rest if has_bias else (None, rest[0])
        scores_name = "bmm2_grad_gemm2"  # the product of grad and value has the dimension numbers of query and key
    else:
        query, key, value, *rest = double
        bias = rest[0] if has_bias else None
        scores_name = "bmm1"
    sizes = [int(size) for size in attention["intermediate_tensor_shape"]["dimensions"]]

    def dims(name: str, key: str) -> tuple[int, ...]:
        return tuple(map(int, attention[f"{name}_dot_dimension_numbers"][key]))

    def product(name: str, x: Array, y: Array) -> Array:
        """Returns a product with the shape (batch, heads, ...). Each key head is used by several adjacent query heads."""
        heads = dims(name, "rhs_batch_dimensions")[1]
        if name != "bmm1_grad_gemm1" and y.shape[heads] != sizes[1]:
            y = jnp.repeat(y, sizes[1] // y.shape[heads], heads)
        over = dims(name, "lhs_contracting_dimensions"), dims(name, "rhs_contracting_dimensions")
        batch = dims(name, "lhs_batch_dimensions"), dims(name, "rhs_batch_dimensions")
        return lax.dot_general(x, y, (over, batch))

    scores = product(scores_name, query, key) * attention["fmha_scale"]
    assert list(scores.shape) == sizes
    if bias is not None:
        scores = scores + jnp.where(jnp.isfinite(bias), bias, np.nan)
    if attention["mask_type"] == "CAUSAL":
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[2:], bool)), scores, -np.inf)
    if "Backward" not in target:
        largest = scores.max(3, keepdims=True)
        statistics = (largest + jnp.log(jnp.exp(scores - largest).sum(3, keepdims=True)))[..., 0]
        found = [product("bmm2", jnp.exp(scores - statistics[..., None]), value), statistics]
    else:
        weights = jnp.exp(scores - statistics[..., None])
        head_dim = dims("bmm2_grad_gemm1", "rhs_batch_dimensions")[1]
        shared = (grad * out).sum(3)
        shared = shared.swapaxes(1, 2) if head_dim == 2 else shared
        grad_scores = weights * (product("bmm2_grad_gemm2", grad, value) - shared[..., None]) * attention["fmha_scale"]
        found = [
            product("bmm1_grad_gemm2", grad_scores, key),
            product("bmm1_grad_gemm1", grad_scores, query),
            product("bmm2_grad_gemm1", weights, grad),
        ]
        found = [_by_key_head(x, result.shape[1]) for x, result in zip(found, results, strict=True)]
    assert [x.shape for x in found] == [tuple(result.shape) for result in results]
    return [x.astype(result.dtype) for x, result in zip(found, results, strict=True)]


def _by_key_head(x: Array, heads: int) -> Array:
    """Returns the sum over the query heads of each key head."""
    return x.reshape(x.shape[0], heads, x.shape[1] // heads, *x.shape[2:]).sum(2)
