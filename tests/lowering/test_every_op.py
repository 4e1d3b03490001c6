"""Properties of every lowering, tested for each row of the table.

The values, dtypes, shapes and strides are those of eager mode, for dense, transposed and strided operands, and for operands of rank 0 or
without elements. The gradients are those of eager mode, also after sizes have changed.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import pytest
import torch
from torch.testing._internal.common_utils import noncontiguous_like
from torch.utils import _pytree as pytree

from dynaxla import interop as interop  # registers a lowering
from dynaxla.lowering import registry
from lowering.table import ELSEWHERE, ROWS
from lowering.table.rows import FLOATS, Keywords, Make, Op
from support import internals
from support.comparisons.compare import assert_equal
from support.comparisons.gradients import differentiable, leaf
from support.comparisons.single_op import Call, run_ops, tuples
from support.paths import TESTS
from support.timing import quick_compilation

aten = torch.ops.aten

# Warnings of eager mode at the first call of an op in a process.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{text}")
    for text in (
        ".*deprecated",
        "index_reduce.. is in beta",
        "var.*degrees of freedom is <= 0",
        "torch.searchsorted.*input value tensor is non-contiguous",
    )
]


# The number of rows that are compiled as one program.
ROWS_PER_PROGRAM = 8
GROUPS = [ROWS[first : first + ROWS_PER_PROGRAM] for first in range(0, len(ROWS), ROWS_PER_PROGRAM)]
SIZE = 4


def operands(row: Op, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    if dtype == torch.bool:
        return torch.rand(shape) < 0.5
    if dtype.is_complex:
        return torch.complex(torch.empty(shape).uniform_(row.low, row.high), torch.empty(shape).uniform_(row.low, row.high)).to(dtype)
    low, high = row.low, row.high
    if not dtype.is_floating_point:
        low, high = (low if dtype.is_signed else max(low, 0)), max(high, 1)
        return torch.empty(shape, dtype=torch.float64).uniform_(low, high).round().to(dtype)
    return torch.empty(shape, dtype=torch.float64).uniform_(low, high).to(dtype)


def transposed(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, -1).contiguous().transpose(0, -1) if x.dim() else x


# Layouts of operands, and the size of the first dimension. Samples of the last two that eager mode refuses are skipped.
FORMS: dict[str, tuple[Callable[[Make], Make], int]] = {
    "dense": (lambda make: make, SIZE),
    "transposed": (lambda make: lambda *shape: transposed(make(*shape)), SIZE),
    "with gaps": (lambda make: lambda *shape: noncontiguous_like(make(*shape)), SIZE),
    "rank 0": (lambda make: lambda *shape: make(), SIZE),
    "empty": (lambda make: make, 0),
}
OTHERS = [form for form in FORMS if form != "dense"]
MAY_BE_REFUSED = ("rank 0", "empty")
REFUSALS = (RuntimeError, IndexError, ValueError)


def arguments(sample: tuple[Any, ...]) -> tuple[tuple[Any, ...], Keywords]:
    return (sample[:-1], sample[-1]) if sample and isinstance(sample[-1], Keywords) else (sample, Keywords())


def apply(row: Op, sample: tuple[Any, ...]) -> Any:
    args, kwargs = arguments(sample)
    return row.op(*args, **kwargs)


def calls(row: Op, dtypes: Sequence[torch.dtype], forms: Sequence[str]) -> Iterator[tuple[str, torch.dtype, Call, Any]]:
    """Yields the form, the dtype, the call, and eager mode's result of each sample."""
    for dtype, form in itertools.product(dtypes, forms):
        if form in row.without:
            continue
        change, size = FORMS[form]
        make = change(lambda *shape, dtype=dtype: operands(row, dtype, *shape))
        for sample in _samples(row, make, size, may_fail=form in MAY_BE_REFUSED):
            call = Call(row.op, *arguments(sample))
            try:
                yield form, dtype, call, call.eagerly()
            except REFUSALS:
                if form not in MAY_BE_REFUSED:
                    raise


def _samples(row: Op, make: Make, size: int, may_fail: bool) -> Sequence[tuple[Any, ...]]:
    """The samples of a row; none if `may_fail` and eager mode refuses an op that makes an operand."""
    try:
        return row.samples(make, size)
    except REFUSALS:
        if not may_fail:
            raise
        return []


def group_id(group: Sequence[Op]) -> str:
    return f"{group[0]}-{group[-1]}"


def _some_dtypes(row: Op, index: int) -> Sequence[torch.dtype]:
    """Returns the first dtype of a row, the first integer dtype, and one of the others, chosen by the row's index in its group.

    Lowerings often have separate branches for integers. XLA's code differs little between the dtypes of a kind.
    """
    first = _first_dtypes(row)
    others = [dtype for dtype in row.dtypes if dtype not in first]
    return [*first, *others[index % max(len(others), 1) :][:1]]


