"""Normalizations, gradients of softmax, and losses."""

from typing import Any

import torch

from lowering.table.rows import FLOATS, IN_ORDER, NO_FAKE, NO_ORDER, PAIR, Make, Op, Samples, aten

# Sums over the batch have another order and other rounding.
SUMS = {torch.float16: (1e-2, 2e-2), torch.bfloat16: (5e-2, 0.15)}
EACH = [True, True, True]


def batch(*rest: Any, statistics: bool = True) -> Samples:
    """Samples: images, weight, bias, running mean and variance."""
    return lambda make, n: [(make(n, 2, 3, 2), *(make(2) for _ in range(4 if statistics else 2)), *rest)]


def after_batch_norm(make: Make, n: int) -> list[tuple[Any, ...]]:
    """Samples: with the statistics of the batch, and with running statistics."""
    x, weight, mean, var = make(n, 2, 3, 2), make(2), make(2), make(2)
    saved = aten.native_batch_norm(x, weight, None, None, None, True, 0.1, 1e-3)[1:]
    grad = make(n, 2, 3, 2)
    return [(grad, x, weight, None, None, *saved, True, 1e-3, EACH), (grad, x, weight, mean, var, None, None, False, 1e-3, EACH)]


def after_batch_norm_of_any_backend(make: Make, n: int) -> list[tuple[Any, ...]]:
    return [(*sample[:-3], *sample[-3:], torch.empty(0, dtype=torch.uint8)) for sample in after_batch_norm(make, n)]


def after_layer_norm(make: Make, n: int) -> list[tuple[Any, ...]]:
    x, weight, bias = make(n, 2, 3), make(3), make(3)
    saved = aten.native_layer_norm(x, [3], weight, bias, 1e-3)[1:]
    return [(make(n, 2, 3), x, [3], *saved, weight, bias, EACH)]


def after_group_norm(make: Make, n: int) -> list[tuple[Any, ...]]:
    x, weight = make(n, 4, 3), make(4)
    saved = aten.native_group_norm(x, weight, None, n, 4, 3, 2, 1e-3)[1:]
    return [(make(n, 4, 3), x, *saved, weight, n, 4, 3, 2, EACH)]


def after_softmax(forward: Any) -> Samples:
    def samples(make: Make, n: int) -> list[tuple[Any, ...]]:
        return [(make(n, 3), forward(make(n, 3), dim, False), dim, make().dtype) for dim in (0, -1)]

    return samples


def classes(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape) % 3


def likelihoods(*image: int) -> Samples:
    return lambda make, n: [
        (make(n, 3, *image), classes(n, *image), weight, reduction, 1)
        for weight, reduction in ((None, 0), (make(3), 0), (make(3), 1), (make(3), 2))
    ]


def after_likelihood(forward: Any, *image: int) -> Samples:
    def samples(make: Make, n: int) -> list[tuple[Any, ...]]:
        return [
            (make(*(() if arguments[3] else (n, *image))), *arguments, forward(*arguments)[1]) for arguments in likelihoods(*image)(make, n)
        ]

    return samples


def margins(make: Make, n: int) -> list[tuple[Any, ...]]:
    return [(make(n, 4), torch.tensor([[3, 0, -1, -1]]).repeat(n, 1), reduction) for reduction in (0, 1, 2)]


def after_margins(make: Make, n: int) -> list[tuple[Any, ...]]:
    saved = [(sample, *aten.multilabel_margin_loss_forward(*sample)) for sample in margins(make, n)]
    return [(make(*loss.shape), *sample, is_target) for sample, loss, is_target in saved]


