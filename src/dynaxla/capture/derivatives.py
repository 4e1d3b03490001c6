"""Derivatives of products, where eager mode looks at the values to take a shorter way: no zeros are the usual case.

A graph cannot look. PyTorch's formulas for graphs serve all values by several scans of all numbers, and take two to four times eager mode's
time. In these here, a zero costs a comparison. Where there are both zeros and infinities, an infinity's own gradient is NaN, as eager
mode's is where there are no zeros, and so may that of the first zero of a running product be.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from ..runtime import private


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int | None, keepdim: bool) -> torch.Tensor:
        result = x.prod() if dim is None else x.prod(dim, keepdim)
        ctx.save_for_backward(x, result)
        ctx.dim, ctx.keepdim = dim, keepdim
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, result = ctx.saved_tensors
        dims = list(range(x.ndim)) if ctx.dim is None else [ctx.dim]
        if ctx.dim is not None and not ctx.keepdim and x.ndim:
            grad, result = grad.unsqueeze(ctx.dim), result.unsqueeze(ctx.dim)
        is_zero = x == 0
        zeros = is_zero.sum(dims, keepdim=True)
        others = torch.where(is_zero, 1, x)
        others = others.prod() if ctx.dim is None else others.prod(ctx.dim, keepdim=True)
        # Beside a zero it is zero, or NaN if the product is, which an infinity makes of a zero.
        elsewhere = torch.where(zeros == 0, grad * (result / x), grad * result)
        found = torch.where(is_zero, torch.where(zeros == 1, grad * others, grad * result), elsewhere)
        return (found if ctx.dim is not None else torch.where(zeros > 1, 0, found)), None, None


class _RunningProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int) -> torch.Tensor:
        result = x.cumprod(dim)
        ctx.save_for_backward(x, result)
        ctx.dim = dim
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, result = ctx.saved_tensors
        dim, size = ctx.dim, x.shape[ctx.dim]
        shape = [1] * x.ndim
        shape[dim] = size
        places = torch.arange(size, dtype=torch.int32, device=x.device).view(shape)
        first = torch.where(x == 0, places, size).amin(dim, keepdim=True)  # the place of the first zero
        is_before, is_first = places < first, places == first
        sums = torch.where(is_before, result * grad, 0).flip(dim).cumsum(dim).flip(dim)
        without = torch.where(is_first, 1, x).cumprod(dim)
        at_first = torch.where(is_before, 0, without * grad).sum(dim, keepdim=True)
        return torch.where(is_before, sums / x, torch.where(is_first, at_first, 0)), None


def prod(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """torch.prod, or the method. function: what was called."""
    given = dict(zip(("input", "dim", "keepdim"), args, strict=False)) | kwargs
    if not given.keys() <= {"input", "dim", "keepdim"} or not _is_differentiated(given["input"]):
        return function(*args, **kwargs)
    return _Product.apply(given["input"], given.get("dim"), given.get("keepdim", False))


def cumprod(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """torch.cumprod, or the method. function: what was called."""
    given = dict(zip(("input", "dim"), args, strict=False)) | kwargs
    if given.keys() != {"input", "dim"} or not _is_differentiated(given["input"]) or not given["input"].ndim:
        return function(*args, **kwargs)
    return _RunningProduct.apply(given["input"], given["dim"])


def _is_differentiated(x: torch.Tensor) -> bool:
    """Backward, once, and by nothing but autograd; real numbers."""
    wanted = torch.is_grad_enabled() and x.requires_grad and x.is_floating_point()
    return wanted and private.functorch_level() is None and forward_ad.unpack_dual(x).tangent is None
