"""The cache directory: programs that a later process need not compile, and what may go wrong with files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from dynaxla.errors import OptionError
from dynaxla.lowering.cpu import onednn
from dynaxla.observe import metrics
from dynaxla.runtime.store import Store


def test_keeps_bytes(tmp_path: Path) -> None:
    store = Store(tmp_path / "new" / "folder")
    assert store.get("key") is None
    store.put("key", b"first")
    store.put("key", b"second")
    store.put("other", b"")
    assert Store(store.folder).get("key") == b"second"
    assert store.get("other") == b""
    assert list(store) == ["key", "other"]
    store.clear()
    assert list(store) == []


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


def test_makes_room(tmp_path: Path) -> None:
    """The least recently used goes first; what was read lately stays."""
    store = Store(tmp_path, capacity=1000)
    for number in range(9):
        store.put(str(number), b"x" * 70)
        os.utime(tmp_path / str(number), (number, number))
    assert store.get("0") is not None
    store.put("last", b"x" * 300)
    assert {"0", "last"} <= set(store)
    assert "1" not in store
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 1000


def test_concurrent_writers(tmp_path: Path) -> None:
    store = Store(tmp_path)
    seen: list[bytes | None] = []

    def write(letter: bytes) -> None:
        for _ in range(50):
            store.put("key", letter * 5000)
            seen.append(store.get("key"))

    threads = [threading.Thread(target=write, args=(letter,)) for letter in (b"a", b"b", b"c")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 150
    assert set(seen) <= {letter * 5000 for letter in (b"a", b"b", b"c")}
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="no POSIX permissions")
def test_writable_by_others(tmp_path: Path) -> None:
    (tmp_path / "programs").mkdir()
    (tmp_path / "programs").chmod(0o777)
    with pytest.raises(OptionError, match="other users"):
        torch.compile(torch.exp, backend="dynaxla", options={"cache": str(tmp_path)})(torch.ones(2))


def test_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OptionError, match="cannot be used"):
        torch.compile(torch.exp, backend="dynaxla", options={"cache": str(tmp_path / "file")})(torch.ones(2))


SCRIPT = """
import torch
from dynaxla.observe import metrics
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16), torch.nn.Softmax(-1))
x = torch.randn(4, 8)
with torch.no_grad():
    torch.testing.assert_close(torch.compile(net, backend="dynaxla")(x), net(x))
print(metrics.snapshot().get("loads", 0), metrics.snapshot()["compile"])
"""


def test_second_process(tmp_path: Path) -> None:
    """It compiles nothing; nor is it misled by a damaged file, or by one that holds no program."""

    def run() -> str:
        environment = {**os.environ, "DYNAXLA_CACHE": str(tmp_path)}
        return subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True).stdout.strip()

    assert run() == "0 1"
    assert run() == "1 1"
    (file,) = (tmp_path / "programs").iterdir()
    content = file.read_bytes()
    file.write_bytes(content[:-7])
    assert run() == "0 1"
    Store(tmp_path / "programs").put(file.name, b"no program at all")
    assert run() == "0 1"
    assert run() == "1 1"


def test_kept_after_eviction(tmp_path: Path) -> None:
    """A program that the process itself dropped is loaded, and right."""
    store = str(tmp_path)
    x = torch.randn(3, 4)
    for loads in (0, 1):
        torch._dynamo.reset()
        before = metrics.snapshot().get("loads", 0)
        torch.testing.assert_close(torch.compile(lambda x: x.sinh() + 1, backend="dynaxla", options={"cache": store})(x), x.sinh() + 1)
        assert metrics.snapshot().get("loads", 0) - before == loads


def test_dumps_of_xla(tmp_path: Path) -> None:
    """Who asks XLA to write what it does gets that every time."""
    options = {"cache": str(tmp_path / "cache"), "xla": {"xla_dump_to": str(tmp_path / "dump")}}
    for number in range(2):
        torch._dynamo.reset()
        torch.compile(torch.cosh, backend="dynaxla", options=options)(torch.ones(3))
        assert (tmp_path / "dump").exists(), number
        shutil.rmtree(tmp_path / "dump")


def test_kernels_are_not_kept(tmp_path: Path) -> None:
    """A program that calls back into this process means nothing to another."""
    with torch.library._scoped_library("dynaxla_store", "FRAGMENT") as library:
        library.define("halved(Tensor x) -> Tensor")
        library.impl("halved", lambda x: x / 2, "CPU")
        library.impl("halved", torch.empty_like, "Meta")
        compiled = torch.compile(lambda x: torch.ops.dynaxla_store.halved(x) + 1, backend="dynaxla", options={"cache": str(tmp_path)})
        torch.testing.assert_close(compiled(torch.ones(3)), torch.full((3,), 1.5))
    assert not list(Store(tmp_path / "programs"))


def test_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Work that is done is not lost because it could not be kept; nor is anything half written."""

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    compiled = torch.compile(lambda x: x.tan() + 1, backend="dynaxla", options={"cache": str(tmp_path)})
    torch.testing.assert_close(compiled(torch.ones(3)), torch.ones(3).tan() + 1)
    assert "No space left" in caplog.text
    assert not list((tmp_path / "programs").iterdir())


@pytest.mark.skipif(not onednn.is_available(), reason="this XLA:CPU has no oneDNN")
def test_onednn_is_not_kept(tmp_path: Path) -> None:
    """jaxlib cannot write such programs, and would not say so."""
    net = nn.Linear(256, 256)
    x = torch.randn(256, 256)
    options = {"cache": str(tmp_path), "forms": {"contraction": "onednn"}}
    for _ in range(2):
        torch._dynamo.reset()
        with torch.no_grad():
            torch.testing.assert_close(torch.compile(net, backend="dynaxla", options=options)(x), net(x))
        assert not list(Store(tmp_path / "programs"))


def test_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("DYNAXLA_CACHE", "")
    torch.compile(torch.exp, backend="dynaxla")(torch.ones(5))
    assert not list(tmp_path.iterdir())
