"""Writes to places in inputs that torch does behind the program: values, versions and aliases as in eager mode; all writes, or none."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from dynaxla.capture import late_writes
from dynaxla.capture.late_writes import LateWrites
from dynaxla.engine import compositions

Function = Callable[..., Any]


@pytest.fixture(autouse=True)
def taken(monkeypatch: pytest.MonkeyPatch) -> list[LateWrites]:
    """What has been taken out of graphs, in which nothing is too small."""
    found: list[LateWrites] = []

    def take(graph: Any) -> LateWrites | None:
        if (late := late_writes.take_late_writes(graph)) is not None:
            found.append(late)
        return late

    monkeypatch.setattr(late_writes, "SMALL", 0)
    monkeypatch.setattr(compositions, "take_late_writes", take)
    return found


def ops(taken: Sequence[LateWrites]) -> list[str]:
    """The ops that write, of all that has been taken out of graphs."""
    targets = [node.target for late in taken for node in late.writes.graph.nodes]
    return [op._schema.name.removeprefix("aten::") for op in targets if isinstance(op, torch._ops.OpOverload) and op._schema.is_mutable]


def observed(function: Function, args: Sequence[Any]) -> list[Any]:
    """What a call gives and changes: results, inputs, which of them share memory, and whether each input was written to."""
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    versions = [tensor._version for tensor in tensors]
    results = function(*args)
    given = [item for item in (results if isinstance(results, tuple) else (results,)) if item is not None]
    storages = {tensor.untyped_storage().data_ptr(): index for index, tensor in reversed(list(enumerate(tensors)))}
    shares = [(storages.get(item.untyped_storage().data_ptr()), item.stride(), item.storage_offset()) for item in given]
    is_written = [tensor._version > version for tensor, version in zip(tensors, versions, strict=True)]
    return [given, tensors, shares, is_written]


def check(function: Function, *args: Any, times: int = 1, **settings: Any) -> None:
    """A compiled function does what it does in eager mode."""
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


def at(*places: int) -> Tensor:
    return torch.tensor(places)


def index_copy(c: Tensor, i: Tensor, r: Tensor) -> None:
    c.index_copy_(2, i, r)


def by_tensor(c: Tensor, i: Tensor, r: Tensor) -> Tensor:
    c[:, :, i] = r
    return c


def by_slice(c: Tensor, r: Tensor) -> Tensor:
    c[:, :, 3:5] = r
    return c[1:]


def deep(c: Tensor, r: Tensor) -> None:
    c[0, :, 3] = r[0, :, 0]
    c[1].transpose(0, 1)[2] = r[1, :, 0]
    c[0, 1, 2, 3] = 5


def shifted(c: Tensor) -> None:
    c[:-1] = c[1:]


def swapped(a: Tensor, b: Tensor) -> None:
    a[0], b[0] = b[0], a[0]


def swapped_rows(c: Tensor) -> None:
    c[0], c[1] = c[1].clone(), c[0].clone()


def reads_before_and_after(c: Tensor, i: Tensor, r: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    before = c.sum()
    kept = c[0].clone()
    c.index_copy_(2, i, r * 2)
    return before, kept, (c * 3).sum((0, 1))


def attention(c: Tensor, v: Tensor, i: Tensor, r: Tensor, q: Tensor) -> Tensor:
    c.index_copy_(2, i, r)
    v[:, :, i] = r.cos()
    return torch.softmax(q @ c.transpose(2, 3), -1) @ v


def computed_places(c: Tensor, r: Tensor) -> None:
    c.index_copy_(2, (r.sum((0, 1, 3)) > 0).long() + torch.arange(2) * 3, r)


def second_reads_first(c: Tensor, r: Tensor) -> Tensor:
    c[:, :, 0:1] = r
    c[:, :, 1:2] = c[:, :, 0:1] * 2
    c[:, :, 0:1] += c[:, :, 1:2]
    return c[:, :, 0]


def source_is_written(c: Tensor, k: Tensor, i: Tensor) -> None:
    c.index_copy_(2, i, k)
    k[:, :, 0] = 7.0


def place_is_counted(c: Tensor, i: Tensor, r: Tensor) -> Tensor:
    c.index_copy_(2, i, r)
    i += 1
    return i


def another_takes_the_old(c: Tensor, a: Tensor) -> None:
    a.copy_(c)
    c[0] = 1
    a[1] = c[0]


def fresh_copy_is_returned(c: Tensor, i: Tensor, r: Tensor) -> Tensor:
    new = c.index_copy(2, i, r)
    c.copy_(new)
    return new


def between(c: Tensor, r: Tensor) -> Tensor:
    c[:, :, 2:3] = r
    old = c.clone()
    c[:, :, 4:5] = r
    return old


def scatters(c: Tensor, i: Tensor, r: Tensor) -> None:
    places = i.view(1, 1, -1, 1).expand(2, 3, i.numel(), 4)
    c.scatter_(2, places, r)
    c.scatter_(2, places[:1, :1], 2.5)
    c[1].scatter_add_(1, places[1], r[0])


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
    one, other = c.chunk(2)
    one[:, 1] = 4
    other.unbind(1)[2].copy_(other[:, 0])
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
    (deep, (c(), row()), ["copy_"] * 3),
    (shifted, (c(),), ["copy_"]),
    (swapped, (c(), c()), ["copy_", "copy_"]),
    (swapped_rows, (c(),), ["copy_", "copy_"]),
    (reads_before_and_after, (c(), at(3), row()), ["index_copy_"]),
    (attention, (c(), c(), at(2, 3), row(2), row()), ["index_copy_", "index_put_"]),
    (computed_places, (c(), row(2)), ["index_copy_"]),
    (second_reads_first, (c(), row()), ["copy_"] * 4),
    (source_is_written, (c(), row(2), at(3, 1)), ["index_copy_", "fill_"]),
    (place_is_counted, (c(), at(3), row()), ["index_copy_"]),
    (another_takes_the_old, (c(), c()), ["fill_"]),
    (fresh_copy_is_returned, (c(), at(3), row()), []),
    (between, (c(), row()), ["copy_", "copy_"]),
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


@pytest.mark.parametrize(("function", "args", "written"), CASES, ids=[f"{case[0].__name__}{i}" for i, case in enumerate(CASES)])
def test_as_in_eager_mode(function: Function, args: tuple[Any, ...], written: list[str], taken: list[LateWrites]) -> None:
    check(function, *args)
    assert ops(taken) == written