def _first_dtypes(row: Op) -> Sequence[torch.dtype]:
    """Returns the first dtype of a row, and the first integer dtype."""
    integers = [dtype for dtype in row.dtypes[1:] if not dtype.is_floating_point and not dtype.is_complex and dtype != torch.bool]
    return [row.dtypes[0], *integers[:1]]


@pytest.mark.quick
@pytest.mark.usefixtures("quick_xla")
@pytest.mark.parametrize("group", GROUPS, ids=group_id)
def test_values(group: Sequence[Op]) -> None:
    """In some dtypes of each row; in `make quick`, only in the first dtypes."""
    tested = [_first_dtypes(row) if quick_compilation.is_asked_for else _some_dtypes(row, index) for index, row in enumerate(group)]
    _check([(row, *item) for row, dtypes in zip(group, tested, strict=True) for item in calls(row, dtypes, ["dense"])])


@pytest.mark.thorough
@pytest.mark.usefixtures("quick_xla")
@pytest.mark.parametrize("group", GROUPS, ids=group_id)
def test_values_in_other_dtypes(group: Sequence[Op]) -> None:
    others = [(row, [dtype for dtype in row.dtypes if dtype not in _some_dtypes(row, index)]) for index, row in enumerate(group)]
    _check([(row, *item) for row, dtypes in others for item in calls(row, dtypes, ["dense"])])


@pytest.mark.sample(usual=6)
@pytest.mark.parametrize("group", GROUPS, ids=group_id)
def test_values_with_default_compilation(group: Sequence[Op]) -> None:
    """The values of `test_values` in the code that users get, which XLA optimizes more."""
    _check([(row, *item) for index, row in enumerate(group) for item in calls(row, _some_dtypes(row, index), ["dense"])])


@pytest.mark.sample(usual=6)
@pytest.mark.usefixtures("quick_xla")
@pytest.mark.parametrize("group", GROUPS, ids=group_id)
def test_shapes_and_strides(group: Sequence[Op]) -> None:
    """In one dtype: the layout of operands does not depend on it."""
    _check([(row, *item) for row in group for item in calls(row, row.dtypes[:1], OTHERS)])


def _check(cases: Sequence[tuple[Op, str, torch.dtype, Call, Any]]) -> None:
    results = run_ops([call for _, _, _, call, _ in cases])
    for (row, form, dtype, call, expected), result in zip(cases, results, strict=True):
        try:
            assert_equal(result, expected, tolerance=row.tolerance.get(dtype))
        except AssertionError as error:
            raise AssertionError(f"{row}, {form}, {dtype}, of {call.args}: {error}") from error


@pytest.mark.sample(usual=8)
@pytest.mark.usefixtures("quick_xla")
@pytest.mark.parametrize("group", GROUPS, ids=group_id)
def test_gradients_and_changing_sizes(group: Sequence[Op]) -> None:
    """In float32. Rows share a graph for two sizes; rows whose ops take a size as a number share a graph for one size."""
    rows = [row for row in group if "changing sizes" not in row.without]
    for changes in (True, False):
        if subset := [row for row in rows if (_numbers(row, SIZE) == _numbers(row, SIZE + 2)) is changes]:
            _check_gradients(subset, changes=changes)


# torch cannot differentiate powers whose exponent is symbolic.
@torch._dynamo.config.patch(specialize_int=True, specialize_float=True)
def _check_gradients(group: Sequence[Op], changes: bool) -> None:
    """Compares results and gradients with eager mode.

    Args:
        group: The rows.
        changes: True if the graph is captured at another size. Torch's kernels compute that call: the tests above compare its values.
    """

    def function(samples: list[list[tuple[Any, ...]]]) -> list[Any]:
        return [[apply(row, sample) for sample in given] for row, given in zip(group, samples, strict=True)]

    compiled = torch.compile(function, backend="dynaxla", fullgraph=True, options={"fallback": "error"})
    samples = _all_samples(group, SIZE + 2)
    if changes:
        first = _leaves(group, _all_samples(group, SIZE))
        _mark_changing_sizes(first, samples)
        with pytest.MonkeyPatch.context() as patch:
            internals.needed_fallbacks(patch)
            compiled(first)
    mine, theirs = (_leaves(group, samples) for _ in range(2))
    actual, expected = tuples(compiled(mine)), tuples(function(theirs))
    for row, result, reference in zip(group, actual, expected, strict=True):
        _compare(row, result, reference, "result")
    cotangents = [torch.randn_like(out) for out in differentiable(expected)]
    for results in (actual, expected):
        torch.autograd.backward(differentiable(results), cotangents)
    for row, samples_of_row, references in zip(group, mine, theirs, strict=True):
        _compare(row, _gradients(samples_of_row), _gradients(references), "gradient")


def _mark_changing_sizes(samples: Any, others: Any) -> None:
    """Makes only the changing sizes symbols of the graph: each symbol slows down tracing."""
    for value, other in zip(pytree.tree_leaves(samples), pytree.tree_leaves(others), strict=True):
        if isinstance(value, torch.Tensor):
            for dim in range(value.dim()):
                if value.shape[dim] != other.shape[dim]:
                    torch._dynamo.maybe_mark_dynamic(value, dim)


