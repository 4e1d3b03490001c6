"""Tests of the names of ops that are known without importing torch."""

from __future__ import annotations

import pytest

from dynaxla.bench.benchmark_error import BenchmarkError
from dynaxla.cli import op_names, op_table


def test_known_words_match_all_ops() -> None:
    known_words = op_names.known_words()
    assert [str(support.op) for support in op_table.op_support("cpu") if not op_names.can_match(str(support.op), known_words)] == []


@pytest.mark.parametrize("pattern", ["cumsum", "aten.cumsum.default", "cum*", "aten.cumsum*", "prims.*", "linalg_?r", "*"])
def test_patterns_of_existing_ops_are_accepted(pattern: str) -> None:
    op_names.check_patterns([pattern, "no_such_op"])


def test_unknown_patterns_are_refused_with_similar_names() -> None:
    with pytest.raises(BenchmarkError, match=r"no op matches cumsun or no_such_op\*; did you mean cumsum\?$"):
        op_names.check_patterns(["cumsun", "no_such_op*"])
    with pytest.raises(BenchmarkError, match=r"no op matches aten.cumsum.defalt$"):
        op_names.check_patterns(["aten.cumsum.defalt"])
