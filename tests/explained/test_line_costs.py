"""Tests of the attribution of XLA's instructions and profile to lines."""

from __future__ import annotations

import pytest

from dynaxla.explained.line_costs import HloText

TEXT = """jit_program, is_scheduled=true

%fused (p: f32[8,4]) -> f32[8,4] {
  %p = f32[8,4]{1,0} parameter(0)
  %one = f32[] constant(1)
  %ones = f32[8,4]{1,0} broadcast(%one), dimensions={}, metadata={op_name="jit(program)/line[9]/add"}
  %added = f32[8,4]{1,0} add(%p, %ones), metadata={op_name="jit(program)/line[3]/add" stack_frame_id=2}
  %tripled = f32[8,4]{1,0} multiply(%added, %ones), metadata={op_name="jit(program)/line[3]/mul"}
  ROOT %less = f32[8,4]{1,0} subtract(%tripled, %p), metadata={op_name="jit(program)/line[2]/at[x]/line[5]/sub"}
}

%moved (q: f32[8,4]) -> f32[4,8] {
  %q = f32[8,4]{1,0} parameter(0)
  ROOT %turned = f32[4,8]{1,0} transpose(%q), dimensions={1,0}
}

%body (s: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %s = (s32[], f32[4,8]{1,0}) parameter(0)
  ROOT %sorted = (s32[], f32[4,8]{1,0}) tuple(%s), metadata={op_name="jit(program)/line[7]/while"}
}

ENTRY %main (a: f32[8,4]) -> f32[4,8] {
  %a = f32[8,4]{1,0} parameter(0), metadata={op_name="arrays[0]"}
  %fusion.1 = f32[8,4]{1,0} fusion(%a), kind=kLoop, calls=%fused, metadata={op_name="jit(program)/line[5]/sub"}
  %copy_fusion = f32[4,8]{1,0} fusion(%fusion.1), kind=kLoop, calls=%moved
  %product = f32[4,8]{1,0} custom-call(%copy_fusion), custom_call_target="__onednn$matmul", metadata={op_name="jit(program)/line[6]/dot"}
  %helper = f32[4,8]{1,0} exponential(%product), metadata={op_name="helper"}
  %loop = (s32[], /*index=1*/f32[4,8]{1,0}) while(%helper), condition=%cond, body=%body, metadata={op_name="jit(program)/line[7]/while"}
  ROOT %last = f32[4,8]{1,0} get-tuple-element(%loop), index=1
}
"""


def test_time_of_a_fusion_is_divided_among_its_lines() -> None:
    text = HloText(TEXT)
    assert text.line_shares("fusion.1") == {3: pytest.approx(2 / 3), 5: pytest.approx(1 / 3)}
    assert text.line_shares("product") == {6: 1}


def test_copies_have_the_line_of_their_operand_and_helpers_have_none() -> None:
    text = HloText(TEXT)
    assert text.line_shares("copy_fusion") == {5: 1}
    assert text.line_shares("helper") == {-1: 1}


def test_instructions_of_events() -> None:
    text = HloText(TEXT)
    assert text.instruction_of("product__onednn$matmul") == "product"
    assert text.instruction_of("fusion.1") == "fusion.1"
    assert text.instruction_of("fusion.2") is None
    assert text.kind("product") == "oneDNN matmul"
    assert [name for name in ("loop", "product", "fusion.1") if text.is_control_flow(name)] == ["loop"]
    own = ["fusion.1", "copy_fusion", "product__onednn$matmul", "helper", "loop"]
    assert text.match_score(own) > text.match_score(own[:2]) > text.match_score(["fusion.2"]) == 0
