"""Tests that results, strides, aliasing, mutations and gradient flags are those of eager mode."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from support.comparisons.compare import aliases, assert_equal, check

pytestmark = [pytest.mark.usefixtures("quick_xla"), pytest.mark.quick]

Case = tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]


def add_in_place(x: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return x * 2


def mutate_and_return(x: torch.Tensor) -> torch.Tensor:
    return x.mul_(3)


def mutate_a_view(x: torch.Tensor) -> torch.Tensor:
    x[1:3].zero_()
    return x.sum()


def mutate_both(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.add_(y)
    y.mul_(2)
    return x + y


def mutate_one_of_two(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x.add_(1)
    return x + y, y * 2


def views_of_inputs(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x, x.t(), x[1:], x.reshape(-1), x.expand(2, *x.shape), x[:, ::2], x + 1


def view_after_mutation(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x.add_(1)
    return x.t(), x[0]


def shared_outputs(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x * 2
    return y, y.t(), y[1:], y[:, ::2]


def split_of_intermediate(x: torch.Tensor) -> list[torch.Tensor]:
    return list((x + 1).split(2)) + list((x * 3).unbind(1))


def gapped(x: torch.Tensor) -> torch.Tensor:
    return (x + 1)[:, ::2]


def expanded(x: torch.Tensor) -> torch.Tensor:
    return (x + 1)[:, :1].expand(-1, 6)


def permuted(x: torch.Tensor) -> torch.Tensor:
    return (x + 1).permute(2, 0, 1)


def detached(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = x * 2
    return y, y.detach()


def with_numbers(x: torch.Tensor) -> tuple[Any, ...]:
    return x + 1, None, x.shape[0], 2.5, "text", [x.dim(), x * 0]


def in_place_on_alias_of_intermediate(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = x * 2
    z = y[0]
    z.add_(1)
    return y, z


def item_assignment(x: torch.Tensor) -> torch.Tensor:
    x[0] = 5
    x[:, 1] = x[:, 0]
    return x.clone()


def t(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


CASES: dict[str, Case] = {
    "in_place_on_input": (add_in_place, lambda: (t(4, 5),)),
    "mutated_input_returned": (mutate_and_return, lambda: (t(4, 5),)),
    "mutation_through_view": (mutate_a_view, lambda: (t(4, 5),)),
    "mutation_of_transposed_input": (add_in_place, lambda: (t(4, 5).t(),)),
    "mutation_of_strided_input": (add_in_place, lambda: (t(4, 10)[:, ::2],)),
    "mutation_of_channels_last": (add_in_place, lambda: (t(2, 3, 4, 5).to(memory_format=torch.channels_last),)),
    "mutation_of_two": (mutate_both, lambda: (t(4, 5), t(4, 5))),
    "item_assignment": (item_assignment, lambda: (t(4, 5),)),
    "views_of_an_input": (views_of_inputs, lambda: (t(4, 6),)),
    "views_of_a_transposed_input": (lambda x: (x.t(), x[1:], x + 1), lambda: (t(4, 6).t(),)),
    "view_after_mutation": (view_after_mutation, lambda: (t(4, 5),)),
    "outputs_sharing_memory": (shared_outputs, lambda: (t(4, 6),)),
    "split_outputs": (split_of_intermediate, lambda: (t(4, 6),)),
    "gapped_output": (gapped, lambda: (t(4, 6),)),
    "expanded_output": (expanded, lambda: (t(4, 6),)),
    "permuted_output": (permuted, lambda: (t(2, 3, 4),)),
    "detached_output": (detached, lambda: (t(4, 6),)),
    "alias_of_intermediate_mutated": (in_place_on_alias_of_intermediate, lambda: (t(4, 6),)),
    "outputs_that_are_no_tensors": (with_numbers, lambda: (t(4, 6),)),
    "same_output_twice": (lambda x: (lambda y: (y, y, y * 2))(x + 1), lambda: (t(4),)),
    "input_and_nothing_else": (lambda x: x, lambda: (t(4),)),
    "channels_last_elementwise": (lambda x: x + 1, lambda: (t(2, 3, 4, 5).to(memory_format=torch.channels_last),)),
    "transposed_elementwise": (lambda x: x * 2, lambda: (t(3, 4).t(),)),
    "expanded_input": (lambda x: (x + 1, x * x), lambda: (t(3, 1).expand(3, 5),)),
    "overlapping_input": (lambda x: x * 2, lambda: (t(10).as_strided((4, 3), (2, 1)),)),
    "strided_input": (lambda x: x * 2, lambda: (t(4, 10)[:, 1::3],)),
    "misaligned_input": (lambda x: x * 2, lambda: (t(13)[1:],)),
    "size_one_dimensions": (lambda x: (x + 1, x.permute(1, 0, 2) * 2), lambda: (torch.randn(3, 5).as_strided((3, 1, 5), (5, 77, 1)),)),
    "rank_zero": (lambda x: (x + 1, x), lambda: (torch.tensor(2.5),)),
    "zero_size": (lambda x: (x + 1, x.sum(), x.t()), lambda: (torch.zeros(0, 3),)),
    "zero_size_and_not": (lambda x, y: (x + y[:0], y * 2), lambda: (torch.zeros(0, 3), t(2, 3))),
    "only_created": (lambda x: (torch.ones(3), torch.arange(4)), lambda: (t(1),)),
    "bool_and_integers": (lambda x, y: (x & y, x | ~y, (x * 3).sum()), lambda: (t(4) > 0, t(4) > 0)),
    "conjugate_input": (lambda x: (x * 2, x.real), lambda: (torch.randn(3, 4, dtype=torch.complex64).conj(),)),
    "negative_bit_input": (lambda x: x * 2, lambda: (torch.randn(3, 4, dtype=torch.complex64).conj().imag,)),
    "conjugate_output": (lambda x: (x * 2).conj(), lambda: (torch.randn(3, 4, dtype=torch.complex64),)),
    "conjugate_of_input": (lambda x: x.conj(), lambda: (torch.randn(3, 4, dtype=torch.complex64),)),
    "view_as_other_dtype": (lambda x: (x.view(torch.int32) + 1, (x * 2).view(torch.int32)), lambda: (t(4),)),
    "complex_parts_of_intermediate": (lambda x: torch.view_as_real(x * 2), lambda: (torch.randn(3, dtype=torch.complex64),)),
}


@pytest.mark.parametrize("name", CASES)
def test_as_in_eager(name: str) -> None:
    function, make = CASES[name]
    check(function, *make(), calls=3)


@pytest.mark.parametrize("name", ["in_place_on_input", "outputs_sharing_memory", "misaligned_input", "strided_input", "views_of_an_input"])
def test_as_in_eager_when_retracing(name: str) -> None:
    function, make = CASES[name]
    check(function, *make(), backend="dynaxla_retrace")


@pytest.mark.parametrize("name", ["in_place_on_input", "outputs_sharing_memory", "views_of_an_input", "permuted_output", "gapped_output"])
def test_as_in_eager_with_dynamic_shapes(name: str) -> None:
    function, make = CASES[name]
    check(function, *make(), dynamic=True)


def test_same_tensor_twice() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x * y

    compiled = torch.compile(function, backend="dynaxla", fullgraph=True)
    for _ in range(2):
        mine, theirs = torch.ones(4), torch.ones(4)
        assert_equal(compiled(mine, mine), function(theirs, theirs))
        assert_equal(mine, theirs)


@pytest.mark.parametrize("ranges", [((0, 6), (2, 8)), ((0, 4), (4, 8)), ((0, 8), (0, 4))])
def test_overlapping_inputs_one_written(ranges: tuple[tuple[int, int], tuple[int, int]]) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return x.sum() + y.sum()

    (a, b), (c, d) = ranges
    compiled = torch.compile(function, backend="dynaxla", fullgraph=True)
    for _ in range(2):
        mine, theirs = torch.arange(8.0), torch.arange(8.0)
        assert_equal(compiled(mine[a:b], mine[c:d]), function(theirs[a:b], theirs[c:d]))
        assert_equal(mine, theirs)


def test_overlapping_inputs_of_the_same_shape_both_written() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        y.mul_(3)
        return x + y

    compiled = torch.compile(function, backend="dynaxla", fullgraph=True)
    mine, theirs = torch.arange(8.0), torch.arange(8.0)
    assert_equal(compiled(mine[:6], mine[2:]), function(theirs[:6], theirs[2:]))
    assert_equal(mine, theirs)


PARTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "row": lambda x: x[0],
    "last row": lambda x: x[-1],
    "column": lambda x: x[:, 1],
    "slice": lambda x: x[1:],
    "steps": lambda x: x[:, ::2, 1:2],
    "diagonal": lambda x: x.diagonal(1, 1, 0)[-1:],
    "element": lambda x: x[1, 0, 1],
    "strided": lambda x: x.as_strided((2,), (3,), 1),
}


def overlaps(part: torch.Tensor) -> bool:
    """True if two elements share memory, for a part of a memory with distinct numbers."""
    return part.unique().numel() < part.numel()


# AOTAutograd refuses strides of 0.
@pytest.mark.parametrize("stride", [(1, 2, 1), (1, 4, 1), (2, 1, 2), (3, 1, 3), (1, 1, 1)], ids=str)
def test_write_to_a_part_of_an_input_with_internal_overlap(stride: tuple[int, ...]) -> None:
    """All elements that share memory with the part change, also for later reads in the graph. Each part has its own memory."""
    names = [name for name, part in PARTS.items() if not overlaps(part(torch.arange(30).as_strided((2, 3, 4), stride)))]

    def function(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[torch.Tensor, ...]]:
        results = {}
        for name, x in tensors.items():
            part = PARTS[name](x)
            part.mul_(3)
            first = x * 1
            PARTS[name](x).add_(100)
            results[name] = first, x + 1, part
        return results

    runs = []
    for run in (function, torch.compile(function, backend="dynaxla", fullgraph=True)):
        memories = {name: torch.arange(1.0, 31.0) for name in names}
        runs.append((run({name: memory.as_strided((2, 3, 4), stride) for name, memory in memories.items()}), memories))
    assert names
    for name in names:
        expected, actual = ((results[name], memories[name]) for results, memories in runs)
        torch.testing.assert_close(actual, expected, msg=lambda text, name=name: f"{name}: {text}")


def chunk(x: torch.Tensor) -> torch.Tensor:
    return x.chunk(2, 0)[1]


@pytest.mark.sample(usual=4)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("part", [chunk, *(PARTS[name] for name in ("last row", "column", "slice", "diagonal"))])
def test_views_of_a_written_input_with_storage_offset(part: Callable[[torch.Tensor], torch.Tensor], dynamic: bool) -> None:
    """With symbolic sizes, AOTAutograd computes the views relative to the storage offset of the program's results."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        written_part = part(x)
        written_part[..., :1] = 2.0
        return written_part, part(x)[..., 1:], x[1:], x.mT

    compiled = torch.compile(function, backend="dynaxla", fullgraph=True, dynamic=dynamic)
    for size in (4, 4, 6):
        mine, theirs = torch.arange(200.0), torch.arange(200.0)
        results, expected = [
            run(memory.as_strided((3, 4, size), (4 * size, size, 1), 17)) for run, memory in ((compiled, mine), (function, theirs))
        ]
        assert torch.equal(mine, theirs)
        for result, other in zip(results, expected, strict=True):
            assert_equal(result, other)
            assert result.storage_offset() == other.storage_offset()
            assert result.untyped_storage().data_ptr() == mine.untyped_storage().data_ptr()


