"""How XLA's text says between which devices a program moves something."""

from __future__ import annotations

import pytest

from dynaxla.runtime.replica_groups import groups_in

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
def testgroups_in(text: str, groups: list[list[int]] | None) -> None:
    found = groups_in(text)
    assert (None if found is None else sorted(map(sorted, found))) == groups


def test_what_is_not_known_is_no_axis() -> None:
    with pytest.raises(ValueError, match="replica_groups"):
        groups_in("replica_groups=@something, to_apply=%add")
