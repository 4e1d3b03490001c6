"""Decompositions that keep Python floats that change from call to call, such as a scheduled learning rate, inputs of the graph.

TorchDynamo makes such a float a tensor of the graph, and PyTorch then rewrites the ops that read it, but only a few basic ones. At any
other op, it compiles the graph again for each new value. The decompositions here reduce the other ops, and the `_foreach` ops of
optimizers, to the basic ones. Calls without symbolic floats are not decomposed.

Source: torch.fx.passes._tensorify_python_scalars (SUPPORTED_OPS).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import SymFloat, Tensor
from torch._inductor import inductor_prims as inductor_prims  # defines prims.fma
from torch._ops import OpOverload
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND, elementwise_dtypes

from ..torch_ops import aten, present, prims

Decomposition = Callable[..., Any]


def _changes(values: Sequence[Any]) -> bool:
    return any(_changes(value) if isinstance(value, list | tuple) else isinstance(value, SymFloat) for value in values)


def _pointwise(formula: Callable[..., Tensor], *operands: Any) -> Tensor:
    """Evaluates a formula in the dtype in which eager mode's kernels compute, and rounds once."""
    kinds = [operand if isinstance(operand, Tensor) else 1.0 for operand in operands]
    wide, dtype = elementwise_dtypes(*kinds, type_promotion_kind=ELEMENTWISE_TYPE_PROMOTION_KIND.DEFAULT)
    return formula(*(operand.to(wide) if isinstance(operand, Tensor) else operand for operand in operands)).to(dtype)


def _tensor(number: Any, like: Tensor) -> Tensor:
    """Returns a number as a tensor of rank 0 in the dtype of `like`."""
    return torch.ones((), dtype=torch.float64, device=like.device).mul(number).to(like.dtype)


def _add(x: Tensor, y: Any, *, alpha: Any = 1) -> Tensor:
    if isinstance(alpha, SymFloat):
        return _pointwise(lambda x, y, alpha: x + y * alpha, x, y, alpha)
    return torch.add(x, y * alpha) if isinstance(y, SymFloat) and alpha != 1 else NotImplemented


def _sub(x: Tensor, y: Any, *, alpha: Any = 1) -> Tensor:
    if isinstance(alpha, SymFloat):
        return _pointwise(lambda x, y, alpha: x - y * alpha, x, y, alpha)
    return torch.sub(x, y * alpha) if isinstance(y, SymFloat) and alpha != 1 else NotImplemented


def _rsub(x: Tensor, y: Any, *, alpha: Any = 1) -> Tensor:
    return _sub(y, x, alpha=alpha) if isinstance(y, Tensor) else NotImplemented


def _addcmul(x: Tensor, y: Tensor, z: Tensor, *, value: Any = 1) -> Tensor:
    return _pointwise(lambda x, y, z, value: x + y * value * z, x, y, z, value) if _changes([value]) else NotImplemented


def _addr(x: Tensor, y: Tensor, z: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    if not _changes([beta, alpha]):
        return NotImplemented

    def rows(x: Tensor, y: Tensor, z: Tensor, beta: Any, alpha: Any) -> Tensor:
        """beta * x + alpha * outer(y, z). With beta = 0, x is ignored, even NaNs in it."""
        product = y * alpha * z
        if isinstance(beta, SymFloat):
            return torch.where(_tensor(beta, x) == 0, 0.0, x * beta) + product
        return product if beta == 0 else x * beta + product

    return _pointwise(rows, x, y[:, None], z, beta, alpha)


def _addcdiv(x: Tensor, y: Tensor, z: Tensor, *, value: Any = 1) -> Tensor:
    return _pointwise(lambda x, y, z, value: x + y * value / z, x, y, z, value) if _changes([value]) else NotImplemented


def _fma(x: Tensor, y: Any, z: Tensor) -> Tensor:
    return _pointwise(lambda x, y, z: x * y + z, x, y, z) if _changes([y]) else NotImplemented


def _lerp(x: Tensor, end: Tensor, weight: Any) -> Tensor:
    def formula(x: Tensor, end: Tensor, weight: Any) -> Tensor:
        return torch.lerp(x, end, _tensor(weight, x))

    return _pointwise(formula, x, end, weight) if _changes([weight]) else NotImplemented


def _pow(x: Any, exponent: Any) -> Tensor:
    def formula(x: Any, exponent: Any) -> Tensor:
        return torch.pow(_tensor(x, exponent), exponent) if isinstance(x, SymFloat) else torch.pow(x, _tensor(exponent, x))

    return _pointwise(formula, x, exponent) if _changes([x, exponent]) else NotImplemented


def _each(function: Callable[..., Tensor], keyword: str | None = None) -> Decomposition:
    """Returns a decomposition of a `_foreach` op that calls `function` for each tensor.

    keyword: the name of the op's last operand in `function`, if that takes it by keyword only.
    """

    def decomposition(*operands: Any, **keywords: Any) -> list[Tensor]:
        if not _changes([*operands, *keywords.values()]):
            return NotImplemented
        length = next(len(operand) for operand in operands if isinstance(operand, list | tuple))
        results = []
        for place in range(length):
            chosen = [operand[place] if isinstance(operand, list | tuple) else operand for operand in operands]
            named = {keyword: chosen.pop()} if keyword is not None and not isinstance(chosen[-1], Tensor) else {}
            results.append(function(*chosen, **named, **keywords))
        return results

    return decomposition


def _extreme(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, bound: _pointwise(lambda x, bound: function(x, _tensor(bound, x)), x, bound)


_FOREACH: dict[str, Decomposition] = {
    "_foreach_add": _each(torch.add),
    "_foreach_sub": _each(torch.sub),
    "_foreach_mul": _each(torch.mul),
    "_foreach_div": _each(torch.div),
    "_foreach_pow": _each(torch.pow),
    "_foreach_lerp": _each(torch.lerp),
    "_foreach_addcmul": _each(torch.addcmul, "value"),
    "_foreach_addcdiv": _each(torch.addcdiv, "value"),
    "_foreach_clamp_max": _each(_extreme(torch.minimum)),
    "_foreach_clamp_min": _each(_extreme(torch.maximum)),
    "_foreach_maximum": _each(_extreme(torch.maximum)),
    "_foreach_minimum": _each(_extreme(torch.minimum)),
}
_OVERLOADS = ("List", "Scalar", "ScalarList", "ScalarAndTensor")

_SINGLE: dict[OpOverload, Decomposition] = {
    aten.add.Tensor: _add,
    aten.sub.Tensor: _sub,
    aten.rsub.Tensor: _rsub,
    aten.addcmul.default: _addcmul,
    aten.addcdiv.default: _addcdiv,
    aten.addr.default: _addr,
    aten.lerp.Scalar: _lerp,
    aten.pow.Scalar: _pow,
    aten.pow.Tensor_Scalar: _pow,
}

_ALL: dict[Any, Decomposition] = _SINGLE | {
    getattr(getattr(aten, name), overload): decomposition for name, decomposition in _FOREACH.items() for overload in _OVERLOADS
}
_ALL[prims.fma.default] = _fma  # TorchDynamo decomposes addcmul_ and addcdiv_ to it
DECOMPOSITIONS: dict[OpOverload, Decomposition] = present(_ALL)