def test_write_to_a_part_of_an_expanded_tensor() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        expanded = x.expand(3)
        expanded[:, None].expand(3, 3).diagonal(2)[torch.tensor([0])] = 0
        return expanded

    check(function, torch.tensor(5), fallback="kernel")


def test_outputs_are_ordinary_tensors() -> None:
    compiled = torch.compile(lambda x: x + 1, backend="dynaxla")
    out = compiled(torch.zeros(4))
    out.mul_(2)
    out.resize_(2)
    assert torch.equal(out, torch.full((2,), 2.0))
    assert torch.equal(compiled(torch.zeros(4)), torch.ones(4)), "writing a result must not reach the next call"


def test_later_write_to_an_input_does_not_change_the_result() -> None:
    compiled = torch.compile(lambda x: (x @ x).sum(0) * 1.5, backend="dynaxla")
    for _ in range(20):
        x = torch.ones(300, 300)
        out = compiled(x)
        x.zero_()
        assert torch.equal(out, torch.full((300,), 300 * 300 * 1.5))


def test_grad_mode_and_requires_grad() -> None:
    layer = torch.nn.Linear(3, 4)
    compiled = torch.compile(layer, backend="dynaxla", fullgraph=True)
    x = torch.randn(2, 3)
    with torch.no_grad():
        assert_equal(compiled(x), layer(x))
    with torch.inference_mode():
        out = compiled(x)
        assert out.is_inference()
    out = compiled(x)
    assert out.requires_grad
    out.sum().backward()
    mine = {name: parameter.grad.clone() for name, parameter in layer.named_parameters()}
    layer.zero_grad()
    layer(x).sum().backward()
    assert_equal(mine, {name: parameter.grad for name, parameter in layer.named_parameters()})


