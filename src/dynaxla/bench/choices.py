"""The names of the benchmark's suites, models, engines and parts, for the help of its commands, without importing torch and JAX.

Tests compare these names with the tables: SUITES with suites.SUITES, MODELS with the first suite, ENGINES with engines.ENGINES, OPTIMIZERS
with training.OPTIMIZERS, PARTS with the parts of cpu.py, DEVICE_PARTS with those of device_jax.py.
"""

from __future__ import annotations

SUITES = ("models", "gpu", "others", "small", "functions", "generation", "breaks")

MODELS = (
    "resnet18", "resnet50", "resnext50_32x4d", "alexnet", "mobilenet_v2", "mnasnet1_0", "squeezenet1_1", "vgg16", "bert_base",
    "vit_base_patch16_224",
)  # fmt: skip

ENGINES = (
    "eager", "lazy", "inductor", "torchscript", "dynamo", "dynamo_aot", "dynaxla", "dynaxla_tuned", "dynaxla_frozen", "dynaxla_separate",
    "dynaxla_step", "inductor_autotuned", "inductor_frozen", "dynaxla_retrace", "eager_native", "dynaxla_native", "dynaxla_step_native",
    "jax", "xla_vectors_128", "xla_vectors_256", "xla_old_emitters", "xla_concurrent", "xla_no_library", "xla_reassociated",
    "xla_fewer_roundings", "xla_small_graphs", "torchax", "torch_xla",
)  # fmt: skip

OPTIMIZERS = ("sgd", "adamw", "none")

DTYPES = ("float32", "bfloat16", "float16", "float64")

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
