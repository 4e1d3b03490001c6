"""What a lowering may ask besides its arguments."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import torch
from jax import lax
from jax import numpy as jnp

from . import dtypes
from .cpu.folding import sum_neighbours
from .dtypes import DType
from .eager import eager_on
from .forms import Choice


@dataclass(frozen=True)
class TensorSpec:
    """A tensor's metadata with concrete numbers.

    Attributes: shape; stride (in elements); dtype (torch's); device; offset (storage offset in elements).
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    offset: int = 0

    @property
    def jax_dtype(self) -> DType:
        return dtypes.to_jax(self.dtype)

    @property
    def order(self) -> tuple[int, ...]:
        """The dimensions from the slowest in memory to the fastest."""
        return tuple(sorted(range(len(self.shape)), key=lambda dim: -self.stride[dim]))

    def __str__(self) -> str:
        return dtypes.describe(self.dtype, self.shape)


class SymbolValues:
    """Concrete values for the symbols, or whole expressions of symbols, of a graph with dynamic shapes."""

    def __init__(self, values: Mapping[Any, int] | None = None) -> None:
        self.values = dict(values or {})
        self._expressions: dict[Any, int] = dict(self.values)

    def integer(self, value: int | torch.SymInt) -> int:
        """The value of a size, stride or offset."""
        if isinstance(value, int):
            return value
        expression = value.node.expr
        if (known := self._expressions.get(expression)) is None:
            known = self._expressions[expression] = int(expression.xreplace(self.values))
        return known

    def spec(self, fake: torch.Tensor) -> TensorSpec:
        """The concrete metadata of a fake tensor."""
        integer = self.integer
        return TensorSpec(
            tuple(map(integer, fake.shape)),
            tuple(map(integer, fake.stride())) if fake.layout == torch.strided else (),
            fake.dtype,
            fake.device,
            integer(fake.storage_offset()) if fake.layout == torch.strided else 0,
        )


@dataclass(frozen=True)
class Settings:
    """The settings of PyTorch that change what a program computes. They are part of every executable's key.

    Attributes: matmul_tf32, convolution_tf32 (whether float32 products may be rounded to TF32; CUDA only).
    """

    matmul_tf32: bool = False
    convolution_tf32: bool = False

    @staticmethod
    def current(platform: str) -> Settings:
        if platform != "cuda":
            return _EXACT
        return Settings(torch.get_float32_matmul_precision() != "highest", torch.backends.cudnn.allow_tf32)


_EXACT = Settings()

aten = torch.ops.aten

# Views of the same numbers, at most with dimensions exchanged.
_TRANSPOSES = (aten.permute.default, aten.t.default, aten.transpose.int, aten.alias.default, aten.detach.default)


@partial(jax.tree_util.register_dataclass, data_fields=["condition"], meta_fields=["error", "message"])
@dataclass(frozen=True)
class Check:
    """What must hold while a program runs: condition (bool[]), and the exception that is raised if it does not. A pytree."""

    condition: jax.Array
    error: type[Exception]
    message: str

    @staticmethod
    def first_failed(checks: Sequence[Check]) -> jax.Array:
        """In a program: the index of the first check that does not hold, or their number. int32[]."""
        code = jnp.int32(len(checks))
        for index, check in reversed(list(enumerate(checks))):
            code = lax.select(check.condition, code, jnp.int32(index))
        return code


class Context:
    """Passed to lowerings that have a `ctx` parameter. One lives as long as one trace.

    Attributes: platform ("cpu", "cuda", "rocm", "tpu"); eager (what ATen's kernels do there); settings; choose (the form for a problem:
    see forms.py); node (the FX node being lowered); values (of the nodes so far); checks (what the program verifies while it runs);
    kernels (what it calls of torch's: node and arguments that are no tensors); claimed (see `claim`); turn (what the next kernel with an
    effect waits for); reorders (whether cpu/transposes.py will see the traced program, and change how arrays lie in memory).
    """

    def __init__(
        self,
        platform: str,
        settings: Settings = _EXACT,
        symbols: SymbolValues | None = None,
        key: jax.Array | None = None,
        choose: Choice | None = None,
        reorders: bool = False,
    ) -> None:
        self.platform = platform
        self.eager = eager_on(platform)
        self.reorders = reorders
        self.settings = settings
        self.choose = choose or (lambda forms, problem: forms.choose(problem, {}))
        self.node: torch.fx.Node
        self.values: dict[torch.fx.Node, Any] = {}
        self.checks: list[Check] = []
        self.kernels: list[tuple[str, Any]] = []
        self.claimed: dict[torch.fx.Node, jax.Array | None] = {}
        self.turn: jax.Array | None = None
        self._symbols = symbols or SymbolValues()
        self._key = key
        self._keys_given = 0

    def key(self) -> jax.Array:
        """A fresh JAX PRNG key, different for each random op of the graph and for each call of the program."""
        assert self._key is not None, f"{self.node.target} draws random numbers but lacks torch.Tag.nondeterministic_seeded"
        self._keys_given += 1
        return jax.random.fold_in(self._key, self._keys_given)

    def sum(self, x: jax.Array, dims: Sequence[int]) -> jax.Array:
        """The sum over dims, which disappear. Where arrays may lie in another order, cpu/transposes.py chooses how."""
        return lax.reduce_sum(x, tuple(dims)) if self.reorders else sum_neighbours(x, tuple(dims))

    def nested(self, key: jax.Array | None) -> Context:
        """For a graph that a control-flow op calls: with values and checks of its own, and this key for its random numbers."""
        inner = copy.copy(self)
        inner.values, inner.checks, inner.claimed, inner.turn = {}, [], {}, None
        inner._key, inner._keys_given = key, 0
        return inner

    @property
    def output(self) -> Any:
        """Metadata of the current node's result: a TensorSpec, or a tuple of them (None where the op returns None)."""
        return self._specs(self.node.meta["val"])

    def input(self, index: int) -> Any:
        """Metadata of the current node's positional argument: a TensorSpec, a list of them, or None."""
        return torch.fx.node.map_arg(self.node.args[index], lambda node: self._specs(node.meta["val"]))

    def spec_of(self, argument: Any) -> Any:
        """Metadata of an argument of the current node: a TensorSpec for a tensor, a number for a size, else the argument itself."""
        return self._specs(argument.meta.get("val")) if isinstance(argument, torch.fx.Node) else argument

    def claim(self, node: torch.fx.Node, value: jax.Array, passed: Sequence[torch.fx.Node]) -> None:
        """A later node's value is known already, and of those in `passed`, which only lead to it, none is needed."""
        self.claimed[node] = value
        self.claimed.update(dict.fromkeys(passed))

    def order_of(self, value: jax.Array) -> tuple[int, ...] | None:
        """The dimensions of an argument of the current node, from the slowest in eager's memory to the fastest; None of other values."""
        for argument in self.node.args:
            if isinstance(argument, torch.fx.Node) and self.values.get(argument) is value:
                return self.spec(argument).order
        return None

    def spec(self, node: torch.fx.Node) -> Any:
        """Metadata of any node's result."""
        return self._specs(node.meta["val"])

    def require(self, condition: jax.Array, error: type[Exception], message: str) -> None:
        """The call of the program raises error(message) unless all of `condition` is true, and nothing is mutated then.

        On a GPU, where looking would mean waiting, a later call raises it, as CUDA's own assertions do.
        """
        self.checks.append(Check(lax.reduce_and(condition, tuple(range(condition.ndim))), error, message))

    def untransposed(self, index: int, value: jax.Array) -> tuple[jax.Array, tuple[int, ...]]:
        """The current node's positional argument `value` as it was before the transposes that made it, if any did, and where each of
        its dimensions lies there. A contraction over the original's dimensions needs no transpose at all."""
        node, places = self.node.args[index], list(range(value.ndim))
        while isinstance(node, torch.fx.Node) and node.target in _TRANSPOSES:
            source = self.values[node.args[0]]
            order = list(range(source.ndim))
            if node.target is aten.permute.default:
                order = [dim % source.ndim for dim in node.args[1]]
            elif node.target in (aten.t.default, aten.transpose.int) and source.ndim > 1:
                first, second = node.args[1:] or (0, 1)
                order[first], order[second] = order[second], order[first]
            node, value, places = node.args[0], source, [order[place] for place in places]
        return value, tuple(places)

    def _specs(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._symbols.spec(value)
        if isinstance(value, (tuple, list)):
            return tuple(self._specs(item) for item in value)
        if isinstance(value, torch.SymInt):
            return self._symbols.integer(value)
        return value

    @property
    def matmul_precision(self) -> lax.Precision:
        """For dots: float32 products keep PyTorch's precision, whatever XLA's default is."""
        return lax.Precision.DEFAULT if self.settings.matmul_tf32 else lax.Precision.HIGHEST

    @property
    def convolution_precision(self) -> lax.Precision:
        return lax.Precision.DEFAULT if self.settings.convolution_tf32 else lax.Precision.HIGHEST
