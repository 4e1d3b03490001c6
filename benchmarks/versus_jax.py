"""`python -m benchmarks cpu interop`: functions of `dynaxla.to_jax` against the same mathematics in JAX, both under `jax.jit`.

Both functions take the same parameters in torch's layout (images NCHW, weights as in `nn.Linear` and `nn.Conv2d`). The benchmark measures
inference, and the gradient of a loss with respect to all parameters. The functions run in turn, so that other load affects both.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import numpy as np
import torch
from jax import Array, lax
from jax import numpy as jnp
from torch import nn

from dynaxla.bench.benchmark_error import BenchmarkError
from dynaxla.bench.suites import import_package
from dynaxla.interop import to_jax

from . import tables

Params = Mapping[str, Array]
LIMIT = 1.05
_ROUNDS = 15


def mlp(p: Params, x: Array) -> Array:
    for number in (0, 2):
        x = jax.nn.relu(_linear(p, str(number), x))
    return _linear(p, "4", x)


def resnet18(p: Params, x: Array) -> Array:
    x = jax.nn.relu(_norm(p, "bn1", _convolution(p, "conv1", x, 2, 3)))
    x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, 3, 3), (1, 1, 2, 2), ((0, 0), (0, 0), (1, 1), (1, 1)))
    for layer in range(1, 5):
        for block in range(2):
            name, stride = f"layer{layer}.{block}", 2 if layer > 1 and block == 0 else 1
            out = jax.nn.relu(_norm(p, f"{name}.bn1", _convolution(p, f"{name}.conv1", x, stride, 1)))
            out = _norm(p, f"{name}.bn2", _convolution(p, f"{name}.conv2", out, 1, 1))
            if f"{name}.downsample.0.weight" in p:
                x = _norm(p, f"{name}.downsample.1", _convolution(p, f"{name}.downsample.0", x, stride, 0))
            x = jax.nn.relu(out + x)
    return _linear(p, "fc", x.mean((2, 3)))


def gpt_block(p: Params, x: Array) -> Array:
    batch, count, width = x.shape
    query, key, value = jnp.split(_linear(p, "attention", _layer_norm(p, "first", x)), 3, -1)
    query, key, value = (item.reshape(batch, count, HEADS, -1).transpose(0, 2, 1, 3) for item in (query, key, value))
    scores = query @ key.swapaxes(-1, -2) / np.sqrt(width // HEADS).astype(np.float32)
    weights = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((count, count), bool)), scores, -jnp.inf))
    x = x + _linear(p, "joined", (weights @ value).transpose(0, 2, 1, 3).reshape(x.shape))
    return x + _linear(p, "narrow", jax.nn.gelu(_linear(p, "wide", _layer_norm(p, "second", x))))


def _linear(p: Params, name: str, x: Array) -> Array:
    return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]


def _convolution(p: Params, name: str, x: Array, stride: int, padding: int) -> Array:
    return lax.conv_general_dilated(x, p[f"{name}.weight"], (stride, stride), [(padding, padding)] * 2)


def _norm(p: Params, name: str, x: Array) -> Array:
    factor = p[f"{name}.weight"] * lax.rsqrt(p[f"{name}.running_var"] + 1e-5)
    shift = p[f"{name}.bias"] - p[f"{name}.running_mean"] * factor
    return x * factor[:, None, None] + shift[:, None, None]


def _layer_norm(p: Params, name: str, x: Array) -> Array:
    centered = x - x.mean(-1, keepdims=True)
    variance = (centered**2).mean(-1, keepdims=True)
    return centered * lax.rsqrt(variance + 1e-5) * p[f"{name}.weight"] + p[f"{name}.bias"]


HEADS, WIDTH = 4, 256


class Block(nn.Module):
    """A GPT-2 block."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.joined = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        split = [item.unflatten(-1, (HEADS, -1)).transpose(1, 2) for item in self.attention(self.first(x)).chunk(3, -1)]
        attended = nn.functional.scaled_dot_product_attention(*split, is_causal=True)
        x = x + self.joined(attended.transpose(1, 2).flatten(2))
        return x + self.narrow(nn.functional.gelu(self.wide(self.second(x)), approximate="tanh"))


@dataclass(frozen=True)
class Case:
    """A model, and the same computation written in JAX.

    Attributes:
        build: creates the torch model.
        by_hand: the JAX function of parameters and buffers, and an input.
        shape: the input's shape.
    """

    build: Callable[[], nn.Module]
    by_hand: Callable[[Params, Array], Array]
    shape: tuple[int, ...]


