"""Views, copies, and joins of tensors."""

import torch

from lowering.table.rows import AS_STRIDED, EVERY, FEW, PRIM, PRIM_VIEW, Make, Op, Samples, alike, along_each_dim, aten, either, of, prims


def ones_between(*rest: object) -> Samples:
    """A tensor with dimensions of size 1."""
    return lambda make, n: [(make(n, 1, 3, 1), *rest)]


def diagonal(make: Make, n: int) -> torch.Tensor:
    """The diagonal of a tensor with n rows and 3 columns."""
    return make(min(n, 3))


def joined(*dims: int) -> Samples:
    return lambda make, n: [([make(n, 3), make(n, 3)], dim) for dim in dims]


ROWS: list[Op] = [
    # Views, and their copying variants
    *alike(of(), aten.clone.default, aten.alias.default, aten.alias_copy.default, aten.lift_fresh_copy.default, aten._lazy_clone.default),
    # A leaf cannot be lifted, and detached tensors have no gradients.
    *(Op(op, of(), FEW, gradient=False) for op in (aten.lift.default, aten.lift_fresh.default, aten.detach_copy.default)),
    *alike(of([1, 0]), aten.permute.default, aten.permute_copy.default),
    *alike(either((0, 1), (-1, 0)), aten.transpose.int, aten.transpose_copy.int, aten.swapaxes.default, aten.swapdims.default),
    *alike(of(), aten.t.default, aten.t_copy.default),
    *alike(lambda make, n: [(make(n, 4), [n, 2, 2])], aten.view.default, aten.view_copy.default, aten._unsafe_view.default,
           aten.reshape.default, aten._reshape_copy.default),
    *alike(lambda make, n: [(make(n, 4), [n, 2, 2], [4, 2, 1])], aten._reshape_alias.default, aten._reshape_alias_copy.default,
           without=AS_STRIDED),
    *alike(lambda make, n: [(make(n, 3), [n, 2], [2, 1], 1)], aten.as_strided.default, aten.as_strided_copy.default, without=AS_STRIDED),
    *alike(along_each_dim, aten.unsqueeze.default, aten.unsqueeze_copy.default),
    *alike(ones_between(), aten.squeeze.default, aten.squeeze_copy.default),
    *alike(ones_between(1), aten.squeeze.dim, aten.squeeze_copy.dim),
    *alike(ones_between([1, -1]), aten.squeeze.dims, aten.squeeze_copy.dims),
    *alike(lambda make, n: [(make(n, 1), [2, n, 4])], aten.expand.default, aten.expand_copy.default),
    *alike(of(1, 2), aten.select.int, aten.select_copy.int),
    *alike(either((0, 1, 3), (1, 0, 3, 2)), aten.slice.Tensor, aten.slice_copy.Tensor),
    Op(aten.narrow_copy.default, of(1, 1, 2), FEW),
    *alike(either((2, 1), (1, -1)), aten.split.Tensor, aten.split_copy.Tensor, aten.unsafe_split.Tensor),
    *alike(either(([1, 2], 1), ([3, 0], -1)), aten.split_with_sizes.default, aten.split_with_sizes_copy.default,
           aten.unsafe_split_with_sizes.default),
    *alike(of(1), aten.unbind.int, aten.unbind_copy.int),
    *alike(either((), (1,)), aten.diagonal.default, aten.diagonal_copy.default),
    *alike(of(1, 2, 1), aten.unfold.default, aten.unfold_copy.default),
    Op(aten.unfold_backward.default, lambda make, n: [
        (make(2, n, 3, 2), [2, n + 1, 3], 1, 2, 1), (make(n, 2), [3 * n], 0, 2, 3),
    ], without=["rank 0"]),  # torch's decomposition, which is its shape function, refuses such a gradient
    # Gradients of views, and ops that replace the elements of a view
    Op(aten.select_backward.default, lambda make, n: [(make(n), [n, 3], 1, 2)]),
    Op(aten.slice_backward.default, lambda make, n: [(make(n, 2), [n, 3], 1, 0, 3, 2)]),
    Op(aten.diagonal_backward.default, lambda make, n: [(diagonal(make, n), [n, 3], 0, 0, 1)]),
    Op(aten.select_scatter.default, lambda make, n: [(make(n, 3), make(n), 1, 2)], EVERY),
    Op(aten.slice_scatter.default, lambda make, n: [(make(n, 3), make(n, 2), 1, 0, 3, 2)], EVERY),
    Op(aten.diagonal_scatter.default, lambda make, n: [(make(n, 3), diagonal(make, n))], EVERY),
    Op(aten.as_strided_scatter.default, lambda make, n: [(make(n, 3), make(n, 2), [n, 2], [2, 1], 1)], EVERY, without=AS_STRIDED),
    # Joins and rearrangements
    Op(aten.cat.default, joined(0, 1), EVERY),
    Op(aten.stack.default, joined(0, -1), EVERY),
    Op(aten._stack.default, joined(0, -1), FEW, gradient=False),
    Op(aten.block_diag.default, lambda make, n: [([make(n, 3), make(2), make()],)], EVERY),
    Op(aten.flip.default, either(([0],), ([0, 1],), ([],)), EVERY),
    Op(aten.roll.default, either(([1], [0]), ([2],)), EVERY),
    Op(aten.rot90.default, either((), (2,), (-1, [1, 0])), EVERY),
    Op(aten.repeat.default, of([2, 1, 3]), EVERY),
    Op(aten.tril.default, either((), (1,)), EVERY),
    Op(aten.triu.default, either((), (-1,)), EVERY),
    Op(aten.diag_embed.default, either((), (1,), (-1, 0, 2)), EVERY),
    Op(aten.constant_pad_nd.default, either(([1, 2],), ([1, -1, 0, 2], 1)), EVERY),
    Op(aten.channel_shuffle.default, lambda make, n: [(make(n, 4, 3), 2)], FEW),
    # For empty operands, torch's fake tensors have another shape than its kernel.
    Op(aten.pixel_unshuffle.default, lambda make, n: [(make(n, 2, 4, 6), 2)], EVERY, without=["empty"]),
    Op(aten._to_copy.default, of(), EVERY),
    # Prims
    *(
        Op(op, samples, FEW, **PRIM_VIEW)
        for op, samples in (
            (prims.view_of.default, of()),
            (prims.transpose.default, of([1, 0])),
            (prims.split_dim.default, lambda make, n: [(make(n, 6), 1, 2)]),
            (prims.squeeze.default, ones_between([1, 3])),
            (prims.broadcast_in_dim.default, lambda make, n: [(make(n, 1), [n, 2, 4], [0, 2])]),
            # For transposed operands, the result is no view.
            (prims.collapse_view.default, lambda make, n: [(torch.ones(n, 2, 3, dtype=make().dtype), 1, 2)]),
        )
    ),
    *(
        Op(op, samples, FEW, **PRIM)
        for op, samples in (
            (prims.clone.default, of()),
            (prims.device_put.default, of(torch.device("cpu"))),
            (prims.reshape.default, lambda make, n: [(make(n, 4), [n, 2, 2])]),
            (prims.collapse.default, lambda make, n: [(make(n, 2, 3), 1, 2)]),
            (prims.cat.default, joined(0, 1)),
            (prims.rev.default, of([0, 1])),
            (prims.copy_strided.default, lambda make, n: [(make(n, 3), [1, n])]),
        )
    ),
]  # fmt: skip

# The ops without a row, by the file that tests them.
ELSEWHERE: dict[str, str] = {
    # Their results are numbers, not tensors.
    "lowering/ops/test_sizes.py": "aten.sym_numel.default aten.sym_size.int aten.sym_storage_offset.default aten.sym_stride.int",
}
