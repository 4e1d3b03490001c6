"""Reference implementations in JAX of models and blocks. They take parameters and buffers by torch's names, and inputs."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
from benchmarks.versus_jax import resnet18
from jax import Array, lax
from jax import numpy as jnp
from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention

Params = Mapping[str, Array]
Attend = Callable[[Array, Array, Array], Array]


def attention(query: Array, key: Array, value: Array) -> Array:
    """Causal attention that computes all scores. Several heads of the query may share a head of keys and values."""
    if query.shape[1] != key.shape[1]:
        key, value = (jnp.repeat(item, query.shape[1] // key.shape[1], 1) for item in (key, value))
    length = query.shape[-2]
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), _scores(query, key), -jnp.inf)
    return jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(scores, -1).astype(query.dtype), value)


def _scores(query: Array, key: Array) -> Array:
    """Returns the scores in float32, the precision in which eager mode computes them."""
    return jnp.einsum("bhqd,bhkd->bhqk", query, key, preferred_element_type=jnp.float32) / math.sqrt(query.shape[-1])


def flash(query: Array, key: Array, value: Array) -> Array:
    """The same attention by JAX's Pallas kernel."""
    if query.shape[1] != key.shape[1]:
        key, value = (jnp.repeat(item, query.shape[1] // key.shape[1], 1) for item in (key, value))
    return flash_attention(query, key, value, causal=True, sm_scale=1 / math.sqrt(query.shape[-1]))


def _linear(p: Params, name: str, x: Array) -> Array:
    out = x @ p[f"{name}.weight"].T
    return out + p[f"{name}.bias"] if f"{name}.bias" in p else out


def _layer_norm(p: Params, name: str, x: Array, eps: float = 1e-5) -> Array:
    wide = x.astype(jnp.float32)
    centered = wide - wide.mean(-1, keepdims=True)
    normal = centered * lax.rsqrt((centered**2).mean(-1, keepdims=True) + eps)
    return (normal * p[f"{name}.weight"] + p[f"{name}.bias"]).astype(x.dtype)


def _rms_norm(p: Params, name: str, x: Array) -> Array:
    wide = x.astype(jnp.float32)
    normal = wide * lax.rsqrt((wide**2).mean(-1, keepdims=True) + 1e-5)
    return (normal * p[f"{name}.weight"]).astype(x.dtype)


def _split(x: Array, heads: int) -> Array:
    return x.reshape(*x.shape[:2], heads, -1).transpose(0, 2, 1, 3)


def _joined(x: Array) -> Array:
    return x.transpose(0, 2, 1, 3).reshape(x.shape[0], x.shape[2], -1)


def gpt_block(p: Params, x: Array, attend: Attend = attention) -> Array:
    parts = jnp.split(_linear(p, "qkv", _layer_norm(p, "norm1", x)), 3, -1)
    x = x + _linear(p, "out", _joined(attend(*(_split(part, 12) for part in parts))))
    return x + _linear(p, "down", jax.nn.gelu(_linear(p, "up", _layer_norm(p, "norm2", x)), approximate=True))


def llama_block(p: Params, x: Array, attend: Attend = attention) -> Array:
    hidden = _rms_norm(p, "norm1", x)
    query, key, value = (_split(_linear(p, name, hidden), heads) for name, heads in (("query", 16), ("key", 4), ("value", 4)))
    x = x + _linear(p, "out", _joined(attend(_rotated(query), _rotated(key), value)))
    hidden = _rms_norm(p, "norm2", x)
    return x + _linear(p, "down", jax.nn.silu(_linear(p, "gate", hidden)) * _linear(p, "up", hidden))


def _rotated(x: Array) -> Array:
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[-2], dtype=jnp.float32)[:, None] * 10000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    cosine, sine = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    first, second = jnp.split(x, 2, -1)
    return jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], -1)


def vgg16(p: Params, x: Array) -> Array:
    index = 0
    for count in (2, 2, 3, 3, 3):
        for _ in range(count):
            weight, bias = p[f"features.{index}.weight"], p[f"features.{index}.bias"]
            x = jax.nn.relu(lax.conv_general_dilated(x, weight, (1, 1), [(1, 1)] * 2) + bias[:, None, None])
            index += 2
        x = lax.reduce_window(x, jnp.array(-jnp.inf, x.dtype), lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")
        index += 1
    x = x.reshape(x.shape[0], -1)
    return _linear(p, "classifier.6", jax.nn.relu(_linear(p, "classifier.3", jax.nn.relu(_linear(p, "classifier.0", x)))))


def bert_base(p: Params, tokens: Array) -> tuple[Array, Array]:
    name = "bert.embeddings"
    x = p[f"{name}.word_embeddings.weight"][tokens] + p[f"{name}.token_type_embeddings.weight"][0]
    x = _layer_norm(p, f"{name}.LayerNorm", x + p[f"{name}.position_embeddings.weight"][: tokens.shape[1]], 1e-12)
    for number in range(12):
        name = f"bert.encoder.layer.{number}"
        query, key, value = (_split(_linear(p, f"{name}.attention.self.{part}", x), 12) for part in ("query", "key", "value"))
        weights = jax.nn.softmax(_scores(query, key), -1).astype(x.dtype)
        attended = _linear(p, f"{name}.attention.output.dense", _joined(jnp.einsum("bhqk,bhkd->bhqd", weights, value)))
        x = _layer_norm(p, f"{name}.attention.output.LayerNorm", x + attended, 1e-12)
        hidden = jax.nn.gelu(_linear(p, f"{name}.intermediate.dense", x), approximate=False)
        x = _layer_norm(p, f"{name}.output.LayerNorm", x + _linear(p, f"{name}.output.dense", hidden), 1e-12)
    return x, jnp.tanh(_linear(p, "bert.pooler.dense", x[:, 0]))


# By the names of the benchmark's models.
MODELS: Mapping[str, Callable[..., Any]] = {"resnet18": resnet18, "vgg16": vgg16, "bert_base": bert_base}


def gradient(function: Callable[..., Any], differentiated: int | tuple[int, ...] = 0) -> Callable[..., Any]:
    """Returns a function that computes a function's results, and the gradients of arguments for given gradients of the results."""

    @functools.wraps(function)
    def both(gradients: Any, *args: Any) -> Any:
        chosen = (differentiated,) if isinstance(differentiated, int) else differentiated

        def of_chosen(*values: Any) -> Any:
            values_by_index = dict(zip(chosen, values, strict=True))
            return function(*[values_by_index.get(index, arg) for index, arg in enumerate(args)])

        results, pull_back = jax.vjp(of_chosen, *[args[index] for index in chosen])
        return results, pull_back(gradients)

    return both
