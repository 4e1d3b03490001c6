"""The compiled models: each in two precisions, and models of images in two layouts."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from benchmarks.suites import GptBlock, activations

from commands.compiled_programs.budgets import Limits
from dynaxla.bench.suites import MODELS, BenchCase, Bert, tokens

BATCH = 8
BUDGETS = Path(__file__).with_name("budgets.json")
LIMITS = Limits(counts=("kernels", "moves"), sizes=("memory_mib",))
DTYPES = ("float32", "bfloat16")
LAYOUTS = ("NCHW", "channels-last")


class LongBert(Bert):
    """BERT for 1024 tokens. dropout: that of the attention weights, in training; cuDNN's kernels do not support it."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(max_position_embeddings=1024, attention_probs_dropout_prob=dropout)


CASES = [
    *MODELS,
    BenchCase("bert_base_1024", LongBert, functools.partial(tokens, length=1024)),
    BenchCase("bert_base_1024_dropout", functools.partial(LongBert, 0.1), functools.partial(tokens, length=1024)),
    BenchCase("gpt_block_1024", GptBlock, activations),
]


@dataclass(frozen=True)
class Cell:
    """A model that is compiled in one precision and layout.

    Attributes:
        model: The model's name.
        dtype: The name of a dtype of torch.
        layout: One of `LAYOUTS`, or "" for a model without images.
    """

    model: str
    dtype: str
    layout: str = ""

    def __str__(self) -> str:
        return " ".join(part for part in (self.model, self.dtype, self.layout) if part)

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def memory_format(self) -> torch.memory_format:
        return torch.channels_last if self.layout == "channels-last" else torch.contiguous_format


@functools.cache
def case(name: str) -> BenchCase:
    return next(case for case in CASES if case.name == name)


def inputs(name: str, batch: int = BATCH) -> tuple[torch.Tensor, ...]:
    return case(name).inputs(batch, torch.Generator().manual_seed(0))


def cells() -> Iterator[Cell]:
    """Yields all cells, grouped by model."""
    for item in CASES:
        has_images = any(tensor.dim() == 4 for tensor in inputs(item.name, batch=1))
        for dtype, layout in itertools.product(DTYPES, LAYOUTS if has_images else ("",)):
            yield Cell(item.name, dtype, layout)
