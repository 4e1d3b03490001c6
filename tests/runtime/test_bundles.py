"""Tests of bundles, which collect all entries that are written or found, with and without a store."""

from __future__ import annotations

from pathlib import Path

from dynaxla.runtime.bundles import Bundle
from dynaxla.runtime.store import Store


def test_bundle_has_written_and_found_entries(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.put("there", b"before")
    bundle = Bundle({("records", "one"): b"given"})
    records, programs = bundle.in_front_of("records", store), bundle.in_front_of("programs", None)
    assert records.get("one") == b"given"
    assert records.get("there") == b"before"
    assert records.get("nowhere") is None
    records.put("new", b"record")
    programs.put("new", b"program")
    assert store.get("new") == b"record"
    assert programs.get("new") == b"program"
    assert programs.get("there") is None
    assert bundle.entries == {
        ("records", "one"): b"given",
        ("records", "there"): b"before",
        ("records", "new"): b"record",
        ("programs", "new"): b"program",
    }
