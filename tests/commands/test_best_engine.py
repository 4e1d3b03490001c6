"""Tests of the table of chosen engines: its models, ratios and page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from commands import best_engine
from support.models import small_models

GOOD = {
    "ms": {"uncompiled": 1.0, "eager": 4.0, "inductor": 2.0, "dynaxla": 3.0, "chosen": 2.5},
    "chosen": ["inductor"], "choices": [["inductor"], ["dynaxla"], ["inductor"]], "ratios": [0.8, 0.7, 0.9], "left_out": {},
}  # fmt: skip


def test_all_models_exist() -> None:
    assert len(best_engine.names()) == len({*best_engine.names()}) == 44
    assert (len(best_engine.TIMM), len(best_engine.TRANSFORMERS)) == (20, 10)
    assert {*best_engine.TIMM} <= small_models.TIMM.keys()
    assert {*best_engine.TRANSFORMERS} <= small_models.TRANSFORMERS.keys()


def test_inputs_have_one_sample() -> None:
    model, args, keywords = best_engine.model_of("T5Model")
    assert args[0].shape[0] == keywords["decoder_input_ids"].shape[0] == 1
    with torch.no_grad():
        assert model(*args, **keywords).last_hidden_state.shape[0] == 1
    with pytest.raises(SystemExit):
        best_engine.main(["no_such_model"])


def test_page_and_exit_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    rows: dict[str, Any] = {"mlp_2": GOOD, "mlp_50": {"failure": "no memory"}, "resnet18": {**GOOD, "ms": {**GOOD["ms"], "chosen": 2.0}}}
    measured: list[str] = []
    monkeypatch.setattr(best_engine, "measured", lambda name, training: (measured.append(name), rows[name])[1])
    assert best_engine.main(["mlp_2", "mlp_50", "resnet18", "--output", str(tmp_path)]) == 1
    page = (tmp_path / "engines.md").read_text()
    assert "| mlp_2 | 1 | 4 | 2 | 3 | 2.5 | 0.80 | 0.80 0.70 0.90 | inductor; dynaxla |" in page
    assert "failed: no memory" in page
    assert "| **minimum** |" in page
    assert "**0.894**" in page
    assert best_engine.main(["resnet18", "--output", str(tmp_path)]) == 0  # stored, and good
    assert measured == ["mlp_2", "mlp_50", "resnet18"]
    assert "resnet18 1.000" in capsys.readouterr().out


def test_middle_returns_the_median_ratio() -> None:
    measurements = [{"ms": {**GOOD["ms"], "chosen": chosen}, "chosen": [str(chosen)]} for chosen in (4.0, 2.0, 2.5)]
    row = best_engine.middle(measurements)
    assert row["ms"]["chosen"] == 2.5
    assert row["ratios"] == [0.5, 1.0, 0.8]
    assert row["choices"] == [["4.0"], ["2.0"], ["2.5"]]
