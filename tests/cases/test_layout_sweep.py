"""A sample of the sweep over ops and memory layouts. `make layouts` runs all cases, with results from XLA."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest
import torch

from cases.faults.ops import FAULTS
from cases.layout_sweep.__main__ import judged, main
from cases.layout_sweep.cases import LAYOUTS, LayoutCase, cases
from cases.layout_sweep.trial import differences, promised_strides, quickly_compiled
from lowering.table import ROWS

aten = torch.ops.aten
LOG_SIGMOID = next(row for row in ROWS if row.op is aten.log_sigmoid_forward.default)


@pytest.mark.filterwarnings("ignore::UserWarning")  # eager mode's kernels warn of deprecated and beta features
def test_sample_has_the_strides_of_eager_mode() -> None:
    sample = random.Random(0).sample(list(cases()), 60)
    assert {case.layout for case in sample} == set(LAYOUTS)
    bad = {}
    with promised_strides():
        for layout in LAYOUTS:
            group = [case for case in sample if case.layout == layout]
            for first in range(0, len(group), 8):
                bad.update({item["case"]: item["difference"] for item in judged(group[first : first + 8]) if item.get("aot_eager") == ""})
    assert bad == {}


def test_most_rows_have_samples_in_every_layout() -> None:
    rows_with_samples = {layout: sum(bool(LayoutCase(row, layout).samples()) for row in ROWS[::40]) for layout in LAYOUTS}
    assert all(count > 0.8 * len(ROWS[::40]) for count in rows_with_samples.values()), rows_with_samples
    x = LayoutCase(LOG_SIGMOID, "channels-last").samples()[0][0]
    assert x.is_contiguous(memory_format=torch.channels_last)
    assert not x.is_contiguous()


@pytest.mark.parametrize("computed", [promised_strides, quickly_compiled], ids=["strides from torch", "strides from XLA"])
def test_wrong_strides_are_found(computed: object) -> None:
    case = LayoutCase(dataclasses.replace(LOG_SIGMOID), "transposed")
    with computed():  # type: ignore[operator]
        assert differences([case]) == {}
        with FAULTS["strides_are_those_of_fake_tensors"]():
            assert "strides" in differences([case])[str(case)]


def test_second_run_uses_the_known_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--strides", "--match", "^aten.(exp|log_sigmoid_forward).default, (sliced|expanded)", "--results", str(tmp_path / "found")]
    assert main(arguments) == 0
    assert main(arguments) == 0
    first, second = capsys.readouterr().out.split("4 cases, ")[1:]
    assert first.startswith("0 of them known")
    assert second.startswith("4 of them known")
    assert "sliced: 2 as in eager mode" in second
