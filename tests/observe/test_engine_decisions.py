"""Tests of the records of chosen engines."""

from __future__ import annotations

import json
import logging

import pytest

from dynaxla.observe import engine_decisions


def test_verdict_is_stored_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    engine_decisions.reset()
    with caplog.at_level(logging.INFO, "dynaxla"):
        engine_decisions.record_verdict(
            engine_decisions.Verdict("dynaxla_0", "inference", (16,), "eager", "the fastest", {"eager": 2e-6}, {"inductor": "it failed"})
        )
    line = "dynaxla_0 (inference) for sizes up to [16] is run by eager: the fastest; eager 2.0 us; inductor: it failed"
    assert caplog.messages == [line]
    (verdict,) = engine_decisions.verdicts()
    assert json.loads(json.dumps(verdict))["seconds"] == {"eager": 2e-6}
    engine_decisions.reset()
    assert engine_decisions.verdicts() == []
