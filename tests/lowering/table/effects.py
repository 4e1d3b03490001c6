"""Gradients of random ops. Random draws and assertions are tested elsewhere."""

import torch

from lowering.table.rows import FLOATS, NO_ORDER, Op, aten

ROWS: list[Op] = [
    # For integers and bools, the result is float32.
    Op(aten.native_dropout_backward.default, lambda make, n: [(make(n, 3), make(n, 3) > 0, 2.0)], (*FLOATS, torch.int64, torch.bool),
       without=NO_ORDER),
    Op(aten.rrelu_with_noise_backward.default, lambda make, n: [
        (make(n, 3), make(n, 3), make(n, 3), 0.1, 0.3, training, False) for training in (True, False)
    ], FLOATS, gradient=False),
]  # fmt: skip

# The ops without a row, by the file that tests them.
ELSEWHERE: dict[str, str] = {
    # JAX functions in torch's graphs.
    "interop/test_jax_calls.py": "dynaxla.jax_call.default",
    # Eager mode draws other numbers.
    "lowering/ops/test_random.py": """
        aten._fused_dropout.default aten._sample_dirichlet.default aten._standard_gamma.default aten.bernoulli.Tensor
        aten.bernoulli.default aten.bernoulli.p aten.cauchy.default aten.exponential.default aten.log_normal.default
        aten.native_dropout.default aten.normal.Tensor_Tensor aten.normal.Tensor_float aten.normal.float_Tensor aten.normal.float_float
        aten.normal_functional.default aten.rand.default aten.rand.generator aten.rand_like.default aten.rand_like.generator
        aten.randn.default aten.randn.generator aten.randn_like.default aten.randn_like.generator
        aten.rrelu_with_noise_functional.default aten.uniform.default prims.normal.default prims.uniform.default""",
    "lowering/ops/test_random_integers.py": """
        aten.binomial.default aten.geometric.default aten.multinomial.default aten.poisson.default aten.randint.default
        aten.randint.generator aten.randint.low aten.randint.low_generator aten.randint_like.Tensor aten.randint_like.Tensor_generator
        aten.randint_like.default aten.randint_like.generator aten.randint_like.low_dtype aten.randint_like.low_generator_dtype
        aten.random.default aten.random.from aten.random.to aten.randperm.default aten.randperm.generator""",
    # An op for checkpointed regions, which only programs can run.
    "passes/joint/test_checkpointing.py": "dynaxla.random_key.default",
    # Ops for programs with rounded sizes.
    "lowering/ops/test_valid_size_ops.py": """
        dynaxla.as_tuple.default dynaxla.cat_valid.default dynaxla.check_index.default dynaxla.masked.default
        dynaxla.reflect_or_replicate.default dynaxla.reflect_or_replicate_backward.default dynaxla.repeat_last.default
        dynaxla.roll_or_flip.default dynaxla.size_product.default dynaxla.slice_at.default dynaxla.write_into.default
        dynaxla.write_into_zeros.default""",
    # The result depends on the program's checks.
    "lowering/ops/test_commit_if_ok.py": "dynaxla.commit_if_ok.default",
    "sharding/test_marking.py": "dynaxla.sharding_constraint.default",
    "test_partitioning.py": "dynaxla.reshard.default dynaxla.replicated_to_local.default dynaxla.local_to_replicated.default",
    # They have no result, or one without information.
    "lowering/ops/test_assertions.py": """
        aten._assert_async.default aten._assert_async.msg aten._assert_scalar.default aten._assert_tensor_metadata.default
        aten._functional_assert_async.msg""",
}
