"""Tests of the check of docstrings and comments."""

from __future__ import annotations

import pytest

from commands import prose


@pytest.mark.quick
@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('def f():\n    """What the caller passes."""', "begins with 'What'"),
        ('"""Whether it holds."""', "begins with 'Whether'"),
        ("x = 1  # mended in torch 2.14", "'mended'"),
        ("# the one beside it", "'beside'"),
        ('"""A thing.\n\nAttributes: a (its size); b (its name)\n"""', "write one a line"),
        ('def f():\n    """Returns the size."""  # fixed, see engine/xla.py, cpu/onednn.py and torch/a.py', ""),
        ("# see engine/nothing.py", "there is no engine/nothing.py"),
        ('text = "what is told beside the code is not looked at"', ""),
    ],
)
def test_findings(source: str, expected: str) -> None:
    messages = [message for _, message in prose.findings(source)]
    assert [expected in message for message in messages] == ([True] if expected else [])
