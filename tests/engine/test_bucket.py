"""Tests of engine/bucket.py: one executable serves all sizes of a bucket: padding, views, writes, and calls that need exact sizes."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from dynaxla.passes.padding.round_up import round_up_size
from support.comparisons.compare import assert_equal
from support.comparisons.rounded_sizes import SIZES, compiled, counts, features, poisoned

pytestmark = pytest.mark.usefixtures("quick_xla")


@pytest.fixture(autouse=True)
def poison_in_padding() -> Any:
    with poisoned():
        yield


def gradients(function: Callable[..., torch.Tensor], network: torch.nn.Module, *inputs: torch.Tensor) -> list[torch.Tensor]:
    leaves = [item.detach().clone().requires_grad_(item.is_floating_point()) for item in inputs]
    result = function(*leaves)
    differentiable = [leaf for leaf in (*network.parameters(), *leaves) if leaf.requires_grad]
    return [result.detach(), *torch.autograd.grad(result, differentiable)]


class Block(torch.nn.Module):
    """A transformer's layer with a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(7, 4)
        self.norm = torch.nn.LayerNorm(4)
        self.inner, self.outer = torch.nn.Linear(4, 6), torch.nn.Linear(6, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor, n: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(x + self.table(n) + y.softmax(1)[..., None])
        heads = hidden.unflatten(-1, (2, 2)).transpose(1, 2)
        attended = F.scaled_dot_product_attention(heads, heads, heads, attn_mask=(n > 0)[:, None, None]).transpose(1, 2).flatten(2)
        hidden = attended + self.outer(F.gelu(self.inner(hidden))) + torch.tensordot(hidden, t[:4], 1)
        loss = F.cross_entropy(hidden.reshape(-1, 4), n.reshape(-1) % 4)
        ends = hidden[:, -1].square().mean() + hidden[:, -3:].exp().sum() + (hidden[:, 1:] * hidden[:, :-1]).sum()
        return loss + ends + hidden.logsumexp(1).sum() + hidden.amax()


@pytest.mark.thorough
def test_gradients() -> None:
    network = Block().double()
    run, before = compiled(network), counts()
    for sizes in SIZES[:2]:
        inputs = [item.double() if item.is_floating_point() else item for item in features(*sizes)]
        inputs[2][:, 0] = 1  # each query attends to something
        for found, expected in zip(gradients(run, network, *inputs), gradients(network, network, *inputs), strict=True):
            assert_equal(found, expected)
            assert found.stride() == expected.stride()
    assert counts() == (before[0] + 2, before[1])


def test_training_compiles_one_program_for_each_bucket_of_lengths() -> None:
    """Lengths begin at 2, because torch traces length 1 separately."""
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 9))
    other = copy.deepcopy(network)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (network, other)]
    run, before = compiled(network, dynamic=None), counts()
    lengths = torch.randint(2, 65, (100,)).tolist()
    for length in lengths:
        tokens, losses = torch.randint(0, 9, (2, length)), []
        torch._dynamo.mark_dynamic(tokens, 1)
        for call, optimizer in zip((run, other), optimizers, strict=True):
            optimizer.zero_grad()
            loss = F.cross_entropy(call(tokens).flatten(0, 1), tokens.flatten())
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        torch.testing.assert_close(*losses)
    assert counts() == (before[0] + 2 * len({*map(round_up_size, lengths)}), before[1])


@pytest.mark.quick
def test_inputs_with_other_strides() -> None:
    run = compiled(lambda x, y: (x + 1, y.t().contiguous() * 2, (x.sum(0), x)))
    wide = torch.randn(9, 40)
    for x in (wide[:, 3:12], wide.t()[5:14], wide[:1, :9].expand(9, 9)):
        assert_equal(run(x, wide[:, ::4]), (x + 1, wide[:, ::4].t().contiguous() * 2, (x.sum(0), x)))


def test_result_is_a_view_of_the_padded_result() -> None:
    with torch.no_grad():
        found = compiled(lambda x: x + 1)(torch.zeros(9, 4))
    assert found.shape == (9, 4)
    assert found.untyped_storage().nbytes() == 12 * 4 * 4


@pytest.mark.quick
def test_writes_and_views_of_inputs() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[Any, ...]:
        x.add_(y.sum(0))
        return x[1:], y.t(), y.shape[0] * 3, x.shape

    run = compiled(function)
    for size in (9, 10, 11):
        x, y = torch.randn(size, 5), torch.randn(size, 5)
        other = x.clone()
        found, expected = run(x, y), function(other, y)
        assert_equal(found, expected)
        torch.testing.assert_close(x, other)
        assert found[0]._base is x or found[0].data_ptr() == x[1:].data_ptr()
        assert found[1].data_ptr() == y.data_ptr()


