"""Reads and writes by indices and masks, embeddings, jagged tensors, and segments."""

from typing import Any

import torch

from lowering.table.rows import EVERY, FEW, FLOATS, NUMERIC, PAIR, Keywords, Make, Op, Samples, alike, aten

# Ops that only move elements do not depend on the dtype.
MOVED = (torch.float32, torch.bfloat16, torch.int64, torch.bool)
SUMMED = (torch.float32, torch.bfloat16, torch.int64)
INDEX = torch.tensor([2, 0])
TWICE = torch.tensor([1, 2, 1])
MASK = torch.tensor([True, False, True])
OFFSETS = torch.tensor([0, 3, 3, 5])
LENGTHS = torch.tensor([2, 0, 1])
MEAN, MAX = 1, 2

# Eager mode computes the values that a forward pass saves, and takes no operands of rank 0.
SAVED = ("rank 0",)

# For a tensor of rank 0, eager mode reads outside of it. torch has no gradients for these ops.
JAGGED: dict[str, Any] = {"gradient": False, "without": ["rank 0"]}


def put(make: Make, n: int) -> list[tuple[Any, ...]]:
    """Samples: slices, and elements of which several are added to one."""
    return [(make(n, 3), [None, INDEX], make(n, 2)), (make(n, 3), [TWICE, TWICE], make(3), True)]


def masked(make: Make, n: int) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor | None]]:
    """A tensor, a mask, and indices that are out of range if the mask excludes them."""
    return make(n, 3), torch.tensor([True, False, True]), [None, torch.tensor([1, 9, 0])]


def reduced(*names: str) -> Samples:
    """Samples with and without `include_self`."""
    return lambda make, n: [
        (make(n, 3), 1, TWICE, make(n, 3), name, Keywords(include_self=include_self)) for name in names for include_self in (True, False)
    ]  # fmt: skip


def bags(make: Make, n: int, mode: int) -> tuple[Any, ...]:
    """A table, indices, the offset of each bag, and the reduction. Row 1 is padding."""
    return make(5, 3), torch.arange(n) % 4, torch.tensor([0, 1, 1]).clamp(max=n), False, mode, False, None, False, 1


def bag_gradients(make: Make, n: int) -> list[tuple[Any, ...]]:
    """Samples: an upstream gradient, the indices, and the saved values."""
    samples = []
    for mode in (0, MEAN, MAX):
        _, indices, offsets, *rest = bags(make, n, mode)
        saved = aten._embedding_bag(make(5, 3), indices, offsets, *rest)[1:]
        samples.append((make(3, 3), indices, offsets, *saved, 5, False, mode, False, None, 1))
    return samples


def segments(make: Make, n: int) -> list[tuple[Any, ...]]:
    return [
        (make(3, n), name, Keywords(lengths=LENGTHS, initial=initial))
        for name in ("sum", "mean", "max", "min", "prod")
        for initial in (None, 2)
    ]


def segment_gradients(make: Make, n: int) -> list[tuple[Any, ...]]:
    samples = []
    for *_, name, options in segments(make, n):
        x = make(3, n)
        samples.append((make(3, n), torch.segment_reduce(x, name, **options), x, name, options))
    return samples


