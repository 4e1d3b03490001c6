"""Tests of passes/aten/late_writes.py: torch's writes after a program have eager mode's values, versions and aliases, or none happens."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import dynaxla
from cases.chained_writes import SHAPE, Writer
from dynaxla.observe import metrics
from dynaxla.passes.aten.late_writes import LateWrites
from support import internals

Function = Callable[..., Any]


@pytest.fixture(autouse=True)
def late_writes(monkeypatch: pytest.MonkeyPatch) -> list[LateWrites]:
    """Returns the late writes of all graphs. Small inputs have late writes, too."""
    internals.late_writes_of(monkeypatch, 0)
    return internals.late_writes_found(monkeypatch)


# Writes of a number: torch 2.15 keeps these ops, older releases write a tensor with the number.
_NAMES = {"fill_": "copy_", "index_fill_": "index_put_"}


def ops(late_writes: Sequence[LateWrites]) -> list[str]:
    """Returns the ops of late writes that mutate."""
    targets = [node.target for late in late_writes for node in late.writes.graph.nodes]
    return [op._schema.name.removeprefix("aten::") for op in targets if isinstance(op, torch._ops.OpOverload) and op._schema.is_mutable]


def observed(function: Function, args: Sequence[Any]) -> list[Any]:
    """Returns a call's results and inputs, the memory and strides of each result, and for each input whether it was written to."""
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    versions = [tensor._version for tensor in tensors]
    results = function(*args)
    tensors_returned = [item for item in (results if isinstance(results, tuple) else (results,)) if item is not None]
    storages = {tensor.untyped_storage().data_ptr(): index for index, tensor in reversed(list(enumerate(tensors)))}
    memory = [(storages.get(item.untyped_storage().data_ptr()), item.stride(), item.storage_offset()) for item in tensors_returned]
    is_written = [tensor._version > version for tensor, version in zip(tensors, versions, strict=True)]
    return [tensors_returned, tensors, memory, is_written]


def check(function: Function, *args: Any, times: int = 1, **settings: Any) -> None:
    """Asserts that the compiled function does the same as in eager mode."""
    compiled = torch.compile(function, backend="dynaxla", **settings)
    mine, theirs = copy.deepcopy(args), copy.deepcopy(args)
    for _ in range(times):
        with torch.no_grad():
            found, expected = observed(compiled, mine), observed(function, theirs)
        torch.testing.assert_close(found, expected, equal_nan=True)


def c() -> Tensor:
    return torch.randn(2, 3, 8, 4)


def row(count: int = 1) -> Tensor:
    return torch.randn(2, 3, count, 4)


def at(*positions: int) -> Tensor:
    return torch.tensor(positions)


def index_copy(c: Tensor, i: Tensor, r: Tensor) -> None:
    c.index_copy_(2, i, r)


def by_tensor(c: Tensor, i: Tensor, r: Tensor) -> Tensor:
    c[:, :, i] = r
    return c


def by_slice(c: Tensor, r: Tensor) -> Tensor:
    c[:, :, 3:5] = r
    return c[1:]


def nested_views(c: Tensor, r: Tensor) -> None:
    c[0, :, 3] = r[0, :, 0]
    c[1].transpose(0, 1)[2] = r[1, :, 0]
    c[0, 1, 2, 3] = 5


def shifted(c: Tensor) -> None:
    c[:-1] = c[1:]


def swapped(a: Tensor, b: Tensor) -> None:
    a[0], b[0] = b[0], a[0]


def crossed(b: Tensor, a: Tensor) -> None:
    """Late writes are in the order of the inputs: b is written before a."""
    a[0] = b[0]
    b[0] = 5.0


