"""Tests of tests/support/json_lines.py."""

from __future__ import annotations

from pathlib import Path

from support import json_lines


def test_results_are_appended_after_an_unfinished_line(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "results.jsonl"
    assert list(json_lines.load(path)) == []
    for text in ('{"a": 1}\n{"b"', '{"c": 2}\n', '{"d": 3}\n'):
        with json_lines.open_to_append(path) as file:
            file.write(text)
    assert list(json_lines.load(path)) == [{"a": 1}, {"c": 2}, {"d": 3}]
