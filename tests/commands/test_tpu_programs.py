"""Tests of the command that compiles for TPUs: its figures, budgets and page. Nothing is compiled for TPUs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
import torch
from benchmarks.suites import GptBlock

from commands.compiled_programs import budgets
from commands.tpu_programs import __main__ as command
from commands.tpu_programs import libtpu, plain_jax, report
from commands.tpu_programs.blocks import Gpt, LlamaBlock
from commands.tpu_programs.cells import BUDGETS, LIMITS, cells
from commands.tpu_programs.figures import figures
from support.comparisons.compare import assert_equal

# Shortened from programs for "v5e:2x2" (libtpu 0.0.42).
PROGRAM = """HloModule jit_program, entry_computation_layout={(f32[8,4]{1,0})->f32[8,8]{1,0}}

%body (state: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %state = (s32[], f32[8,4]{1,0}) parameter(0)
  ROOT %fusion.9 = (s32[], f32[8,4]{1,0}) fusion(%state), kind=kLoop, calls=%fused, backend_config={"estimated_cycles":"10"}
}

%condition (state.1: (s32[], f32[8,4])) -> pred[] {
  %state.1 = (s32[], f32[8,4]{1,0}) parameter(0)
  %count = s32[]{:T(128)} constant(5)
  ROOT %less = pred[] fusion(%state.1), kind=kLoop, calls=%fused, backend_config={"estimated_cycles":"1"}
}

%fused_product (p: f32[8,4], q: bf16[8,4]) -> f32[8,8] {
  %p = f32[8,4]{1,0} parameter(0)
  %q = bf16[8,4]{1,0} parameter(1)
  %wide = f32[8,4]{1,0} convert(%q)
  %dot.1 = f32[8,8]{1,0} convolution(%p, %wide), dim_labels=bf_oi->bf
  ROOT %dot.2 = f32[8,8]{1,0} dot(%p, %q), lhs_contracting_dims={1}
}

ENTRY %main (arg: f32[8,4]) -> f32[8,8] {
  %arg = f32[8,4]{1,0:T(8,128)} parameter(0)
  %prefetch = (f32[8,4]{1,0:T(8,128)S(1)}, f32[8,4]{1,0}, u32[]) copy-start(%arg)
  %prefetched = f32[8,4]{1,0:T(8,128)S(1)} copy-done(%prefetch)
  %copy.1 = f32[8,4]{0,1:T(8,128)} copy(%prefetched), backend_config={"estimated_cycles":"100"}
  %while.1 = (s32[], f32[8,4]{1,0}) while(%copy.1), condition=%condition, body=%body
  %kernel = f32[8,4]{1,0} custom-call(%copy.1), custom_call_target="tpu_custom_call"
  %hint = f32[8,4]{1,0} custom-call(%kernel), custom_call_target="AssumeGatherIndicesInBound"
  ROOT %product = f32[8,8]{1,0} fusion(%kernel, %kernel), kind=kOutput, calls=%fused_product, backend_config={"estimated_cycles":"1000"}
}
"""


def test_figures_of_a_program() -> None:
    """The loop counts five times; a copy to the vector memory does not count as a copy; one of two products has float32 operands."""
    memory: Any = SimpleNamespace(temp_size_in_bytes=3 << 20, argument_size_in_bytes=1 << 19)
    assert figures(PROGRAM, memory, {"bytes accessed": 2.5e9}) == {
        "cycles": 100 + 5 * (10 + 1) + 1000,
        "instructions": 6,
        "copies": 1,
        "float32_products": 1,
        "memory_mib": 3.0,
        "argument_mib": 0.5,
        "gigabytes": 2.5,
        "calls": {"tpu_custom_call": 1},
    }


def test_cells_and_budgets() -> None:
    """Ten models in three settings, two of them also in float32, and a JAX reference for the blocks."""
    names = [str(cell) for cell in cells()]
    assert len(names) == len(set(names))
    assert sum(name.startswith("resnet18: ") for name in names) == 6
    saved = budgets.load(BUDGETS)
    assert set(saved) <= set(names)
    assert list(LIMITS.exceeded(saved, saved)) == []
    assert "JAX" in saved["GPT block: training, 8 x 1024 x 768"]["programs"]


def test_rows_of_the_page() -> None:
    figures = {"cycles": 1234567, "instructions": 6, "copies": 1, "float32_products": 0, "memory_mib": 3.0, "argument_mib": 0.5}
    figures |= {"gigabytes": 2.5, "calls": {"tpu_custom_call": 1}, "collectives": {"all-gather": (2, 3 << 20)}}
    rows = list(report._rows("batch 8", {"programs": {"forward": figures, "backward": figures}, "seconds": 12.4}))
    assert rows[0] == "| batch 8 | forward | 1,235 | 3.0 | 0.5 | 2.50 | 6 | 1 | 0 | 1 `tpu_custom_call`, 2 all-gather (3.0) | 12 |"
    assert rows[1].startswith("|  | backward |")
    assert list(report._rows("batch 8", {"error": "Traceback\nOutOfMemory: too large", "seconds": 1.0})) == [
        "| batch 8 | | | | | | | | | failed: OutOfMemory: too large | |"
    ]


def test_missing_libtpu_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(libtpu.LibtpuError, match="make tpu-programs"):
        libtpu.environment(tmp_path)
    with pytest.raises(SystemExit, match="has all cells"):
        command.main(["--match", "AdamW"])


@pytest.mark.parametrize(
    ("block", "jax_block", "width"),
    [pytest.param(GptBlock, plain_jax.gpt_block, 768, id="gpt"), pytest.param(LlamaBlock, plain_jax.llama_block, 1024, id="llama")],
)
def test_jax_blocks_give_the_results_of_torch(block: Any, jax_block: Any, width: int) -> None:
    torch.manual_seed(0)
    model, x = block(), torch.randn(1, 6, width)
    arrays = {name: jax.numpy.asarray(value.detach().numpy()) for name, value in model.named_parameters()}
    result = jax_block(arrays, jax.numpy.asarray(x.numpy()))
    with torch.no_grad():
        assert_equal(torch.tensor(result.tolist()), model(x), tolerance=(1e-3, 1e-4))


def test_gpt_is_causal() -> None:
    model = Gpt(layers=1, width=16, vocabulary=11, length=8, heads=2)
    tokens = torch.randint(0, 11, (2, 8))
    assert model(tokens).shape == (2, 8, 11)
    assert torch.allclose(model(tokens)[:, :3], model(tokens[:, :3]), atol=1e-5), "the model must be causal"
