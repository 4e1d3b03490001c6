"""Ops that XLA's compiler for TPUs does not compile, by op and dtype.

The ops have lowerings, but the compiler ends the process, or refuses to compile the lowerings. So the ops count as ops without a lowering:
a compiled graph is split around them, and torch's kernels compute them on the CPU. The list was found with libtpu 0.0.42 for v5e. For all
other ops, XLA emulates float64.

complex128        the compiler ends the process at conversions from other dtypes, absolute values and quotients, and refuses Fourier
                  transforms. The exponential of a complex64 matrix is computed in complex128
SVD with vectors  the compiler ends the process for float32 while JAX's 64-bit types are enabled, as in all of dynaxla's programs; the
                  pseudoinverse needs such an SVD
LU in float64     "Only F32 and C64 types are implemented in LuDecomposition"
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from ...errors import UnsupportedOp
from ...torch_ops import aten
from ..graphs import describe_inputs, is_result_used, user_line

_BY_LU = frozenset([
    aten.linalg_lu_factor_ex.default, aten.linalg_lu.default, aten._linalg_solve_ex.default, aten.linalg_inv_ex.default,
    aten._linalg_det.default, aten._linalg_slogdet.default,
])  # fmt: skip


def _dtypes(nodes: Iterable[Node]) -> set[torch.dtype]:
    values = pytree.tree_leaves([node.meta.get("val") for node in nodes])
    return {value.dtype for value in values if isinstance(value, torch.Tensor)}


def _on_tpu(node: Node) -> bool:
    dtypes = _dtypes([node, *node.all_input_nodes])
    if torch.complex128 in dtypes:
        return True
    if node.target is aten.linalg_matrix_exp.default:
        return torch.complex64 in dtypes
    if node.target is aten._linalg_svd.default:
        return is_result_used(node, 0) or is_result_used(node, 2)
    if node.target is aten.linalg_pinv.atol_rtol_tensor:
        return not node.kwargs.get("hermitian", False)
    return node.target in _BY_LU and torch.float64 in dtypes


_UNCOMPILABLE: dict[str, Callable[[Node], bool]] = {"tpu": _on_tpu}


def is_uncompilable(node: Node, platform: str) -> bool:
    """True if XLA does not compile a node's lowering for a platform."""
    check = _UNCOMPILABLE.get(platform)
    return check is not None and check(node)


def uncompilable(node: Node, platform: str) -> UnsupportedOp:
    """Returns the error for a node whose lowering XLA does not compile for a platform, in a function for several platforms."""
    return UnsupportedOp(
        f"XLA cannot compile it for the platform {platform!r}",
        op=str(node.target),
        inputs=describe_inputs(node),
        where=user_line(node),
        hint=f"choose other platforms than {platform!r}",
    )
