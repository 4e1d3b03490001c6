"""Activations and their gradients, and kernels that fuse several ops."""

import torch

from lowering.table.rows import FLOATS, NO_ORDER, Keywords, Op, aten, of, same, two

NO_SIZES = ("changing sizes",)

ROWS: list[Op] = [
    # Gradients: the upstream gradient, the saved tensor, and the activation's numbers.
    *(Op(op.default, same(2), FLOATS, gradient=False) for op in (aten.mish_backward, aten.silu_backward)),
    Op(aten.hardswish_backward.default, same(2), FLOATS),
    # Eager mode divides by a float32 six, also in float64.
    Op(aten.hardsigmoid_backward.default, same(2), FLOATS, gradient=False, tolerance={torch.float64: (1e-7, 1e-7)}),
    *(Op(op.default, same(2), (*FLOATS, torch.complex64)) for op in (aten.sigmoid_backward, aten.tanh_backward)),
    Op(aten.threshold_backward.default, same(2, 0.5), FLOATS),
    # torch's shape propagation refuses symbolic sizes.
    *(
        Op(op.default, same(2, 0.5), FLOATS, without=["changing sizes"])
        for op in (aten.hardshrink_backward, aten.softshrink_backward)
    ),
    Op(aten.hardtanh_backward.default, same(2, -1.0, 1.5), FLOATS),
    Op(aten.leaky_relu_backward.default, same(2, 0.1, False), FLOATS),
    Op(aten.elu_backward.default, lambda make, n: [(make(n, 3), 0.5, 2.0, 1.5, result, make(n, 3)) for result in (False, True)], FLOATS),
    Op(aten.gelu_backward.default, lambda make, n: [
        (make(n, 3), make(n, 3), Keywords(approximate=approximate)) for approximate in ("none", "tanh")
    ], FLOATS),
    Op(aten.glu.default, lambda make, n: [(make(n, 4),), (make(n, 4, 3), 1), (make(2, n), 0)], FLOATS),
    Op(aten.glu_backward.default, lambda make, n: [(make(n, 2), make(n, 4), -1), (make(n, 2, 3), make(n, 4, 3), 1)], FLOATS),
    Op(aten.softplus_backward.default, same(2, 2.0, 2.0), FLOATS),
    Op(aten.log_sigmoid_forward.default, same(1), FLOATS, without=NO_ORDER),
    Op(aten.log_sigmoid_backward.default, lambda make, n: [(make(n, 3), x := make(n, 3), torch.exp(-x.abs()))], FLOATS, gradient=False),
    Op(aten._prelu_kernel.default, two, FLOATS),
    Op(aten._prelu_kernel_backward.default, same(3), FLOATS),
    # Fused ops
    Op(aten._add_relu.Tensor, same(2, Keywords(alpha=2)), (torch.float32, torch.int64), gradient=False),
    Op(aten._addmm_activation.default, lambda make, n: [
        (make(4), make(n, 3), make(3, 4), Keywords(beta=0.5, alpha=2, use_gelu=use_gelu)) for use_gelu in (False, True)
    ], (torch.float32, torch.float64), gradient=False),
    # torch has no shape propagation for the rest, and some of its kernels crash for too few dimensions or empty operands.
    Op(aten._add_relu.Scalar, of(1, 2), (torch.float32,), gradient=False, without=NO_SIZES),
    Op(aten._transform_bias_rescale_qkv.default, lambda make, n: [
        (make(n, 3, 24), make(24), 2)
    ], (torch.float32, torch.bfloat16), gradient=False, without=["rank 0", "empty", *NO_SIZES]),
    # Eager mode returns wrong results for operands that are not dense.
    Op(aten._masked_softmax.default, lambda make, n: [
        (make(n, 3, 3), make(n, 3, 3) > 1, dim, 2) for dim in (0, None)
    ], (torch.float32, torch.float64), without=["transposed", "with gaps", "rank 0", "empty", *NO_SIZES]),
    Op(aten._masked_softmax_backward.default, lambda make, n: [
        (make(n, 3), make(n, 3), make(n, 3) > 0, 1)
    ], (torch.float32, torch.float64), gradient=False, without=["rank 0", *NO_SIZES]),
    Op(aten.glu_jvp.default, lambda make, n: [
        (make(n, 2), make(n, 4), make(n, 4), -1)
    ], (torch.float32, torch.float64), gradient=False, without=["rank 0", *NO_SIZES]),
    Op(aten.glu_backward_jvp.default, lambda make, n: [
        (aten.glu_backward(grad := make(n, 2), x := make(n, 4), 1), grad, x, make(n, 2), make(n, 4), 1)
    ], (torch.float32, torch.float64), gradient=False, without=["rank 0", *NO_SIZES]),
    # Eager mode needs dense operands, and crashes for empty ones.
    Op(aten._weight_norm_interface_backward.default, lambda make, n: [
        (make(n, 3), make(n, 3), make(n, 1), make(n, 1), 0)
    ], (torch.float32, torch.float64), low=0.5, gradient=False, without=["transposed", "with gaps", "empty"]),
]  # fmt: skip

# The ops without a row, by the file that tests them.
ELSEWHERE: dict[str, str] = {
    # The op has no kernel on the CPU.
    "lowering/ops/test_fused.py": "aten._masked_scale.default",
}
