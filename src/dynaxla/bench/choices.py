"""The names of models, suites, engines and optimizers, for the help of commands and for early checks, without importing torch and JAX.

Tests compare MODELS with suites.MODELS, SUITES with suites.SUITES, ENGINES with engines.ENGINES, OPTIMIZERS with training.OPTIMIZERS, and
PLATFORMS with interop.export.PLATFORMS.
"""

from __future__ import annotations

MODELS = (
    "resnet18", "resnet50", "resnext50_32x4d", "alexnet", "mobilenet_v2", "mnasnet1_0", "squeezenet1_1", "vgg16", "bert_base",
    "vit_base_patch16_224",
)  # fmt: skip

SUITES = ("models",)

ENGINES = (
    "eager", "lazy", "inductor", "torchscript", "dynamo", "dynamo_aot", "dynaxla", "dynaxla_tuned", "dynaxla_step", "dynaxla_retrace",
)  # fmt: skip

OPTIMIZERS = ("sgd", "adamw", "none")

DTYPES = ("float32", "bfloat16", "float16", "float64")

# The platforms for which `dynaxla export` makes programs, under JAX's names. Equal to interop.export.PLATFORMS, which needs JAX.
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