def test_gradients_through_views_and_mutations() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = (x @ w).t()
        y = y.clone()
        y[0].mul_(2)
        return y.relu(), (x * 2).view(-1)[::2]

    compiled = torch.compile(function, backend="dynaxla", fullgraph=True)
    results = []
    for callee in (compiled, function):
        torch.manual_seed(1)
        x, w = torch.randn(4, 3, requires_grad=True), torch.randn(3, 5, requires_grad=True)
        a, b = callee(x, w)
        (a.sum() * 2 + b.square().sum()).backward()
        results.append((a, b, x.grad, w.grad))
    assert_equal(results[0], results[1])


def test_autocast() -> None:
    layer = torch.nn.Linear(8, 8)
    compiled = torch.compile(layer, backend="dynaxla", fullgraph=True)
    x = torch.randn(4, 8)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert_equal(compiled(x), layer(x))


def test_change_of_the_default_dtype() -> None:
    compiled = torch.compile(lambda x: x / 3, backend="dynaxla")
    x = torch.arange(4)
    assert compiled(x).dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert_equal(compiled(x), x / 3)
    finally:
        torch.set_default_dtype(torch.float32)


def test_comparison_helpers_can_fail() -> None:
    x = torch.zeros(3)
    assert aliases([x], [x.view(3)]) != aliases([x], [x.clone()])
    with pytest.raises(AssertionError, match="strides"):
        assert_equal(torch.zeros(2, 3), torch.zeros(3, 2).t())
    with pytest.raises(AssertionError, match="dtype"):
        assert_equal(torch.zeros(2), torch.zeros(2, dtype=torch.float64))
    with pytest.raises(AssertionError):
        assert_equal(torch.zeros(2), torch.ones(2))
    with pytest.raises(AssertionError):
        check(lambda x: x.add_(torch.rand(3)), copy.copy(x))