def _numbers(row: Op, size: int) -> list[Any]:
    """All arguments of a row's samples that are not tensors."""
    (samples,) = _all_samples([row], size)
    given = [(args, dict(kwargs)) for args, kwargs in map(arguments, samples)]
    return [value for value in pytree.tree_leaves(given) if not isinstance(value, torch.Tensor)]


def _all_samples(group: Sequence[Op], size: int) -> list[list[tuple[Any, ...]]]:
    return [list(row.samples(lambda *shape, row=row: operands(row, _gradient_dtype(row), *shape), size)) for row in group]


def _gradient_dtype(row: Op) -> torch.dtype:
    return torch.float32 if torch.float32 in row.dtypes else row.dtypes[0]


def _leaves(group: Sequence[Op], samples: list[list[tuple[Any, ...]]]) -> list[list[tuple[Any, ...]]]:
    return [[_sample_of_leaves(row, sample) for sample in given] for row, given in zip(group, samples, strict=True)]


def _sample_of_leaves(row: Op, sample: tuple[Any, ...]) -> tuple[Any, ...]:
    constant = [not row.gradient or index in row.constants for index in range(len(sample))]
    return tuple(
        pytree.tree_map_only(torch.Tensor, torch.clone if fixed else leaf, item) for fixed, item in zip(constant, sample, strict=True)
    )


def _gradients(samples: Any) -> list[torch.Tensor | None]:
    return [value.grad for value in pytree.tree_leaves(samples) if isinstance(value, torch.Tensor)]


def _compare(row: Op, actual: Any, expected: Any, quantity: str) -> None:
    try:
        assert_equal(actual, expected, tolerance=row.tolerance.get(_gradient_dtype(row)))
    except AssertionError as error:
        raise AssertionError(f"{row}, {quantity}: {error}") from error


def test_no_op_has_two_rows() -> None:
    assert len({row.op for row in ROWS}) == len(ROWS)


def test_every_lowering_has_a_row_or_a_test_elsewhere() -> None:
    """The test elsewhere contains the op's name as a word, apart from underscores around it."""
    lowered = {str(op) for op in registry.ops() if op.namespace in ("aten", "prims", "dynaxla")}
    rows, elsewhere = {str(row.op) for row in ROWS}, [name for _, name in ELSEWHERE]
    assert sorted(lowered - rows - set(elsewhere)) == []
    assert sorted(set(elsewhere) - lowered) == [], "there are no such lowerings"
    assert sorted(rows & set(elsewhere)) == [], "these have rows"
    assert len(set(elsewhere)) == len(elsewhere)
    texts = {test: (TESTS / test).read_text() for test, _ in ELSEWHERE}
    words = {test: {word.strip("_") for word in re.findall(r"\w+", text)} for test, text in texts.items()}
    assert [(test, name) for test, name in ELSEWHERE if name.split(".")[1].strip("_") not in words[test]] == []


def _sine_if(condition: Callable[[Any], bool]) -> Callable[[Any], Any]:
    """A wrong lowering of the cosine: the sine, if the operand satisfies the condition."""
    return lambda x: jnp.sin(x) if condition(x) else jnp.cos(x)


def row_of(op: torch._ops.OpOverload) -> Op:
    """The row of an op, with float dtypes only."""
    return next(dataclasses.replace(row, dtypes=FLOATS) for row in ROWS if row.op is op)


WRONG_LOWERINGS = {
    "dense, torch.float32": (lambda x: jnp.cos(x) * 1.001, test_values),
    "dense, torch.float64": (_sine_if(lambda x: x.dtype == jnp.float64), test_values),
    "dense, torch.bfloat16": (_sine_if(lambda x: x.dtype == jnp.bfloat16), test_values_in_other_dtypes),
    "rank 0, torch.float32": (_sine_if(lambda x: x.ndim == 0), test_shapes_and_strides),
    "result": (_sine_if(lambda x: x.ndim and x.shape[0] == SIZE + 2), test_gradients_and_changing_sizes),
}


@pytest.mark.parametrize("failure", WRONG_LOWERINGS)
def test_a_wrong_lowering_is_found(failure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each violates another property: all values, those in one dtype, those of rank 0, or those at another size."""
    lowering, test = WRONG_LOWERINGS[failure]
    internals.replace_lowering(monkeypatch, aten.cos.default, lowering)
    with pytest.raises(AssertionError, match=f"^aten.cos.default, {failure}"):
        test([row_of(aten.cos.default)])


def test_a_wrong_gradient_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    internals.replace_lowering(monkeypatch, aten.cos.default, lambda x: jnp.cos(x) * 1.001)
    with pytest.raises(AssertionError, match=r"^aten.sin.default, gradient"):
        test_gradients_and_changing_sizes([row_of(aten.sin.default)])
