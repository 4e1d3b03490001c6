"""Products of matrices and vectors, attention, and distances between rows."""

from typing import Any

import torch

from lowering.table.rows import EVERY, IN_ORDER, NO_ORDER, NUMERIC, PAIR, SHORT, Keywords, Make, Op, Samples, aten, products

# In half types, eager mode rounds between a product and a sum; our lowerings do not.
ROUNDED = {torch.bfloat16: (5e-2, 0.1), torch.float16: (1e-2, 1e-2)}
# Layer norms enlarge rounding errors.
NORMALIZED = {torch.float32: (1e-4, 1e-4)}
SCALED = Keywords(beta=2, alpha=3)


def added(*shapes: tuple[int, ...]) -> Samples:
    return lambda make, n: [(*sample, *scaled) for sample in products(*shapes)(make, n) for scaled in ((), (SCALED,))]


def heads(make: Make, n: int) -> list[torch.Tensor]:
    return [make(n, 2, rows, 4) for rows in (3, 5, 5)]


def attention(make: Make, n: int) -> list[tuple[Any, ...]]:
    return [
        (*heads(make, n), 0.0, False),
        (*heads(make, n), 0.0, True, Keywords(scale=0.3)),
        (*heads(make, n), 0.0, False, Keywords(attn_mask=make(3, 5))),
    ]


def after_attention(make: Make, n: int) -> list[tuple[Any, ...]]:
    samples = []
    for *inputs, dropout, causal in [sample if len(sample) == 5 else sample[:-1] for sample in attention(make, n)[:2]]:
        results = aten._scaled_dot_product_flash_attention_for_cpu(*inputs, dropout, causal)
        samples.append((make(n, 2, 3, 4), *inputs, *results, dropout, causal))
    return samples


def multi_head(make: Make, n: int) -> list[tuple[Any, ...]]:
    x, parameters = make(n, 3, 4), (make(12, 4), make(12), make(4, 4), make(4))
    return [(x, x, x, 4, 2, *parameters), (x, x, x, 4, 2, *parameters, torch.ones(3, 3).triu(1).bool(), True, False, 0)]


def encoder(make: Make, n: int) -> list[tuple[Any, ...]]:
    sizes = [(12, 4), (12,), (4, 4), (4,)], [(4,), (4,), (4,), (4,), (6, 4), (6,), (4, 6), (4,)]
    attends, rest = ([make(*size) for size in part] for part in sizes)
    return [(make(n, 3, 4), 4, 2, *attends, gelu, first, 1e-3, *rest) for gelu, first in ((True, False), (False, True))]


POWERS = (0.0, 1.0, 1.5, 2.0, float("inf"))

