"""A bundle gathers what its user keeps or finds, whether a store is behind it or not."""

from __future__ import annotations

from pathlib import Path

from dynaxla.runtime.bundles import Bundle
from dynaxla.runtime.store import Store


def test_what_is_kept_or_found_is_gathered(tmp_path: Path) -> None:
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