ROWS: list[Op] = [
    # Reads
    Op(aten.index_select.default, lambda make, n: [(make(n, 3), 1, INDEX)], EVERY),
    Op(aten.gather.default, lambda make, n: [(make(n, 3), 1, torch.ones(n, 2, dtype=torch.int64))], EVERY),
    Op(aten.take.default, lambda make, n: [(make(n, 3), torch.tensor([[0, -1], [4, 1]]))], EVERY),
    *alike(lambda make, n: [(make(n, 3), [None, INDEX]), (make(n, 3), [INDEX]), (make(n, 3), [INDEX, INDEX])],
           aten.index.Tensor, aten._unsafe_index.Tensor),
    Op(aten._unsafe_masked_index.default, lambda make, n: [(*masked(make, n), 1)], FEW),
    Op(aten.one_hot.default, lambda make, n: [(torch.arange(n), 7)], (torch.int64,)),
    Op(aten.repeat_interleave.Tensor, lambda make, n: [(torch.tensor([2, 0, 3]), Keywords(output_size=5))], (torch.int64,)),
    # Writes
    Op(aten.scatter.src, lambda make, n: [(make(n, 3), 1, INDEX.expand(n, 2), make(n, 2))], MOVED),
    Op(aten.scatter.value, lambda make, n: [(make(n, 3), 1, INDEX.expand(n, 2), 2)], MOVED),
    Op(aten.scatter.reduce, lambda make, n: [
        (make(n, 3), 1, INDEX.expand(n, 2), make(n, 2), Keywords(reduce=name)) for name in ("add", "multiply")
    ], FEW, gradient=False),
    Op(aten.scatter.value_reduce, lambda make, n: [
        (make(n, 3), 1, INDEX.expand(n, 2), 2, Keywords(reduce=name)) for name in ("add", "multiply")
    ], FEW, gradient=False),
    Op(aten.scatter_add.default, lambda make, n: [(make(n, 3), 1, torch.ones(n, 2, dtype=torch.int64), make(n, 2))], NUMERIC),
    Op(aten.scatter_reduce.two, lambda make, n: [
        (x, dim, index.expand(n, 3), *rest) for x, dim, index, *rest in reduced("sum", "prod", "mean", "amax", "amin")(make, n)
    ], SUMMED),
    Op(aten.index_add.default, lambda make, n: [(make(n, 3), 1, INDEX, make(n, 2))], NUMERIC),
    Op(aten.index_copy.default, lambda make, n: [(make(n, 3), 1, INDEX, make(n, 2))], MOVED),
    Op(aten.index_fill.int_Scalar, lambda make, n: [(make(n, 3), 1, INDEX, 2)], MOVED),
    # The gradient of the value needs the unique indices, whose number depends on data.
    Op(aten.index_fill.int_Tensor, lambda make, n: [(make(n, 3), 1, INDEX, make())], FEW, gradient=False),
    Op(aten.index_reduce.default, reduced("prod", "mean", "amax", "amin"), SUMMED),
    *alike(put, aten.index_put.default, aten._unsafe_index_put.default, aten._index_put_impl.default),
    Op(aten._unsafe_masked_index_put_accumulate.default, lambda make, n: [(*masked(make, n), make(n, 3))], FEW),
    Op(aten.put.default, lambda make, n: [(make(n, 3), torch.tensor([0, -1, 4]), make(3), add) for add in (False, True)], NUMERIC),
    Op(aten.masked_scatter.default, lambda make, n: [(make(n, 3), MASK, make(n, 2))], EVERY),
    Op(aten.masked_scatter_backward.default, lambda make, n: [(make(n, 3), MASK.expand(n, 3), [n, 3])]),
    Op(aten.nonzero_static.default, lambda make, n: [(make(n, 3), Keywords(size=5, fill_value=-1))], EVERY, gradient=False),
    # Embeddings
    Op(aten.embedding.default, lambda make, n: [(make(5, 3), torch.arange(n) % 4), (make(5, 3), torch.arange(2 * n).reshape(n, 2) % 4, 1)]),
    Op(aten.embedding_dense_backward.default, lambda make, n: [
        (make(n, 3), torch.arange(n) % 4, 5, padding, by_frequency) for padding, by_frequency in ((1, False), (1, True), (0, False))
    ]),
    Op(aten.embedding_renorm.default, lambda make, n: [(make(5, 3), torch.arange(n) % 4, 1.0, norm) for norm in (1.0, 2.0)], FLOATS,
       gradient=False),
    # For a sum or a mean, torch saves values for the gradient that it does not read. Ours are different.
    Op(aten._embedding_bag.default, lambda make, n: [bags(make, n, MAX)]),
    Op(aten._embedding_bag_forward_only.default, lambda make, n: [bags(make, n, MAX)], gradient=False),
    Op(aten._embedding_bag_backward.default, bag_gradients, PAIR, gradient=False, without=SAVED),
    Op(aten._embedding_bag_dense_backward.default, lambda make, n: [
        (*args[:2], *args[3:9], *args[10:]) for args in bag_gradients(make, n)
    ], PAIR, gradient=False, without=SAVED),
    Op(aten._embedding_bag_per_sample_weights_backward.default, lambda make, n: [
        (make(3, 3), make(5, 3), torch.arange(n) % 4, torch.tensor([0, 1, 1]).clamp(max=n), torch.tensor([0, *[2] * n])[:n], 0, 1)
    ], PAIR, gradient=False),
    # Jagged tensors
    Op(aten._jagged_to_padded_dense_forward.default, lambda make, n: [(make(5, n), [OFFSETS], [4], 9.0)], **JAGGED),
    Op(aten._padded_dense_to_jagged_forward.default, lambda make, n: [(make(3, 4, n), [OFFSETS], 5)], **JAGGED),
    Op(aten.segment_reduce.default, segments),
    Op(aten._segment_reduce_backward.default, segment_gradients, gradient=False, without=SAVED),
]  # fmt: skip

# The ops without a row, by the file that tests them.
ELSEWHERE: dict[str, str] = {}
