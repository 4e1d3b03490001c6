"""Tests of the collectives that XLA's text of a program has: their groups of devices and their sizes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dynaxla.engine.executable import ProgramRun
from dynaxla.runtime.replica_groups import groups_in
from dynaxla.sharding.traffic import collectives_of

ROWS, COLUMNS = [[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 4], [1, 5], [2, 6], [3, 7]]


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add", ROWS),
        ("replica_groups={}, to_apply=%add", None),
        ("to_apply=%add", None),
        ("source_target_pairs={{0,1},{2,3}}", [[0, 1], [2, 3]]),
        ("replica_groups=[2,4]<=[8], to_apply=%add", ROWS),
        ("replica_groups=[4,2]<=[2,4]T(1,0), to_apply=%add", COLUMNS),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}, to_apply=%add", ROWS),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_0'}, to_apply=%add", COLUMNS),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_0','axis_1'}, to_apply=%add", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("replica_groups=mesh['axis_0'=8] {'axis_0':(2)4}, to_apply=%add", ROWS),
        ("replica_groups=mesh['axis_0'=8] {'axis_0':(1)2}, to_apply=%add", COLUMNS),
        ("replica_groups=mesh['axis_0'=4,'axis_1'=2], device_ids=([2,4]T(1,0)) {'axis_0'}, to_apply=%add", ROWS),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=2], device_ids=(0,2,1,3) {'axis_1'}, to_apply=%add", [[0, 2], [1, 3]]),
    ],
)
def test_groups_in(text: str, groups: list[list[int]] | None) -> None:
    result = groups_in(text)
    assert (None if result is None else sorted(map(sorted, result))) == groups


def test_unknown_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="replica_groups"):
        groups_in("replica_groups=@something, to_apply=%add")


# Shortened from a program for "v5e:2x2" (libtpu 0.0.42).
TPU_PROGRAM = """
%async_start (param_0.1: bf16[2,8]) -> (bf16[2,8], bf16[4,8]) {
  %all-gather.1 = bf16[4,8]{1,0} all-gather(%param_0.1), channel_id=4, replica_groups=[2,2]<=[2,2]T(1,0), dimensions={0}, \
frontend_attributes={chain_id="0"}
}

%async_end (param_0.2: bf16[2,8]) -> bf16[4,8] {
  %all-gather.2 = bf16[4,8]{1,0} all-gather(%param_0.2), channel_id=4, replica_groups=[2,2]<=[2,2]T(1,0), dimensions={0}, \
frontend_attributes={chain_id="0"}
}

%all-reduce-scatter.2 (input_0: f32[8,16], input_1: f32[16,8]) -> (f32[4,16], f32[16,4]) {
  %all-reduce.1 = (f32[8,16]{1,0}, f32[16,8]{1,0}) all-reduce(%input_0, %input_1), channel_id=1, replica_groups={{0,2},{1,3}}, to_apply=%add
}

ENTRY %main (param: f32[8,16]) -> f32[8,16] {
  %fusion.1 = (f32[4,16]{1,0}, f32[16,4]{1,0}) fusion(%param, %param), kind=kCustom, calls=%all-reduce-scatter.2
  %all-gather-start.1 = ((f32[8,16]{1,0}), f32[16,16]{1,0}) all-gather-start(%param), channel_id=5, replica_groups={{0,1},{2,3}}
  %all-gather-done.1 = f32[16,16]{1,0} all-gather-done(%all-gather-start.1)
  %collective-permute-start.1 = (f32[8,16]{1,0}, f32[8,16]{1,0}, u32[], u32[]) collective-permute-start(%param), channel_id=7, \
source_target_pairs={{0,1},{1,0}}
  %all-reduce-start.1 = (f32[8,16]{1,0}, f32[16,8]{1,0}) all-reduce-start(%param, %param), channel_id=8, replica_groups={{0,2},{1,3}}, \
to_apply=%add
  ROOT %all-reduce.2 = f32[8,16]{1,0} all-reduce(%param), channel_id=6, replica_groups={{0,1},{2,3}}, to_apply=%add
}
"""


def test_collectives_of_a_tpu() -> None:
    """A gather in several parts counts once. An all-reduce of which each device keeps only a part counts as a reduce-scatter."""
    mesh = SimpleNamespace(axis_names=("rows", "columns"), size=4, shape={"rows": 2, "columns": 2})
    program: Any = SimpleNamespace(mesh=mesh, text=lambda: TPU_PROGRAM.replace("\\\n", ""))
    collectives = {(item.kind, item.axes): (item.count, item.bytes) for item in collectives_of(ProgramRun("step", program, ""))}
    assert collectives == {
        ("all-gather", "rows"): (1, 4 * 8 * 2),
        ("all-gather", "columns"): (1, 16 * 16 * 4),
        ("reduce-scatter", "rows"): (1, 4 * 16 * 4 + 16 * 4 * 4),
        ("all-reduce", "columns"): (1, 8 * 16 * 4),
        ("all-reduce", "rows"): (1, 2 * 8 * 16 * 4),
        ("collective-permute", "[0, 1]"): (1, 8 * 16 * 4),
    }
