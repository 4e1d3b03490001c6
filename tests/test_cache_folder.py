"""Tests of the path of the cache directory, and of the check for an empty directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynaxla.cache_folder import cache_folder, is_known_to_be_empty


def test_path_of_the_cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder("tuning", None) == tmp_path / "dynaxla" / "tuning"
    assert cache_folder("tuning", tmp_path / "mine") == tmp_path / "mine" / "tuning"
    assert cache_folder("tuning", "") is None
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder("tuning", None) == tmp_path / "home" / ".cache" / "dynaxla" / "tuning"
    assert cache_folder("tuning", "~/mine") == tmp_path / "home" / "mine" / "tuning"


def test_is_known_to_be_empty(tmp_path: Path) -> None:
    assert is_known_to_be_empty(tmp_path)
    assert is_known_to_be_empty(tmp_path / "new" / "folder")
    (tmp_path / ".part").touch()
    assert is_known_to_be_empty(tmp_path)
    (tmp_path / "entry").touch()
    assert not is_known_to_be_empty(tmp_path)
    assert not is_known_to_be_empty(tmp_path / "entry")
    assert not is_known_to_be_empty(tmp_path / "entry" / "folder"), "opening a store there is an error"