@pytest.mark.parametrize("gradient", ["contiguous", "expanded", "strided", "transposed", "misaligned"])
def test_gradients_of_any_layout(gradient: str) -> None:
    makers = {
        "contiguous": lambda: torch.randn(4, 6),
        "expanded": lambda: torch.randn(()).expand(4, 6),
        "strided": lambda: torch.randn(8, 12)[::2, ::2],
        "transposed": lambda: torch.randn(6, 4).t(),
        "misaligned": lambda: torch.randn(25)[1:].view(4, 6),
    }
    compiled = torch.compile(lambda x: x.t().exp().t() + x.view(4, 6), backend="dynaxla", fullgraph=True)
    for _ in range(2):
        grad = makers[gradient]()
        mine = torch.randn(4, 6, requires_grad=True)
        theirs = mine.detach().clone().requires_grad_()
        compiled(mine).backward(grad)
        (theirs.t().exp().t() + theirs.view(4, 6)).backward(grad)
        assert_equal(mine.grad, theirs.grad)


def test_outputs_that_share_memory_are_distinct_tensors() -> None:
    compiled = torch.compile(lambda x: ((y := x * 2), y.expand_as(y), y.view(3, 4)), backend="dynaxla", fullgraph=True)
    first, second, third = compiled(torch.randn(3, 4))
    assert len({id(tensor) for tensor in (first, second, third)}) == 3
    assert first.data_ptr() == second.data_ptr() == third.data_ptr()


