"""Finds graphs in which XLA has nothing to fuse: the operands of each op are graph inputs, and its results are graph outputs.

XLA's program for such a graph calls torch's kernels, or has one loop for each op. XLA writes the results of loops to freshly allocated
memory, which is not in the cache: an addition of a million elements takes twice as long as in torch. So torch runs such a graph, unless
XLA's loops are fast enough to make up for the allocation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.fx import Node

from ...runtime.layout import Layout
from ...torch_ops import aten
from ..context import Context
from ..graphs import is_result_used, is_view
from ..implementations import Implementations
from ..interpreter import is_plain_python
from ..metadata import TensorSpec
from .faster_kernels import KERNEL, kernel_call
from .inplace_updates import slice_write_of
from .measurements import FASTER_BY_TORCH_IN_HALVES, FASTER_BY_XLA, LARGE, MIN_RUN_ELEMENTS

# Matrix products: _MULTIPLICATIONS_PER_ELEMENT multiplications take as long as one element of an elementwise op. XLA computes batches of
# matrices with at most _MAX_TERM_BY_TERM_SIDE rows and columns term by term. Matrices with at most _MAX_SMALL_SIDE rows and columns are
# small. Factorizations count as products of a matrix with itself.
_PRODUCTS = (aten.mm.default, aten.bmm.default)
_MULTIPLICATIONS_PER_ELEMENT = 4
_MAX_TERM_BY_TERM_SIDE, _MAX_SMALL_SIDE = 8, 32
_FACTORIZATIONS = (
    aten._linalg_eigh.default,
    aten._linalg_svd.default,
    aten.cholesky_inverse.default,
    aten.linalg_eig.default,
    aten.linalg_lu_factor_ex.default,
    aten.linalg_qr.default,
)
# Ops that return eigenvalues and eigenvectors. If a graph uses only the eigenvalues, their lowerings compute no vectors.
_EIGENDECOMPOSITIONS = (aten._linalg_eigh.default, aten.linalg_eig.default)

# Ops that XLA fuses neither with their operands nor with each other: a graph may chain them and still have nothing to fuse.
_UNFUSED = (
    *_PRODUCTS,
    *_FACTORIZATIONS,
    aten._cdist_backward.default,
    aten._cdist_forward.default,
    aten.addmm.default,
    aten.addmv.default,
    aten.clone.default,
    aten.mv.default,
)

# Copies. Torch copies a view fast, also an expanded one, if the view consists of contiguous runs.
_COPIES = (aten.clone.default, aten._to_copy.default)

_SUMS = (aten.mean.default, aten.mean.dim, aten.prod.default, aten.prod.dim_int, aten.sum.default, aten.sum.dim_IntList)

# Ops with optional results: maxima with their indices, singular values with their vectors. XLA is faster if the graph uses one result only.
_WITH_OPTIONAL_RESULTS = (aten._linalg_svd.default, aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default)


@dataclass(frozen=True)
class UnfusableOp:
    """An op that can be fused with no other op of its graph.

    Attributes:
        op: The overload.
        work: The number of elements of the largest tensor, or the equivalent amount of work.
        is_read_fast: True if torch reads the operands fast: all are dense or consist of long runs that the op accepts, or the op is a copy
            of runs.
        matrix_size: The longest of the last two dimensions of the first operand.
        dtype: The dtype of the first operand.
        used_results: The number of results that the graph uses.
    """

    op: torch._ops.OpOverload
    work: int
    is_read_fast: bool
    matrix_size: int
    dtype: torch.dtype
    used_results: int


@dataclass(frozen=True)
class UnfusableGraph:
    """A graph without anything to fuse.

    Attributes:
        ops: The ops, without constants and without the ops that `kernels` counts.
        kernels: The number of ops for which torch's kernel is chosen (faster_kernels.py).
        platform: JAX's name of the platform.
    """

    ops: tuple[UnfusableOp, ...]
    kernels: int
    platform: str

    def __str__(self) -> str:
        return "nothing to fuse: " + (", ".join(f"{op.op} of {op.work} elements" for op in self.ops) or "torch's kernels alone")


GRAPH: Implementations[UnfusableGraph] = Implementations("graph")


def _prefers_torch(problem: UnfusableGraph) -> bool:
    """True if torch is expected to run the graph faster than XLA.

    Torch takes microseconds for each small op. So small ops must not outnumber the large ops and the calls of torch's kernels.
    """
    large = [op for op in problem.ops if op.work >= LARGE]
    small = len(problem.ops) - len(large)
    return len(large) + problem.kernels >= small and all(op.is_read_fast and not _is_faster_by_xla(op) for op in large)


def _is_faster_by_xla(op: UnfusableOp) -> bool:
    """True if XLA's loops for the op are faster than torch's kernel.

    Loops for products of small matrices are slower, because XLA computes the matrices of a batch one by one.
    """
    is_small_product = op.op in _PRODUCTS and _MAX_TERM_BY_TERM_SIDE < op.matrix_size <= _MAX_SMALL_SIDE
    is_slower_in_halves = op.op in FASTER_BY_TORCH_IN_HALVES and op.dtype.itemsize == 2
    uses_optional_results = op.op in _WITH_OPTIONAL_RESULTS and op.used_results > 1
    return op.op in FASTER_BY_XLA and not (is_small_product or is_slower_in_halves or uses_optional_results)


@GRAPH.implementation("torch", platforms=["cpu"], preferred=_prefers_torch)
def _by_torch() -> bool:
    return True


@GRAPH.implementation("xla")
def _by_xla() -> bool:
    return False


def is_for_torch(nodes: Iterable[Node], ctx: Context) -> bool:
    """True if torch's kernels should compute these nodes of a graph, given in their order.

    `ctx` supplies sizes and the choice of implementations.
    """
    unfused: dict[Node, UnfusableOp] = {}
    computed = [node for node in nodes if node.op == "call_function" and not _is_free(node)]
    updates = {node: update for node in computed if (update := slice_write_of(node)) is not None}
    update_results = {update.result for update in updates.values()}
    kernels = 0
    for node in computed:
        if node in update_results:  # the update of a slice counts as one op, which the node that writes the slice back stands for
            continue
        ctx.node = node
        if (problem := kernel_call(node, ctx)) is not None and ctx.choose(KERNEL, problem).name == "torch":
            kernels += 1
            continue
        if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace != "aten" or node.target._schema.is_mutable:
            return False
        if node.target in _EIGENDECOMPOSITIONS and not is_result_used(node, 1):
            return False
        operands = updates[node].operands if node in updates else node.all_input_nodes
        if not _is_constant(node):
            computed_before = [origin for origin in map(_origin, operands) if origin in unfused]
            if any(item.target not in _UNFUSED for item in (node, *computed_before)) and computed_before:
                return False
            unfused[node] = _unfusable_op(node.target, operands, ctx)
    return bool(computed) and ctx.choose(GRAPH, UnfusableGraph(tuple(unfused.values()), kernels, ctx.platform)).run()


def _is_free(node: Node) -> bool:
    """True for nodes that take torch no time: views, arithmetic on sizes, selections of one of an op's results."""
    return is_view(node) or node.target is aten._unsafe_view.default or is_plain_python(node)