ROWS: list[Op] = [
    # Batch norms. The operands are positive, because they include variances.
    Op(aten._native_batch_norm_legit_no_training.default, batch(0.1, 1e-3), FLOATS, low=0.5, constants=[3, 4],
       without=NO_ORDER),
    Op(aten._native_batch_norm_legit.no_stats, batch(True, 0.1, 1e-3, statistics=False), FLOATS, without=NO_ORDER),
    # In half types, torch's shape function returns float32 running statistics, but eager mode does not change their dtype.
    Op(aten._native_batch_norm_legit_functional.default,
       lambda make, n: [sample for training in (True, False) for sample in batch(training, 0.1, 1e-3)(make, n)],
       PAIR, low=0.5, constants=[3, 4], without=NO_ORDER),
    *(
        Op(op, batch(0.1, 1e-3), PAIR, low=0.5, constants=[3, 4], without=NO_ORDER)
        for op in (aten._batch_norm_no_update.default, aten._batch_norm_with_update_functional.default)
    ),
    Op(aten.native_batch_norm_backward.default, after_batch_norm, FLOATS, low=0.5, constants=[3, 4, 5, 6], without=NO_ORDER),
    Op(aten.batch_norm_backward.default, after_batch_norm_of_any_backend, PAIR, low=0.5, constants=[3, 4, 5, 6], without=NO_ORDER),
    Op(aten.batch_norm_update_stats.default, lambda make, n: [(make(n, 2, 3), None, None, 0.1)], PAIR, without=NO_FAKE),
    # Norms over the last dimensions, and over groups of channels
    Op(aten.native_layer_norm.default,
       lambda make, n: [(make(n, 2, 3), [3], make(3), make(3), 1e-3), (make(n, 2, 3), [2, 3], None, None, 1e-3)], FLOATS),
    Op(aten.native_layer_norm_backward.default, after_layer_norm, FLOATS, tolerance=SUMS, constants=[3, 4], without=NO_ORDER),
    Op(aten._fused_rms_norm.default, lambda make, n: [(make(n, 2, 3), [3], make(3), None), (make(n, 2, 3), [2, 3], None, 1e-3)], FLOATS,
       without=["rank 0"]),  # eager mode does not check the shape
    Op(aten.native_group_norm.default, lambda make, n: [(make(n, 4, 3), make(4), make(4), n, 4, 3, 2, 1e-3)], FLOATS, without=IN_ORDER),
    Op(aten.native_group_norm_backward.default, after_group_norm, FLOATS, gradient=False, without=IN_ORDER),
    # Softmax
    Op(aten._softmax_backward_data.default, after_softmax(aten._softmax), FLOATS),
    Op(aten._log_softmax_backward_data.default, after_softmax(aten._log_softmax), FLOATS, without=NO_ORDER),
    Op(aten._safe_softmax.default, lambda make, n: [(make(n, 3), dim) for dim in (0, -1)], FLOATS),
    # Losses
    Op(aten.binary_cross_entropy.default,
       lambda make, n: [(make(n, 3), make(n, 3), weight, reduction) for weight, reduction in ((None, 0), (make(3), 1), (make(n, 3), 2))],
       FLOATS, low=0.1, high=0.9, constants=[2]),
    Op(aten.nll_loss_forward.default, likelihoods(), FLOATS, constants=[2]),
    Op(aten.nll_loss2d_forward.default, likelihoods(2, 3), PAIR, constants=[2]),
    Op(aten.nll_loss_backward.default, after_likelihood(aten.nll_loss_forward), FLOATS, constants=[3, 6]),
    Op(aten.nll_loss2d_backward.default, after_likelihood(aten.nll_loss2d_forward, 2, 3), PAIR, constants=[3, 6], without=IN_ORDER),
    Op(aten.multi_margin_loss_backward.default,
       lambda make, n: [(make(*shape), make(n, 3), classes(n), power, 0.5, weight, reduction)
                        for shape, power, weight, reduction in (((n,), 1, None, 0), ((), 2, make(3), 1), ((), 1, make(3), 2))], PAIR,
       without=NO_FAKE),
    # torch.compile decomposes the op wrongly before a backend sees it.
    Op(aten.multilabel_margin_loss_forward.default, margins, PAIR, gradient=False,
       without=["empty", *NO_FAKE]),  # in eager mode, the mean over no elements is uninitialized
    Op(aten.multilabel_margin_loss_backward.default, after_margins, PAIR, without=NO_FAKE),
]  # fmt: skip

# The ops without a row, by the file that tests them.
ELSEWHERE: dict[str, str] = {
    # These ops have kernels for GPUs alone.
    "lowering/ops/test_normalization.py": "aten._fused_rms_norm_backward.default",
    "lowering/ops/test_synchronized_batch_norm.py": """
        aten.batch_norm_stats.default aten.batch_norm_gather_stats.default aten.batch_norm_gather_stats_with_counts.default
        aten.batch_norm_elemt.default aten.batch_norm_backward_reduce.default aten.batch_norm_backward_elemt.default""",
}