ROWS: list[Op] = [
    Op(aten.mm.default, products((-1, 3), (3, 4)), NUMERIC),
    Op(aten.bmm.default, products((-1, 2, 3), (-1, 3, 4)), NUMERIC),
    Op(aten.mv.default, products((-1, 3), (3,)), NUMERIC),
    Op(aten.dot.default, products((-1,), (-1,)), NUMERIC),
    Op(aten.vdot.default, products((-1,), (-1,)), NUMERIC),
    Op(aten.addmm.default, added((4,), (-1, 3), (3, 4)), NUMERIC, tolerance=ROUNDED),
    Op(aten.addmv.default, added((-1,), (-1, 3), (3,)), NUMERIC, tolerance=ROUNDED),
    Op(aten.addr.default, added((3,), (-1,), (3,)), EVERY, tolerance=ROUNDED),
    Op(aten.baddbmm.default, added((2, 4), (-1, 2, 3), (-1, 3, 4)), NUMERIC, tolerance=ROUNDED),
    Op(aten.addbmm.default, added((2, 4), (-1, 2, 3), (-1, 3, 4)), NUMERIC, tolerance=ROUNDED),
    Op(aten._int_mm.default, lambda make, n: [(make(20 + n, 8), make(8, 16))], (torch.int8,), gradient=False),
    Op(aten._trilinear.default, lambda make, n: [(make(n, 3), make(5, 3, 4), make(n, 4), [1, 3], [0], [1, 2], [2, 3])], PAIR),
    # Groups of rows, groups of matrices, and groups of columns. They have to begin at multiples of 16 bytes.
    Op(aten._grouped_mm.default, lambda make, n: [
        (make(8 * n, 16), make(3, 16, 8), torch.tensor([1, 5, 8 * n], dtype=torch.int32)), (make(n, 8, 16), make(n, 16, 8)),
    ], (torch.bfloat16,), without=IN_ORDER),
    # The operands are small, because 8-bit weights are large: results then have the magnitude for which tolerances are chosen.
    Op(aten._weight_int8pack_mm.default,
       lambda make, n: [(make(n, 32) / 128, torch.randint(-128, 127, (8, 32), dtype=torch.int8), make(8))],
       SHORT, gradient=False, without=IN_ORDER),
    # Attention. The first two ops need dense operands, and do not check this.
    Op(aten._scaled_dot_product_flash_attention_for_cpu.default, attention, SHORT, without=IN_ORDER),
    Op(aten._scaled_dot_product_flash_attention_for_cpu_backward.default, after_attention, PAIR, gradient=False,
       without=IN_ORDER),
    Op(aten._native_multi_head_attention.default, multi_head, PAIR, gradient=False, without=["empty"]),  # eager mode: no weights then
    Op(aten._transformer_encoder_layer_fwd.default, encoder, PAIR, tolerance=NORMALIZED, gradient=False, without=NO_ORDER),
    # Distances
    Op(aten._cdist_forward.default, lambda make, n: [(make(n, 3, 2), make(n, 4, 2), p, None) for p in POWERS], PAIR),
    Op(aten._cdist_backward.default,
       lambda make, n: [(make(n, 3, 4), make(n, 3, 2), make(n, 4, 2), p, make(n, 3, 4).abs() + 1) for p in POWERS], PAIR, gradient=False),
    Op(aten._pdist_forward.default, lambda make, n: [(make(n, 3), p) for p in POWERS], PAIR, without=IN_ORDER),
    Op(aten._pdist_backward.default,
       lambda make, n: [(make(n * (n - 1) // 2), make(n, 3), p, make(n * (n - 1) // 2).abs() + 1) for p in POWERS],
       PAIR, gradient=False, without=[*IN_ORDER, "rank 0", "empty"]),  # for which eager mode crashes
]  # fmt: skip

# The ops without a row, by the file that tests them.
ELSEWHERE: dict[str, str] = {
    # These ops have kernels for GPUs alone.
    "lowering/ops/test_matmul.py": "aten.mm.dtype aten.bmm.dtype aten.addmm.dtype aten.baddbmm.dtype",
    "lowering/ops/test_attention.py": """
        aten._scaled_dot_product_cudnn_attention.default aten._scaled_dot_product_cudnn_attention_backward.default
        aten._scaled_dot_product_efficient_attention.default aten._scaled_dot_product_efficient_attention_backward.default
        aten._scaled_dot_product_flash_attention.default aten._scaled_dot_product_flash_attention_backward.default
        aten._scaled_dot_product_fused_attention_overrideable.default
        aten._scaled_dot_product_fused_attention_overrideable_backward.default""",
    # These cells, too. One result of the layer has oneDNN's own format.
    "lowering/ops/test_recurrent.py": """
        aten._thnn_fused_lstm_cell.default aten._thnn_fused_lstm_cell_backward_impl.default
        aten._thnn_fused_gru_cell.default aten._thnn_fused_gru_cell_backward.default
        aten.mkldnn_rnn_layer.default aten.mkldnn_rnn_layer_backward.default""",
    # This op has a kernel for GPUs alone.
    "lowering/ops/test_recurrent_cudnn.py": "aten._cudnn_rnn.default dynaxla.rnn_gradients.default",
}
