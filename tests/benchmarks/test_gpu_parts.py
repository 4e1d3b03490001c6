"""Tests of the parts of `python -m benchmarks gpu`."""

from __future__ import annotations

import itertools

import pytest
import torch
from benchmarks.engines import ENGINES
from benchmarks.gpu_parts import PARTS


def test_parts_cover_each_precision_batch_size_and_mode_once() -> None:
    usual = {name: part for name, part in PARTS.items() if not name.endswith("-variants")}
    combinations = [(part.precision, part.batch, part.training, "inductor_autotuned" in part.engines) for part in usual.values()]
    assert sorted(combinations) == sorted(itertools.product(("float32", "tf32", "bfloat16"), (1, 32), ("", "adamw"), (False, True)))
    assert len({part.title for part in PARTS.values()}) == len(PARTS) == 26
    assert all(set(part.engines) <= set(ENGINES) for part in PARTS.values())
    part = PARTS["bfloat16-batch32-training"]
    assert (part.dtype, part.batch, part.training) == (torch.bfloat16, 32, "adamw")
    assert part.ratios == [("eager", "dynaxla_step"), ("inductor", "dynaxla_step"), ("dynaxla", "dynaxla_step")]
    assert PARTS["tf32-batch1-autotuned"].title == "float32 with TF32, batch 1, autotuned"
    assert PARTS["float32-batch1-training"].title == "Training with adamw, float32, batch 1"


def test_set_precision_changes_torchs_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch's own tests, if this process has imported them, forbid such assignments.
    monkeypatch.setitem(torch.backends.ContextProp.__set__.__globals__, "flags_frozen", lambda: False)
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        for name, expected in {
            "tf32-batch1": ("high", True),
            "float32-batch1": ("highest", False),
            "bfloat16-batch1": ("highest", False),
        }.items():
            PARTS[name].set_precision()
            assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == expected
    finally:
        torch.set_float32_matmul_precision(before[0])
        for backend in ("cuda", "mkldnn"):  # set_float32_matmul_precision has set both to "ieee"; they were not set before
            torch._C._set_fp32_precision_setter(backend, "matmul", "none")
        torch.backends.cudnn.allow_tf32 = before[1]
