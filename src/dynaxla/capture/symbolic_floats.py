"""Decompositions for Python floats that change from call to call, such as a scheduled learning rate: such a float stays a graph input.

TorchDynamo passes such a float to the graph as a tensor, and the graph reads a symbolic float from the tensor. PyTorch rewrites a few basic
ops with symbolic floats to ops with tensors. If any other op takes a symbolic float, PyTorch compiles the graph again for each new value.
The decompositions here reduce such ops, and the `_foreach` ops of optimizers, to the basic ops. Calls without symbolic floats are not
decomposed.

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

from ..torch_ops import aten, prims, without_missing_ops

Decomposition = Callable[..., Any]


def _has_symbolic_float(values: Sequence[Any]) -> bool:
    """True if a symbolic float is among some values, or in their lists and tuples."""
    return any(_has_symbolic_float(value) if isinstance(value, list | tuple) else isinstance(value, SymFloat) for value in values)


def _takes_float(number: Any, *operands: Any) -> bool:
    """True for a symbolic float, if a tensor of the operands has a dtype of floats.

    Eager mode truncates or refuses a float with other tensors, so it stays a constant of the graph.
    """
    tensors = [operand for operand in operands if isinstance(operand, Tensor)]
    return isinstance(number, SymFloat) and any(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors)


def _pointwise(formula: Callable[..., Tensor], *operands: Any) -> Tensor:
    """Evaluates a formula in the dtype in which eager mode's kernels compute, and rounds the result once. operands: tensors and numbers."""
    dtype_operands = [operand if isinstance(operand, Tensor) else 1.0 for operand in operands]
    compute_dtype, dtype = elementwise_dtypes(*dtype_operands, type_promotion_kind=ELEMENTWISE_TYPE_PROMOTION_KIND.DEFAULT)
    return formula(*(operand.to(compute_dtype) if isinstance(operand, Tensor) else operand for operand in operands)).to(dtype)


def _scalar_tensor(number: Any, like: Tensor) -> Tensor:
    """Returns a number as a tensor of rank 0 with the dtype and device of `like`."""
    return torch.ones((), dtype=torch.float64, device=like.device).mul(number).to(like.dtype)


def _add(x: Tensor, y: Any, *, alpha: Any = 1) -> Tensor:
    if _takes_float(alpha, x, y):
        return _pointwise(lambda x, y, alpha: x + y * alpha, x, y, alpha)
    return torch.add(x, y * alpha) if isinstance(y, SymFloat) and alpha != 1 else NotImplemented


def _sub(x: Tensor, y: Any, *, alpha: Any = 1) -> Tensor:
    if _takes_float(alpha, x, y):
        return _pointwise(lambda x, y, alpha: x - y * alpha, x, y, alpha)
    return torch.sub(x, y * alpha) if isinstance(y, SymFloat) and alpha != 1 else NotImplemented


def _rsub(x: Tensor, y: Any, *, alpha: Any = 1) -> Tensor:
    return _sub(y, x, alpha=alpha) if isinstance(y, Tensor) else NotImplemented


def _addcmul(x: Tensor, y: Tensor, z: Tensor, *, value: Any = 1) -> Tensor:
    return _pointwise(lambda x, y, z, value: x + y * value * z, x, y, z, value) if _takes_float(value, x, y, z) else NotImplemented


def _addr(x: Tensor, y: Tensor, z: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    if not (_takes_float(beta, x, y, z) or _takes_float(alpha, x, y, z)):
        return NotImplemented

    def formula(x: Tensor, y: Tensor, z: Tensor, beta: Any, alpha: Any) -> Tensor:
        """Returns beta * x + alpha * outer(y, z). With beta = 0, x is ignored, even if x has NaNs."""
        product = y * alpha * z
        if isinstance(beta, SymFloat):
            return torch.where(_scalar_tensor(beta, x) == 0, 0.0, x * beta) + product
        return product if beta == 0 else x * beta + product

    return _pointwise(formula, x, y[:, None], z, beta, alpha)


def _addcdiv(x: Tensor, y: Tensor, z: Tensor, *, value: Any = 1) -> Tensor:
    return _pointwise(lambda x, y, z, value: x + y * value / z, x, y, z, value) if _has_symbolic_float([value]) else NotImplemented


def _fma(x: Tensor, y: Any, z: Tensor) -> Tensor:
    return _pointwise(lambda x, y, z: x * y + z, x, y, z) if _has_symbolic_float([y]) else NotImplemented


def _lerp(x: Tensor, end: Tensor, weight: Any) -> Tensor:
    def formula(x: Tensor, end: Tensor, weight: Any) -> Tensor:
        return torch.lerp(x, end, _scalar_tensor(weight, x))

    return _pointwise(formula, x, end, weight) if _takes_float(weight, x) else NotImplemented


def _pow(x: Any, exponent: Any) -> Tensor:
    def formula(x: Any, exponent: Any) -> Tensor:
        return torch.pow(_scalar_tensor(x, exponent), exponent) if isinstance(x, SymFloat) else torch.pow(x, _scalar_tensor(exponent, x))

    return _pointwise(formula, x, exponent) if _has_symbolic_float([x, exponent]) else NotImplemented


def _for_each_tensor(function: Callable[..., Tensor], keyword: str | None = None) -> Decomposition:
    """Returns a decomposition of a `_foreach` op that calls `function` for each tensor.

    keyword: the name of the argument of `function` for the op's last operand; None to pass this operand by position.
    """

    def decomposition(*operands: Any, **keywords: Any) -> list[Tensor]:
        if not _has_symbolic_float([*operands, *keywords.values()]):
            return NotImplemented
        length = next(len(operand) for operand in operands if isinstance(operand, list | tuple))
        results = []
        for index in range(length):
            call_operands = [operand[index] if isinstance(operand, list | tuple) else operand for operand in operands]
            call_keywords = {keyword: call_operands.pop()} if keyword is not None and not isinstance(call_operands[-1], Tensor) else {}
            results.append(function(*call_operands, **call_keywords, **keywords))
        return results

    return decomposition


def _with_tensor_bound(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Returns a function like `function` (minimum or maximum) that takes a number as its second operand."""
    return lambda x, bound: _pointwise(lambda x, bound: function(x, _scalar_tensor(bound, x)), x, bound)


_FOREACH: dict[str, Decomposition] = {
    "_foreach_add": _for_each_tensor(torch.add),
    "_foreach_sub": _for_each_tensor(torch.sub),
    "_foreach_mul": _for_each_tensor(torch.mul),
    "_foreach_div": _for_each_tensor(torch.div),
    "_foreach_pow": _for_each_tensor(torch.pow),
    "_foreach_lerp": _for_each_tensor(torch.lerp),
    "_foreach_addcmul": _for_each_tensor(torch.addcmul, "value"),
    "_foreach_addcdiv": _for_each_tensor(torch.addcdiv, "value"),
    "_foreach_clamp_max": _for_each_tensor(_with_tensor_bound(torch.minimum)),
    "_foreach_clamp_min": _for_each_tensor(_with_tensor_bound(torch.maximum)),
    "_foreach_maximum": _for_each_tensor(_with_tensor_bound(torch.maximum)),
    "_foreach_minimum": _for_each_tensor(_with_tensor_bound(torch.minimum)),
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
DECOMPOSITIONS: dict[OpOverload, Decomposition] = without_missing_ops(_ALL)
