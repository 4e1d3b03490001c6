"""The tables of `python -m benchmarks gpu`: each precision and batch size, inference and training, against Inductor, also autotuned."""

from __future__ import annotations

from dataclasses import dataclass

import torch

INFERENCE = ("eager", "inductor", "dynaxla")
TRAINING = ("eager", "inductor", "dynaxla", "dynaxla_step")
# Autotuning takes minutes for each model, so these engines have tables of their own.
AUTOTUNED = ("eager", "inductor_autotuned", "dynaxla")
AUTOTUNED_TRAINING = ("eager", "inductor_autotuned", "dynaxla_step")
# The same program without PyTorch around it, and with other XLA options.
VARIANTS = ("jax", "xla_fewer_roundings", "xla_small_graphs", "dynaxla")


@dataclass(frozen=True)
class Part:
    """One table.

    Attributes:
        precision: float32, tf32 or bfloat16.
        batch: the batch size.
        engines: the engines that are compared.
        training: the name of an optimizer, or "" for inference.
        calls: calls that are timed together.
    """

    precision: str
    batch: int
    engines: tuple[str, ...]
    training: str = ""
    calls: int = 10

    @property
    def title(self) -> str:
        precision = {"tf32": "float32 with TF32"}.get(self.precision, self.precision)
        subject = f"Training with {self.training}, " if self.training else ""
        kind = {AUTOTUNED: ", autotuned", AUTOTUNED_TRAINING: ", autotuned", VARIANTS: ", variants"}.get(self.engines, "")
        return f"{subject}{precision}, batch {self.batch}{kind}"

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.precision == "bfloat16" else torch.float32

    @property
    def ratios(self) -> list[tuple[str, str]]:
        """Pairs of engines: each other engine, and the last one, which is the variant of dynaxla that the table is about."""
        return [(name, self.engines[-1]) for name in self.engines[:-1]]

    def set_precision(self) -> None:
        """Sets torch's TF32 settings for the whole process; all engines follow them."""
        is_coarse = self.precision == "tf32"
        torch.set_float32_matmul_precision("high" if is_coarse else "highest")
        torch.backends.cudnn.allow_tf32 = is_coarse


def _parts() -> dict[str, Part]:
    found = {}
    for autotuned in ("", "-autotuned"):
        for training in ("", "-training"):
            engines = {"": INFERENCE, "-training": TRAINING, "-autotuned": AUTOTUNED, "-training-autotuned": AUTOTUNED_TRAINING}
            for precision in ("float32", "tf32", "bfloat16"):
                for batch in (1, 32):
                    part = Part(precision, batch, engines[training + autotuned], "adamw" if training else "")
                    found[f"{precision}-batch{batch}{training}{autotuned}"] = part
    for batch in (1, 32):
        found[f"bfloat16-batch{batch}-variants"] = Part("bfloat16", batch, VARIANTS)
    return found


PARTS = _parts()

# Parts and models that are requested most, which are measured first.
FIRST = [
    ("bfloat16-batch32-training", "bert_base"),
    ("bfloat16-batch32", "resnet50"),
    ("bfloat16-batch32-training", "resnet50"),
    ("bfloat16-batch32-training", "gpt_block"),
    ("bfloat16-batch32", "bert_base"),
    ("bfloat16-batch32", "gpt_block"),
    *[("bfloat16-batch32-variants", name) for name in ("bert_base", "resnet50", "gpt_block")],
    *[(f"bfloat16-batch32{training}-autotuned", name) for name in ("bert_base", "resnet50", "gpt_block") for training in ("-training", "")],
]
