"""Names of ops, without importing torch and JAX: `dynaxla ops` rejects a mistyped name immediately."""

from __future__ import annotations

import difflib
import fnmatch
import importlib.util
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..bench.benchmark_error import BenchmarkError

# torch's list of ATen ops, and its modules with prims, in the packages torchgen and torch.
_ATEN, _PRIMS = "packaged/ATen/native/native_functions.yaml", ("_prims/*.py", "_inductor/inductor_prims.py")
# Parts of the names of ops that only C++ code declares. torch's list of ops does not have these names.
_IN_CPP = "get_gradients quantized_gru quantized_lstm data_legacy input_legacy"


def check_patterns(patterns: Sequence[str]) -> None:
    """Raises BenchmarkError if no op can match any of the patterns. Checks nothing if a pattern has both a dot and a wildcard."""
    if not patterns or any("." in pattern and set(pattern) & set("*?[") for pattern in patterns):
        return
    words = known_words()
    if not words or any(can_match(pattern, words) for pattern in patterns):
        return
    similar = list(dict.fromkeys(name for pattern in patterns for name in difflib.get_close_matches(pattern, _aten_names(), cutoff=0.7)))
    raise BenchmarkError(f"no op matches {' or '.join(patterns)}" + (f"; did you mean {', '.join(similar)}?" if similar else ""))


def known_words() -> frozenset[str]:
    """Returns a set of words that contains all parts of all names of ops. The set is empty if this torch has no list of its ops."""
    return frozenset(word for text in _texts() for word in re.findall(r"\w+", text))


def can_match(pattern: str, words: frozenset[str]) -> bool:
    """True if a name that consists of known words can match the pattern, which has either wildcards or dots."""
    if set(pattern) & set("*?["):
        return any(fnmatch.fnmatchcase(word, pattern) for word in words)
    return all(part in words for part in pattern.split("."))


def _texts() -> Iterator[str]:
    aten_files = _package_files("torchgen", _ATEN)
    if not aten_files:
        return
    yield _IN_CPP
    prims = [path for pattern in _PRIMS for path in _package_files("torch", pattern)]
    own_files = Path(__file__).parents[1].rglob("*.py")
    yield from (path.read_text(encoding="utf-8") for path in (*aten_files, *prims, *own_files))


def _aten_names() -> list[str]:
    """Returns the names of ATen's functional ops, without overloads."""
    texts = [path.read_text(encoding="utf-8") for path in _package_files("torchgen", _ATEN)]
    return sorted({name for text in texts for name in re.findall(r"^- func: (\w*[^\W_])\b", text, re.MULTILINE)})


def _package_files(package: str, pattern: str) -> list[Path]:
    """Returns the files of an installed package that match a pattern. The package is not imported."""
    spec = importlib.util.find_spec(package)
    return sorted(Path(spec.origin).parent.glob(pattern)) if spec is not None and spec.origin is not None else []
