"""Tests of the cache directory: stored bytes, damaged files, permissions, and limited space."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import dynaxla
from cases.processes import damaged_cache
from dynaxla import config
from dynaxla.errors import OptionError
from dynaxla.runtime import store
from dynaxla.runtime.store import Store
from support import internals
from support.processes.scripts import run_script


def test_put_get_and_clear(tmp_path: Path) -> None:
    store = Store(tmp_path / "new" / "folder")
    assert store.get("key") is None
    store.put("key", b"first")
    store.put("key", b"second")
    store.put("other", b"")
    assert Store(store.folder).get("key") == b"second"
    assert store.get("other") == b""
    partial = store.folder / ".half_written.part"  # another process is writing it
    partial.touch()
    assert list(store) == ["key", "other"]
    store.clear()
    assert list(store) == []
    assert partial.exists()


@pytest.mark.parametrize("damage", [b"", b"short", b"x" * 100], ids=["empty", "short", "other"])
def test_damaged_file(tmp_path: Path, damage: bytes) -> None:
    store = Store(tmp_path)
    store.put("key", b"data")
    (tmp_path / "key").write_bytes(damage)
    assert store.get("key") is None
    store.put("key", b"again")
    assert store.get("key") == b"again"


def test_truncated_file(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.put("key", b"data" * 100)
    content = (tmp_path / "key").read_bytes()
    (tmp_path / "key").write_bytes(content[:-1])
    assert store.get("key") is None


def test_swapped_files(tmp_path: Path) -> None:
    """Each file is complete, but has the name of the other one."""
    store = Store(tmp_path)
    store.put("one", b"first")
    store.put("other", b"second")
    (tmp_path / "one").rename(tmp_path / "between")
    (tmp_path / "other").rename(tmp_path / "one")
    (tmp_path / "between").rename(tmp_path / "other")
    assert store.get("one") is None
    assert store.get("other") is None


def test_old_partial_files_are_deleted(tmp_path: Path) -> None:
    """A recent partial file stays, because another process may be writing it."""
    abandoned, busy = tmp_path / ".old.part", tmp_path / ".new.part"
    abandoned.write_bytes(b"half")
    busy.write_bytes(b"half")
    os.utime(abandoned, (0, 0))
    Store(tmp_path).put("key", b"data")
    assert not abandoned.exists()
    assert busy.exists()


def test_deleted_folder_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = Store(tmp_path / "folder")
    store.put("key", b"data")
    shutil.rmtree(store.folder)
    for key in ("key", "other"):
        store.put(key, b"data")
        assert store.get(key) is None
    assert caplog.text.count("could not write an entry") == 1


def test_full_store_drops_the_least_recently_used_entries(tmp_path: Path) -> None:
    """Half of the capacity stays in use."""
    store = Store(tmp_path, capacity=1000)
    for number in range(9):
        store.put(str(number), b"x" * 70)
        os.utime(tmp_path / str(number), (number, number))
    assert store.get("0") is not None
    store.put("last", b"x" * 300)
    assert list(store) == ["0", "last"]


def test_concurrent_writers(tmp_path: Path) -> None:
    store = Store(tmp_path)
    values: list[bytes | None] = []

    def write(letter: bytes) -> None:
        for _ in range(50):
            store.put("key", letter * 5000)
            values.append(store.get("key"))

    threads = [threading.Thread(target=write, args=(letter,)) for letter in (b"a", b"b", b"c")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(values) == 150
    assert set(values) <= {letter * 5000 for letter in (b"a", b"b", b"c")}
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="no POSIX permissions")
def test_unsafe_and_unusable_folders_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new folder is accessible only to the user."""
    folder = Store(tmp_path / "programs").folder
    assert folder.stat().st_mode & 0o777 == 0o700
    for mode in (0o720, 0o702):
        folder.chmod(mode)
        with pytest.raises(OptionError, match="other users"):
            Store(folder)
    folder.chmod(0o755)
    with monkeypatch.context() as patch:
        internals.root_user(patch, -1)
        patch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
        with pytest.raises(OptionError, match="belongs to another user"):
            Store(folder)
        internals.root_user(patch, folder.stat().st_uid)
        Store(folder)
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda *_: False)
        with pytest.raises(OptionError, match="cannot be read"):
            Store(folder)
    with pytest.raises(OptionError, match="cannot be used: embedded null"):
        Store(tmp_path / "a\0b")
    (tmp_path / "file").touch()
    with pytest.raises(OptionError, match="cannot be used: Not a directory"):
        Store(tmp_path / "file" / "below")
    folder.chmod(0o777)
    with pytest.raises(OptionError, match="other users"):
        torch.compile(torch.exp, backend="dynaxla", options={"cache": str(tmp_path)})(torch.ones(2))


def test_read_only_directory_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """As in a container whose image has the cache: stored entries are used, and nothing is written."""

    def f(x: torch.Tensor) -> torch.Tensor:
        return x.tan() + 3

    options = {"cache": str(tmp_path)}
    torch.compile(f, backend="dynaxla", options=options)(torch.ones(3))
    files = sorted(tmp_path.rglob("*"))
    assert len(files) > 2
    access, mkdir = os.access, Path.mkdir

    def make(path: Path, *args: Any, **kwargs: Any) -> None:
        if tmp_path in path.parents and not path.exists():
            raise OSError(errno.EROFS, "Read-only file system")
        mkdir(path, *args, **kwargs)

    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK and access(path, mode))
    monkeypatch.setattr(Path, "mkdir", make)
    config.open_store.cache_clear()
    store._warn_of_read_only.cache_clear()
    torch._dynamo.reset()
    before = dynaxla.metrics.snapshot()
    assert torch.equal(torch.compile(f, backend="dynaxla", options=options)(torch.ones(3)), f(torch.ones(3)))
    torch.compile(lambda x: x.cos() - 2, backend="dynaxla", options={**options, "tune": True})(torch.ones(3))
    after = dynaxla.metrics.snapshot()
    used = sum(after.get(name, 0) - before.get(name, 0) for name in ("graphs_from_cache", "recalls", "loads"))
    assert used, "no stored entry was used"
    assert list(Store(tmp_path / "no such part")) == []
    assert sorted(tmp_path.rglob("*")) == files
    assert [record.levelname for record in caplog.records if "is read-only: its programs are used" in record.message] == ["WARNING"]
    config.open_store.cache_clear()


def test_full_disk_loses_no_result_and_leaves_no_partial_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    compiled = torch.compile(lambda x: x.tan() + 1, backend="dynaxla", options={"cache": str(tmp_path)})
    torch.testing.assert_close(compiled(torch.ones(3)), torch.ones(3).tan() + 1)
    assert "No space left" in caplog.text
    assert not list((tmp_path / "programs").iterdir())


@pytest.mark.sample(usual=2)
@pytest.mark.parametrize("damage", damaged_cache.DAMAGES)
def test_damaged_directory(damage: str, tmp_path: Path) -> None:
    """Damages of traced graphs, records and programs. The process has no ops of other tests. The folder's name has non-ASCII letters."""
    run_script(
        "import sys; from cases.processes import damaged_cache; damaged_cache.check(*sys.argv[1:])", [damage, str(tmp_path / "köş 目录")]
    )
