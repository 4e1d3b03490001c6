"""The names of the parts of `cpu` and `device`, and of engines and suites, without importing torch and JAX.

Tests compare ENGINES and SUITES with those of engines.py and suites.py.
"""

from __future__ import annotations

from dynaxla.bench import choices

FIRST_CALL = "first-call"
STARTS = "starts"
LAYERS = "layers"
MEMORY = "training-memory"
LENGTHS = "lengths"
INTEROP = "interop"
PROCESSES = "processes"
OPS = "ops"
PARTS = (
    "batch1", "batch8", "batch1-threads2", "batch8-threads2", "frozen-batch1", "frozen-batch8", "bfloat16", "training-sgd",
    "training-adamw", "training-others", "small", "functions", "generation", "generation-bfloat16", "generation-row", "xla-options",
    "xla-options-small", FIRST_CALL, STARTS, LAYERS, MEMORY, LENGTHS, INTEROP, PROCESSES, OPS,
)  # fmt: skip
DEVICE_PARTS = ("inference", "forward-backward", "training-sgd")

ENGINES = (
    *choices.ENGINES, "dynaxla_frozen", "dynaxla_separate", "inductor_autotuned", "inductor_frozen", "eager_native", "dynaxla_native",
    "dynaxla_step_native", "jax", "xla_vectors_128", "xla_vectors_256", "xla_old_emitters", "xla_concurrent", "xla_no_library",
    "xla_reassociated", "xla_fewer_roundings", "xla_small_graphs", "torchax", "torch_xla",
)  # fmt: skip
SUITES = (*choices.SUITES, "gpu", "others", "small", "functions", "generation", "breaks")