def test_unsafe_split_shares_its_operands_memory() -> None:
    check(lambda x: x.unsafe_split(2), torch.randn(5, 3))
    check(lambda x: (x * 2).unsafe_split_with_sizes([1, 4]), torch.randn(5, 3))


def test_graph_with_only_a_check() -> None:
    for backend in ("dynaxla", "dynaxla_retrace"):
        compiled = torch.compile(lambda x: (torch.linalg.inv(x), x)[1], backend=backend, fullgraph=True)
        assert torch.equal(compiled(torch.eye(2)), torch.eye(2))
        with pytest.raises(torch.linalg.LinAlgError, match="singular"):
            compiled(torch.zeros(2, 2))


def test_conjugate_and_negative_bits_of_results() -> None:
    a = torch.randn(3, 3, dtype=torch.complex128)
    check(lambda a: (a * 2).conj().imag, a)
    check(lambda a: ((b := a * 2), b.conj(), b.mH[:1]), a)
    check(lambda a: (a * 2)[:0].conj(), a)


def test_tensor_returned_twice_is_one_object() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x + 1
        return y, y.view(-1), y, x, x[0], x

    results = torch.compile(function, backend="dynaxla", fullgraph=True)(torch.ones(2, 3))
    assert results[0] is results[2]
    assert results[3] is results[5]
    assert results[1] is not results[0]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("is_conj", [False, True], ids=["plain", "conj"])
@pytest.mark.parametrize("differentiated", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_views_of_a_complex_input(is_conj: bool, differentiated: bool, dynamic: bool) -> None:
    """Includes the results of an op that returns several views, which AOTAutograd leaves to the backend."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first, second = x.unbind(1)
        return first, second.real, second.imag

    storage = torch.randn(20, dtype=torch.complex64)
    x = storage.requires_grad_(differentiated)[2:].as_strided((3, 2, 2), (4, 2, 1), 4)
    x = x.conj() if is_conj else x
    compiled = torch.compile(function, backend="dynaxla", fullgraph=True, dynamic=dynamic)
    for mine, theirs in zip(compiled(x), function(x), strict=True):
        assert mine.data_ptr() == theirs.data_ptr()
        assert (mine.stride(), mine.storage_offset(), mine.is_conj(), mine.is_neg()) == (
            theirs.stride(),
            theirs.storage_offset(),
            theirs.is_conj(),
            theirs.is_neg(),
        )
        assert torch.equal(mine, theirs)


def test_graph_break_after_a_write_to_an_input() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float]:
        y = x.add_(1) * 2
        largest = y.amax().item()
        return y.t() + largest, x[0], largest

    x = t(3, 4)
    theirs = x.clone()
    compiled = torch.compile(function, backend="dynaxla")
    for _ in range(2):
        actual, expected = compiled(x), function(theirs)
        assert_equal((actual, x), (expected, theirs))
        assert aliases([x], actual) == aliases([theirs], expected)