def test_views_of_values_begin_at_true_positions() -> None:
    def function(x: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ends = (x + 1)[:, -1], (x * 2)[-3:].t(), torch.cat([x[:3], x])[-2:].unsqueeze(0), (x - 1)[x.shape[0] - 2]
        return *ends, table[x.shape[0] - 2], (table + 1)[x.shape[0] - 2]

    run, before, table = compiled(function, dynamic=None), counts(), torch.randn(20, 4)
    for size in (9, 11, 12):
        x = torch.randn(size, 5)
        torch._dynamo.mark_dynamic(x, 0)
        found = run(x, table)
        assert_equal(found, function(x, table))
        assert found[4].data_ptr() == table[size - 2].data_ptr()
    assert counts() == (before[0] + 1, before[1])


def test_value_that_is_returned_twice_has_one_memory() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x - 1
        return y, y.mul_(x[:1])

    found = compiled(function)(torch.randn(9, 5))
    assert found[0].data_ptr() == found[1].data_ptr()


@pytest.mark.quick
@pytest.mark.parametrize("requires_grad", [False, True])
def test_outputs_that_share_memory(requires_grad: bool) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first, second = (x + 1).chunk(2, 1)
        y = (x * 2).t()
        return first, second, y[-3:].t(), y, *(x - 1).unbind(1)[1:3], y[0]

    run, before = compiled(function), counts()
    for size in (9, 10, 11):
        x = torch.randn(size, 6, requires_grad=requires_grad)
        found, expected = run(x), function(x)
        for mine, theirs in zip(found, expected, strict=True):
            assert_equal(mine.detach(), theirs.detach())
            assert (mine.stride(), mine.storage_offset()) == (theirs.stride(), theirs.storage_offset())
        storages = [[item.untyped_storage().data_ptr() for item in items] for items in (found, expected)]
        assert [storages[0].index(storage) for storage in storages[0]] == [storages[1].index(storage) for storage in storages[1]]
    assert counts() == (before[0] + 1, before[1])


@pytest.mark.quick
def test_fractional_numbers_computed_from_sizes() -> None:
    run, before = compiled(lambda x, y: x @ y * x.shape[1] ** -0.5), counts()
    for size in (9, 11):
        x = torch.randn(2, 3, size)
        assert_equal(run(x[0], x[1].t()), x[0] @ x[1].t() * size**-0.5)
    assert counts()[1] == before[1]
    run = compiled(lambda q: F.scaled_dot_product_attention(q, q, q, attn_mask=q[0, :1, :, 0]))
    for size in (9, 11):
        q = torch.randn(1, 2, 5, size)
        assert_equal(run(q), F.scaled_dot_product_attention(q, q, q, attn_mask=q[0, :1, :, 0]))


def test_indices_out_of_range_raise() -> None:
    run = compiled(lambda x, n: (x[n], x.gather(0, n)))
    x = torch.arange(9.0)
    assert_equal(run(x, torch.tensor([8, 0, 3, 1, 7])), (x[[8, 0, 3, 1, 7]],) * 2)
    with pytest.raises(IndexError, match="out of bounds"):
        run(x, torch.tensor([9, 0, 3, 1, 7]))  # index 9 exists only in the padding
    with pytest.raises(RuntimeError, match="out of bounds"):
        run(x, torch.tensor([-1, 0, 3, 1, 7]))


def test_sizes_with_upper_bounds() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x.cumsum(0) if x.shape[0] < 11 else x

    x = torch.ones(9, 3)
    torch._dynamo.mark_dynamic(x, 0, min=5, max=10)
    run, before = compiled(lambda x: x.cumsum(0), dynamic=None), counts()
    assert_equal(run(x), x.cumsum(0))
    assert_equal(run(torch.ones(10, 3)), torch.ones(10, 3).cumsum(0))
    assert counts() == (before[0] + 1, before[1])
    # Nine is rounded to ten, which the branch allows.
    run, before = compiled(function), counts()
    for size in (9, 10, 7):
        assert_equal(run(torch.ones(size, 3)), function(torch.ones(size, 3)))
    assert counts()[1] == before[1]


def test_size_that_must_not_be_rounded() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x.view(-1, 5).sum(0) if x.shape[0] % 5 == 0 else x

    run, before = compiled(function), counts()
    for size in (20, 35):
        assert_equal(run(torch.ones(size)), function(torch.ones(size)))
    assert counts()[1] == before[1]


def test_log_names_the_op_that_needs_exact_sizes(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="dynaxla"):
        found = compiled(lambda x: x + x.mode(0).values)(torch.arange(9.0) + 4)
    assert_equal(found, torch.arange(9.0) + 8)
    assert "aten.mode" in caplog.text
    assert "test_bucket.py" in caplog.text


def test_fake_tensors_run_the_graph_itself() -> None:
    run = compiled(lambda x: x.sum(0))
    run(torch.ones(9, 3))
    with torch._subclasses.FakeTensorMode() as mode:
        assert run(mode.from_tensor(torch.ones(9, 3))).shape == (3,)


def test_retrace_backend() -> None:
    run = torch.compile(lambda x: x.mean(0), backend="dynaxla_retrace", dynamic=True, options={"sizes": "buckets"})
    assert_equal(run(torch.arange(9.0)), torch.tensor(4.0))


def test_first_two_sizes_stay_exact_by_default() -> None:
    options = {"compile": "now"}
    run = torch.compile(lambda x: torch.softmax(x, 1).cumsum(1), backend="dynaxla", fullgraph=True, dynamic=True, options=options)
    before = counts()

    def compiled_for(length: int) -> int:
        x = torch.randn(3, length)
        assert_equal(run(x), torch.softmax(x, 1).cumsum(1))
        return counts()[0] - before[0]

    assert [compiled_for(length) for length in (9, 10, 9)] == [1, 2, 2]
    # 13 to 16 are one bucket, 17 to 24 another. The first two sizes keep their own programs.
    assert [compiled_for(length) for length in (13, 15, 10, 20, 24, 16, 9)] == [3, 3, 3, 4, 4, 4, 4]
    assert counts()[1] == before[1]


def test_results_that_overlap_themselves_have_exact_sizes() -> None:
    """In eager mode, some results have their operand's overlapping strides: padding would overwrite valid elements."""

    def scatter_row(x: torch.Tensor) -> torch.Tensor:
        return x.mT.select_scatter(x[:, 0] * 0 + 7.0, 0, 1)

    run, before = compiled(scatter_row), counts()
    for length in (5, 7):
        x = torch.arange(length + 2.0).as_strided((3, length), (1, 1))
        assert_equal(run(x), scatter_row(x))
    assert counts() == (before[0] + 2, before[1] + 2)