def _is_constant(node: Node) -> bool:
    """True for ops that create a tensor from sizes or from another tensor's metadata."""
    assert isinstance(node.target, torch._ops.OpOverload)
    name = node.target._schema.name
    return not node.all_input_nodes or name.startswith("aten::new_") or name.endswith("_like")


def _origin(node: Node) -> Node:
    """Returns the node that computes a value: the source of its views and of selections of one of an op's results."""
    while node.op == "call_function" and _is_free(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _unfusable_op(op: torch._ops.OpOverload, operand_nodes: Iterable[Node], ctx: Context) -> UnfusableOp:
    """Returns the description of the current node, which calls `op` and reads `operand_nodes`."""
    operands = [spec for spec in map(ctx.spec, operand_nodes) if isinstance(spec, TensorSpec)]
    results = [spec for spec in (ctx.output if isinstance(ctx.output, tuple) else (ctx.output,)) if isinstance(spec, TensorSpec)]
    work = max((math.prod(spec.shape) for spec in (*operands, *results)), default=0)
    if op in _PRODUCTS:
        work = max(work, math.prod(results[0].shape) * operands[0].shape[-1] // _MULTIPLICATIONS_PER_ELEMENT)
    elif op in _FACTORIZATIONS:
        work = work * min(operands[0].shape[-2:]) // _MULTIPLICATIONS_PER_ELEMENT
    accepts_runs = torch.Tag.pointwise in op.tags or op in _SUMS
    is_read_fast = all(Layout.of(spec.shape, spec.stride).dense or (accepts_runs and _is_in_runs(spec)) for spec in operands)
    first = (operands or results)[0]
    matrix_size = max(first.shape[-2:], default=1)
    is_copied = op in _COPIES and _moves_runs(operands[0], results[0])
    used = sum(is_result_used(ctx.node, index) for index in range(len(results)))
    return UnfusableOp(op, work, is_read_fast or is_copied, matrix_size, first.dtype, used)


def _is_in_runs(spec: TensorSpec) -> bool:
    """True if a tensor consists of contiguous runs of at least MIN_RUN_ELEMENTS elements, without overlaps."""
    extent, steps = 0, sorted((step, size) for size, step in zip(spec.shape, spec.stride, strict=True) if size != 1)
    for step, size in steps:
        if step <= extent:
            return False
        extent += step * (size - 1)
    return bool(steps) and steps[0][0] == 1 and steps[0][1] >= MIN_RUN_ELEMENTS


def _moves_runs(source: TensorSpec, result: TensorSpec) -> bool:
    """True if elements that are adjacent in the copy are adjacent in the source, or are copies of one expanded element."""
    steps = [pair for size, *pair in zip(result.shape, result.stride, source.stride, strict=True) if size != 1]
    return bool(steps) and min(steps)[1] in (0, 1)
