"""Verdicts are plain data, and a line in the log."""

from __future__ import annotations

import json
import logging

import pytest

from dynaxla.observe import verdicts


def test_a_verdict_is_kept_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    verdicts.reset()
    with caplog.at_level(logging.INFO, "dynaxla"):
        verdicts.note(verdicts.Verdict("dynaxla_0", "inference", (16,), "eager", "the fastest", {"eager": 2e-6}, {"inductor": "it failed"}))
    line = "dynaxla_0 (inference) for sizes up to [16] is run by eager: the fastest; eager 2.0 us; inductor: it failed"
    assert caplog.messages == [line]
    (found,) = verdicts.verdicts()
    assert json.loads(json.dumps(found))["seconds"] == {"eager": 2e-6}
    verdicts.reset()
    assert verdicts.verdicts() == []
