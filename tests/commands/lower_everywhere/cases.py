"""The cases: models, forward and backward, and a sample of each operator."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from cases.conformance.entries import entries
from dynaxla.bench.suites import MODELS

PLATFORMS = ("cuda", "tpu")
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Case:
    """A model or an operator.

    Attributes:
        kind: "model" or "op".
        name: The name in the benchmark, or in the database.
        dtype: The name of a dtype of torch.
    """

    kind: str
    name: str
    dtype: str

    def __str__(self) -> str:
        return f"{self.kind}/{self.name}/{self.dtype}"

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)


def cases() -> Iterator[Case]:
    """Yields all cases. Operators have the dtypes that they support on the CPU, where their graphs are captured."""
    for model in MODELS:
        yield Case("model", model.name, "float32")
    for name, info in entries("op_db").items():
        for dtype in DTYPES:
            if getattr(torch, dtype) in info.supported_dtypes("cpu"):
                yield Case("op", name, dtype)
