"""`to_jax` of small timm and transformers models: values, gradients, batches. `make interop` runs all of them, other tests a sample."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import pytest
import torch
from jax import Array
from jax import numpy as jnp
from torch import nn

from dynaxla.interop import to_jax
from support.models import small_models

TIMM, TRANSFORMERS = list(small_models.TIMM)[:30], list(small_models.TRANSFORMERS)[:20]
SAMPLE = ["ElectraModel"]
# Models that compute parts in float32, regardless of their dtype.
PARTLY_FLOAT32 = {"efficientvit_b0", "CohereModel", "Gemma2Model", "GraniteModel"}
NAMES = [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.slow) for name in TIMM + TRANSFORMERS]


def build_model(name: str) -> tuple[nn.Module, torch.Tensor, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model, ((first,), keywords) = small_models.timm_model(name) if name in small_models.TIMM else small_models.transformers_model(name)
    if getattr(getattr(model, "config", None), "use_cache", False):
        model.config.use_cache = False
    return model, first, keywords


def first_result(result: Any) -> Any:
    """Returns the first of several results."""
    if isinstance(result, Mapping):
        result = next(iter(result.values()))
    return result[0] if isinstance(result, (tuple, list)) else result


def arrays(tensor: torch.Tensor) -> Array:
    return jnp.asarray(tensor.detach().numpy())


def check(actual: Any, expected: Any, tolerance: float, name: str = "", min_scale: float = 1e-3) -> None:
    """Asserts that the error is at most `tolerance` times the largest expected number, or times `min_scale` if that is larger."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    error, size = np.abs(actual - expected).max(initial=0), np.abs(expected).max(initial=0)
    assert error <= tolerance * max(size, min_scale), f"{name}: off by {error}, of {size}"


def test_number_of_models() -> None:
    assert len(TIMM) == 30
    assert len(TRANSFORMERS) == 20


@pytest.mark.parametrize("name", NAMES)
def test_values_and_batches(name: str) -> None:
    """In float32, under JAX with 32 bits. vmap over a batch equals a loop."""
    model, first, keywords = build_model(name)
    f, params = to_jax(model)
    with torch.no_grad():
        expected = first_result(model(first, **keywords))
    named = {key: arrays(value) for key, value in keywords.items()}
    run = jax.jit(lambda params, x, named: first_result(f(params, x, **named)))
    check(run(params, arrays(first), named), expected, 1e-3)

    def each(x: Array, named: dict[str, Array]) -> Array:
        return first_result(f(params, x[None], **{key: value[None] for key, value in named.items()}))[0]

    looped = np.stack([each(arrays(x), {key: value[i] for key, value in named.items()}) for i, x in enumerate(first)])
    check(jax.jit(jax.vmap(each))(arrays(first), named), looped, 1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_gradients(name: str) -> None:
    """In float64: in float32, gradients of networks with kinks are uncertain."""
    model, first, keywords = build_model(name)
    wide = torch.float32 if name in small_models.FLOAT32 else torch.float64
    model = model.to(wide)
    first = first.to(wide) if first.is_floating_point() else first
    keywords = {key: value.to(wide) if value.is_floating_point() else value for key, value in keywords.items()}
    with torch.no_grad():  # efficientformer's first call fills its caches, which are constants then
        model(first, **keywords)
    first_result(model(first, **keywords)).square().mean().backward()
    with jax.enable_x64(True):
        f, params = to_jax(model)
        named = {key: arrays(value) for key, value in keywords.items()}
        gradient = jax.jit(jax.grad(lambda params: jnp.square(first_result(f(params, arrays(first), **named))).mean()))(params)
        # After norms in float32, a change of the parameters by 1e-8 moves small gradients by 5e-7 of the largest one.
        tolerance, min_scale = (1e-3, 1e-3) if wide == torch.float32 else (5e-6, 1.0) if name in PARTLY_FLOAT32 else (1e-7, 1e-3)
        largest = max(float(parameter.grad.abs().max()) for parameter in model.parameters() if parameter.grad is not None)
        for key, parameter in model.named_parameters():
            expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            check(gradient[key] / largest, expected / largest, tolerance, key, min_scale)
