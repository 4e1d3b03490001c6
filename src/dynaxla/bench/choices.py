"""The names of models, engines and optimizers, for the help of commands, without importing torch and JAX.

Tests compare MODELS with suites.MODELS, ENGINES with engines.ENGINES, OPTIMIZERS with training.OPTIMIZERS.
"""

from __future__ import annotations

MODELS = (
    "resnet18", "resnet50", "resnext50_32x4d", "alexnet", "mobilenet_v2", "mnasnet1_0", "squeezenet1_1", "vgg16", "bert_base",
    "vit_base_patch16_224",
)  # fmt: skip

ENGINES = (
    "eager", "lazy", "inductor", "torchscript", "dynamo", "dynamo_aot", "dynaxla", "dynaxla_tuned", "dynaxla_step", "dynaxla_retrace",
)  # fmt: skip

OPTIMIZERS = ("sgd", "adamw", "none")

DTYPES = ("float32", "bfloat16", "float16", "float64")