def _perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))


CASES = {
    "mlp": Case(_perceptron, mlp, (64, 512)),
    "resnet18": Case(lambda: import_package("torchvision").models.resnet18(), resnet18, (2, 3, 224, 224)),
    "gpt_block": Case(Block, gpt_block, (4, 128, WIDTH)),
}


@dataclass(frozen=True)
class Measured:
    """The times of the two functions, and the difference between their results.

    Attributes:
        by_hand: median milliseconds of the function written in JAX.
        to_jax: median milliseconds of the function from `to_jax`.
        ratio: to_jax over by_hand, the median over the rounds.
        distance: the largest difference between the two results, relative to the largest number in them.
    """

    by_hand: float
    to_jax: float
    ratio: float
    distance: float


def runs(names: Sequence[str], seconds: float) -> dict[str, dict[str, Any]]:
    """Returns the fields of `Measured` by case and kind ("inference", "gradient"). Without names, all cases. Raises: BenchmarkError."""
    unknown = sorted({*names} - CASES.keys())
    if unknown:
        raise BenchmarkError(f"no model {', '.join(map(repr, unknown))} written by hand in JAX; the valid names are: {', '.join(CASES)}")
    return {name: measure(case, seconds) for name, case in CASES.items() if not names or name in names}


def measure(case: Case, seconds: float) -> dict[str, Any]:
    """Measures a case; returns the fields of `Measured` by kind. Each function is timed for about `seconds`."""
    torch.manual_seed(0)
    model = case.build().eval()
    jax_fn, params = to_jax(model)
    x = jnp.asarray(np.random.default_rng(0).standard_normal(case.shape, np.float32))
    buffers = jax_fn.buffers

    def by_hand(params: Params, x: Array) -> Array:
        return case.by_hand({**params, **buffers}, x)

    found = {}
    for kind, change in (("inference", lambda f: f), ("gradient", _gradient)):
        found[kind] = asdict(_compared(jax.jit(change(by_hand)), jax.jit(change(jax_fn)), (params, x), seconds))
    return found


def _gradient(function: Callable[..., Array]) -> Callable[..., Any]:
    return jax.grad(lambda params, x: (function(params, x) ** 2).mean())


def _compared(first: Any, second: Any, operands: Any, seconds: float) -> Measured:
    results = [[np.asarray(leaf) for leaf in jax.tree.leaves(run(*operands))] for run in (first, second)]
    largest = max(float(np.abs(leaf).max()) for leaf in results[0])
    distance = max(float(np.abs(mine - theirs).max()) for mine, theirs in zip(*results, strict=True)) / largest
    calls = max(1, int(seconds / _ROUNDS / max(_timed(first, operands, 1), 1e-9)))
    times = [(_timed(first, operands, calls), _timed(second, operands, calls)) for _ in range(_ROUNDS)]
    by_hand, to_jax = (statistics.median(column) * 1e3 for column in zip(*times, strict=True))
    return Measured(by_hand, to_jax, statistics.median(mine / theirs for theirs, mine in times), distance)


def _timed(run: Any, operands: Any, calls: int) -> float:
    """Returns the mean seconds of a call."""
    start = time.perf_counter()
    for _ in range(calls):
        jax.block_until_ready(run(*operands))
    return (time.perf_counter() - start) / calls


def is_good(found: Mapping[str, Mapping[str, Mapping[str, float]]]) -> bool:
    """True if both functions give the same results. `found` is a result of `runs`."""
    return all(item["distance"] < 1e-3 for kinds in found.values() for item in kinds.values())


def table(found: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[str]:
    """Returns lines of Markdown. `found` is a result of `runs`."""
    lines = [
        "Milliseconds of functions made by `dynaxla.to_jax`, and of the same mathematics written in JAX by hand",
        "(`benchmarks/versus_jax.py`). Both run under `jax.jit`, and take turns in one process. *to_jax / by hand*: the median of the",
        f"ratios of all rounds; the goal is at most {LIMIT}. *Distance*: the largest difference between the two results, divided by the",
        "largest number in them.",
        "",
        *tables.heading(["model", "", "by hand", "to_jax", "to_jax / by hand", "distance"]),
    ]
    for name, kinds in found.items():
        for kind, item in kinds.items():
            numbers = [f"{item['by_hand']:.3f}", f"{item['to_jax']:.3f}", f"{item['ratio']:.2f}", f"{item['distance']:.0e}"]
            lines.append(tables.line([name, kind, *numbers]))
    return lines