def clone_is_returned(c: Tensor, i: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    c.index_copy_(2, i, r)
    return c.clone(), c[0]


def swapped_rows(c: Tensor) -> None:
    c[0], c[1] = c[1].clone(), c[0].clone()


def reads_before_and_after(c: Tensor, i: Tensor, r: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    before = c.sum()
    old_row = c[0].clone()
    c.index_copy_(2, i, r * 2)
    return before, old_row, (c * 3).sum((0, 1))


def attention(c: Tensor, v: Tensor, i: Tensor, r: Tensor, q: Tensor) -> Tensor:
    c.index_copy_(2, i, r)
    v[:, :, i] = r.cos()
    return torch.softmax(q @ c.transpose(2, 3), -1) @ v


def computed_positions(c: Tensor, r: Tensor) -> None:
    c.index_copy_(2, (r.sum((0, 1, 3)) > 0).long() + torch.arange(2) * 3, r)


def second_reads_first(c: Tensor, r: Tensor) -> Tensor:
    c[:, :, 0:1] = r
    c[:, :, 1:2] = c[:, :, 0:1] * 2
    c[:, :, 0:1] += c[:, :, 1:2]
    return c[:, :, 0]


def source_is_written(c: Tensor, k: Tensor, i: Tensor) -> None:
    c.index_copy_(2, i, k)
    k[:, :, 0] = 7.0


def index_is_incremented(c: Tensor, i: Tensor, r: Tensor) -> Tensor:
    c.index_copy_(2, i, r)
    i += 1
    return i


def old_value_is_copied(c: Tensor, a: Tensor) -> None:
    a.copy_(c)
    c[0] = 1
    a[1] = c[0]


def fresh_copy_is_returned(c: Tensor, i: Tensor, r: Tensor) -> Tensor:
    new = c.index_copy(2, i, r)
    c.copy_(new)
    return new


def copied_between_writes(c: Tensor, r: Tensor) -> Tensor:
    c[:, :, 2:3] = r
    old = c.clone()
    c[:, :, 4:5] = r
    return old


def scatters(c: Tensor, i: Tensor, r: Tensor) -> None:
    positions = i.view(1, 1, -1, 1).expand(2, 3, i.numel(), 4)
    c.scatter_(2, positions, r)
    c.scatter_(2, positions[:1, :1], 2.5)
    c[1].scatter_add_(1, positions[1], r[0])


def filled(c: Tensor, r: Tensor) -> None:
    c[0].zero_()
    c[1, 0].fill_(3)
    c[1, 1].fill_(r[0, 0, 0, 0])
    c.index_fill_(2, torch.tensor([-1, 2]), 9.0)
    c.select(3, 1).index_add_(0, torch.tensor([0, 0]), r[:, :, 0].expand(2, 3, 4).repeat(1, 1, 2)[:, :, :8], alpha=2)


def accumulated(c: Tensor, i: Tensor, r: Tensor) -> None:
    c[1].index_put_((i % 3, i), r[0, 0], accumulate=True)


def several_indices(c: Tensor, i: Tensor, r: Tensor) -> None:
    c[torch.tensor([1, 0]), :, i] = r[:, :, 0]
    c[..., i, 2] = 0.5


def masked(c: Tensor, r: Tensor) -> None:
    c[c[..., 0] > 0] = r[0, 0, 0]


def through_views(c: Tensor, r: Tensor) -> Tensor:
    flat = c.view(6, 8, 4).permute(1, 0, 2)
    flat[3] = r.view(6, 4)
    first, second = c.chunk(2)
    first[:, 1] = 4
    second.unbind(1)[2].copy_(second[:, 0])
    c.diagonal(dim1=0, dim2=1).fill_(-1)
    c.unsqueeze(0).squeeze()[1, 1] = 2
    return flat


def converted(c: Tensor, r: Tensor) -> None:
    c[0, 0] = r[0, 0]
    c[1] = True


def empty(c: Tensor, i: Tensor, r: Tensor) -> None:
    c.index_copy_(2, i[:0], r[:, :, :0])
    c[:, 3:] = 1


def whole_then_part(c: Tensor, r: Tensor) -> None:
    c.mul_(0.5)
    c[:, :, :1] = r


def transposed(c: Tensor, r: Tensor) -> None:
    c[:, :, :1] = r
    c.transpose_(0, 1)


HALF, NUMBERS = torch.float16, torch.int32
_SLICE = torch.randn(5, 3, 16, 4)

CASES: list[tuple[Function, tuple[Any, ...], list[str]]] = [
    (index_copy, (c(), at(3), row()), ["index_copy_"]),
    (index_copy, (c(), at(7, 0, 2), row(3)), ["index_copy_"]),
    (index_copy, (c(), at(2, 5, 2), row(3)), ["index_copy_"]),
    (index_copy, (c().transpose(0, 1).contiguous().transpose(0, 1), at(3), row()), ["index_copy_"]),
    (index_copy, (_SLICE[1:3, :, ::2], at(3), row()), ["index_copy_"]),
    (index_copy, (c().bfloat16(), at(3), row().bfloat16()), ["index_copy_"]),
    (index_copy, (c().to(torch.complex64), at(3), row().to(torch.complex64)), ["index_copy_"]),
    (index_copy, (torch.randn(2, 1, 8, 4)[:, :1], at(3), row()[:, :1]), ["index_copy_"]),
    (by_tensor, (c(), at(3), row()), ["index_put_"]),
    (by_tensor, (c(), at(-1, -8, 2), row(3)), ["index_put_"]),
    (by_tensor, (c(), at(1, 2), torch.tensor(4.0)), ["index_put_"]),
    (by_slice, (c(), row(2)), ["copy_"]),
    (by_slice, (c(), row(2)[:1, :, :1].to(HALF)), ["copy_"]),
    (nested_views, (c(), row()), ["copy_"] * 3),
    (shifted, (c(),), ["copy_"]),
    (swapped, (c(), c()), ["copy_", "copy_"]),
    (crossed, (c(), c()), ["fill_", "copy_"]),
    (clone_is_returned, (c(), at(3), row()), ["index_copy_"]),
    (swapped_rows, (c(),), ["copy_", "copy_"]),
    (reads_before_and_after, (c(), at(3), row()), ["index_copy_"]),
    (attention, (c(), c(), at(2, 3), row(2), row()), ["index_copy_", "index_put_"]),
    (computed_positions, (c(), row(2)), ["index_copy_"]),
    (second_reads_first, (c(), row()), ["copy_"] * 4),
    (source_is_written, (c(), row(2), at(3, 1)), ["index_copy_", "fill_"]),
    (index_is_incremented, (c(), at(3), row()), ["index_copy_"]),
    (old_value_is_copied, (c(), c()), ["fill_"]),
    (fresh_copy_is_returned, (c(), at(3), row()), []),
    (copied_between_writes, (c(), row()), ["copy_", "copy_"]),
    (scatters, (c(), at(3, 5), row(2)), ["scatter_", "scatter_", "scatter_add_"]),
    (filled, (c(), row()), ["zero_", "fill_", "fill_", "index_fill_", "index_add_"]),
    (accumulated, (c(), at(3, 3, 1), row(3)), ["index_put_"]),
    (several_indices, (c(), at(3, 1), row()), ["index_put_"] * 2),
    (masked, (c(), row()), ["index_put_"]),
    (through_views, (c(), row()), ["copy_", "fill_", "copy_", "fill_", "fill_"]),
    (converted, (torch.randint(9, (2, 3, 8, 4), dtype=NUMBERS), row()[..., :1].clamp(-3, 3).round()), ["copy_", "fill_"]),
    (empty, (c(), at(3), row()), ["index_copy_", "fill_"]),
    (whole_then_part, (c(), row()), []),
    (transposed, (c(), row()), ["copy_"]),
]


@pytest.mark.quick
@pytest.mark.sample(usual=10, quick=12)
@pytest.mark.parametrize(("function", "args", "written"), CASES, ids=[f"{case[0].__name__}{i}" for i, case in enumerate(CASES)])
def test_as_in_eager_mode(function: Function, args: tuple[Any, ...], written: list[str], late_writes: list[LateWrites]) -> None:
    check(function, *args)
    assert [_NAMES.get(op, op) for op in ops(late_writes)] == [_NAMES.get(op, op) for op in written]


@pytest.mark.parametrize("seed", range(8))
def test_random_functions(seed: int) -> None:
    function = Writer(seed).function()
    check(function, torch.randn(SHAPE), torch.randn(SHAPE), torch.tensor([0, 1]))


def writes_twice(a: Tensor, b: Tensor, i: Tensor, j: Tensor, k: Tensor) -> None:
    b[:, 0] = 5
    a.index_copy_(1, i, k)
    b[:, j] = k


@pytest.mark.parametrize(("i", "j"), [(8, 0), (0, 8), (-1, 0), (0, -9)])
def test_invalid_index_writes_nothing(i: int, j: int) -> None:
    a, b = torch.randn(2, 8, 4), torch.randn(2, 8, 4)
    before = a.clone(), b.clone()
    with torch.no_grad(), pytest.raises(IndexError):
        torch.compile(writes_twice, backend="dynaxla")(a, b, torch.tensor([i]), torch.tensor([j]), torch.randn(2, 1, 4))
    torch.testing.assert_close((a, b), before)
    assert (a._version, b._version) == (0, 0)


@pytest.mark.parametrize(
    ("i", "j", "succeeds"), [(1, 2, True), (8, 0, False), (0, 8, False), (-1, 0, False), (0, -9, False), (0, -1, True)]
)
def test_failed_asynchronous_program_writes_old_values(i: int, j: int, succeeds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, a later call raises the error."""
    internals.late_writes_without_checks(monkeypatch)
    codes = internals.reported_checks(monkeypatch)

    def function(a: Tensor, b: Tensor, i: Tensor, j: Tensor, k: Tensor) -> None:
        a[1:].copy_(a[:-1] * 2)
        b[0, :2].zero_()
        writes_twice(a, b, i, j, k)

    args = torch.randn(2, 8, 4), torch.randn(2, 8, 4), torch.tensor([i]), torch.tensor([j]), torch.randn(2, 1, 4)
    expected = copy.deepcopy(args)
    if succeeds:
        function(*expected)
    with torch.no_grad():
        torch.compile(function, backend="dynaxla")(*args)
    torch.testing.assert_close(args, expected)
    assert codes == [succeeds]


def test_writes_that_cannot_write_old_values_stay_in_program(monkeypatch: pytest.MonkeyPatch, late_writes: list[LateWrites]) -> None:
    internals.late_writes_without_checks(monkeypatch)
    check(accumulated, c(), at(3, 3, 1), row(3))
    check(masked, c(), row())
    check(scatters, c(), at(3, 5), row(2))
    assert late_writes == []


def test_inference_tensor_is_refused_before_any_write() -> None:
    compiled = torch.compile(writes_twice, backend="dynaxla")
    with torch.inference_mode():
        a = torch.randn(2, 8, 4)
    b, k = torch.randn(2, 8, 4), torch.randn(2, 1, 4)
    before = a.clone(), b.clone()
    with torch.no_grad(), pytest.raises(RuntimeError, match="inference tensor"):
        compiled(a, b, at(1), at(2), k)
    torch.testing.assert_close((a, b), before)
    with torch.inference_mode():
        compiled(a, b, at(1), at(2), k)
    torch.testing.assert_close(a[:, 1:2], k)


def test_parameters_without_gradients(late_writes: list[LateWrites]) -> None:
    parameter = torch.nn.Parameter(torch.randn(2, 8, 4))

    def function(k: Tensor) -> Tensor:
        with torch.no_grad():
            parameter[:, 1:2] = k
        return k * 2

    k = torch.randn(2, 1, 4)
    torch.compile(function, backend="dynaxla")(k)
    torch.testing.assert_close(parameter[:, 1:2].detach(), k)
    assert parameter._version == 2
    assert ops(late_writes) == ["copy_"]


def test_training_has_no_late_writes(late_writes: list[LateWrites]) -> None:
    def function(c: Tensor, i: Tensor, k: Tensor, w: Tensor) -> Tensor:
        with torch.no_grad():
            c.index_copy_(1, i, k)
        return (c @ w).square().sum()

    def gradient(function: Function) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        c, w = torch.randn(2, 8, 4), torch.randn(4, 4, requires_grad=True)
        function(c, at(2), torch.randn(2, 1, 4), w).backward()
        assert w.grad is not None
        return c, w.grad

    torch.testing.assert_close(gradient(torch.compile(function, backend="dynaxla")), gradient(function))
    assert late_writes == []


def test_positions_as_numbers_need_one_program() -> None:
    def function(c: Tensor, p: int, k: Tensor) -> None:
        c[:, :, p : p + 1] = k.sin()

    compiled, cache = torch.compile(function, backend="dynaxla"), c()
    compiled(cache, 1, row())
    compiled(cache, 2, row())
    before = metrics.snapshot()["compile"]
    for position in range(3, 8):
        k = row()
        compiled(cache, position, k)
        torch.testing.assert_close(cache[:, :, position : position + 1], k.sin())
    assert metrics.snapshot()["compile"] == before


def test_positions_that_are_read_from_tensors() -> None:
    def function(c: Tensor, p: Tensor, k: Tensor) -> None:
        start = p.item()
        torch._check(start >= 0)
        torch._check(start < 8)
        c.narrow(2, start, 1).copy_(k)

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        check(function, c(), torch.tensor(3), row())


def test_dynamic_sizes(late_writes: list[LateWrites]) -> None:
    def function(c: Tensor, i: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        c.index_copy_(1, i, k)
        c[:, -1] = k[:, 0] * 2
        return c[:, 1:], c

    compiled = torch.compile(function, backend="dynaxla", dynamic=True)
    for size in (5, 8, 11):
        mine = torch.randn(2, size, 4), torch.tensor([size - 2, 0]), torch.randn(2, 2, 4)
        theirs = copy.deepcopy(mine)
        torch.testing.assert_close(observed(compiled, mine), observed(function, theirs))
    assert [len(ops([late])) for late in late_writes] == [2]


@pytest.mark.parametrize("second", [slice(1, 3), slice(2, 4)])
def test_inputs_that_share_memory(second: slice) -> None:
    def function(a: Tensor, b: Tensor, i: Tensor, k: Tensor) -> Tensor:
        a.index_copy_(1, i, k)
        return b.sum()

    mine, k = torch.randn(4, 8, 4), torch.randn(2, 1, 4)
    theirs = mine.clone()
    found = torch.compile(function, backend="dynaxla")(mine[:2], mine[second], at(1), k)
    torch.testing.assert_close((found, mine), (function(theirs[:2], theirs[second], at(1), k), theirs))


class Decoder(torch.nn.Module):
    """A layer with a cache of its results, and the number of cached rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.register_buffer("cache", torch.zeros(2, 8, 4))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.cache.index_copy_(1, self.count.view(1), self.linear(x))
        self.count += 1
        return (self.cache * self.linear.weight.sum()).sum()


@pytest.mark.parametrize("freeze", [False, True])
def test_module_with_cache(freeze: bool, late_writes: list[LateWrites]) -> None:
    mine = Decoder().requires_grad_(False)
    theirs = copy.deepcopy(mine)
    compiled = torch.compile(mine, backend="dynaxla", options={"freeze": freeze})
    for _ in range(3):
        x = torch.randn(2, 1, 4)
        torch.testing.assert_close(compiled(x), theirs(x))
        torch.testing.assert_close(mine.state_dict(), theirs.state_dict())
    assert ops(late_writes)[0] == "index_copy_"


def test_small_inputs_have_no_late_writes(late_writes: list[LateWrites], monkeypatch: pytest.MonkeyPatch) -> None:
    internals.late_writes_of(monkeypatch, c().nbytes + 1)
    check(index_copy, c(), at(3), row())
    assert late_writes == []
    torch._dynamo.reset()
    internals.late_writes_of(monkeypatch, c().nbytes)
    check(index_copy, c(), at(3), row())
    assert len(late_writes) == 1


def test_step_with_late_writes(late_writes: list[LateWrites]) -> None:
    """The step writes each loss to the next row of a buffer."""

    def make_step() -> tuple[Tensor, Tensor, Function]:
        losses, count = torch.zeros(8), torch.zeros(1, dtype=torch.int64)
        model = torch.nn.Linear(4, 1)
        torch.nn.init.ones_(model.weight)

        def step(x: Tensor) -> Tensor:
            loss = model(x).square().sum()
            loss.backward()
            model.zero_grad()
            losses.index_copy_(0, count, loss.detach().view(1))
            count.add_(1)
            return loss.detach()

        torch.nn.init.zeros_(model.bias)
        return losses, count, step

    mine, theirs = make_step(), make_step()
    compiled = dynaxla.compile_step(mine[2], fullgraph=True)
    for _ in range(3):
        x = torch.randn(2, 4)
        torch.testing.assert_close(compiled(x), theirs[2](x))
        torch.testing.assert_close(mine[:2], theirs[:2])
    assert set(ops(late_writes)) == {"index_copy_"}
