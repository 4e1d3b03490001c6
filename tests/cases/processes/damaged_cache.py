"""Damages the files of a cache directory, and checks that the next process ignores them."""

from __future__ import annotations

import gc
import shutil
from pathlib import Path

import torch

from dynaxla import backend
from dynaxla.observe import metrics


def cut(files: list[Path]) -> None:
    for path in files:
        path.write_bytes(path.read_bytes()[:-1])


def flipped(files: list[Path]) -> None:
    for path in files:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)


def swapped(files: list[Path]) -> None:
    contents = [path.read_bytes() for path in files]
    for path, content in zip(files, contents[1:] + contents[:1], strict=True):
        path.write_bytes(content)


def directories(files: list[Path]) -> None:
    for path in files:
        path.unlink()
        path.mkdir()


def gone(files: list[Path]) -> None:
    for folder in {path.parent for path in files}:
        shutil.rmtree(folder)


# By name: the function that damages the files, and True if new files can replace the damaged ones.
DAMAGES = {
    "cut": (cut, True),
    "flipped": (flipped, True),
    "swapped": (swapped, True),
    "directories": (directories, False),
    "gone": (gone, False),
}


def check(damage: str, folder: str) -> None:
    """After the damage, a start loads nothing from the cache, and its results are correct."""
    assert backend.dynaxla
    cache, x = Path(folder), torch.randn(4, 4)
    functions = (lambda x: x.tan() + 1, lambda x: x.tan() + 2)

    def start() -> tuple[int, ...]:
        metrics.reset()
        for function in functions:
            torch._dynamo.reset()
            gc.collect()  # a program that is still in memory is not loaded from a file
            torch.testing.assert_close(torch.compile(function, backend="dynaxla", options={"cache": str(cache)})(x), function(x))
        return tuple(metrics.snapshot().get(name, 0) for name in ("graphs_from_cache", "recalls", "loads"))

    assert start() == (0, 0, 0)
    assert start() == (2, 2, 2)
    files = [path for path in cache.rglob("*") if path.is_file()]
    assert len(files) == 6
    damage_files, is_replaceable = DAMAGES[damage]
    damage_files(sorted(files))
    assert start() == (0, 0, 0)
    if is_replaceable:
        assert start() == (2, 2, 2)
