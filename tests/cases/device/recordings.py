"""Checks that lazy mode on the device "jax" gives the CPU's results, with few programs."""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import dynaxla
from dynaxla.device import lazy_mode, lazy_programs, storages
from dynaxla.observe import metrics

from .ops import _alike


def _is_recorded(tensor: torch.Tensor) -> bool:
    return isinstance(storages.content_of(tensor.untyped_storage()), storages.StorageContent)


def _counts(function: Callable[[], Any]) -> dict[str, int]:
    """Returns the increase of each counter during a call of the function."""
    before = metrics.snapshot()
    function()
    return {name: count - before.get(name, 0) for name, count in metrics.snapshot().items() if count != before.get(name, 0)}


def check_reads_run_the_recording() -> None:
    reads: list[Callable[[torch.Tensor], Any]] = [
        lambda x: x[0, 0].item(), lambda x: x.cpu(), repr, lambda x: bool(x[0, 0] > 0), lambda x: x.nonzero(), lambda x: x[x > 0],
        lambda x: x.tolist(), lambda x: x.to(device="cpu", dtype=torch.float64), lambda x: copy.deepcopy(x),
        lambda x: dynaxla.device.sync(), lambda x: torch.jax.synchronize(), lambda x: x.untyped_storage()[0],
        lambda x: torch.ones(2, 3).copy_(x), lambda x: float(x.sum()), lambda x: x.detach().clone().cpu(),
        lambda x: torch.jax.Event().record(),
    ]  # fmt: skip
    for read in reads:
        with dynaxla.device.lazy():
            x = torch.ones(2, 3, device="jax") + 1
            y = x * 2
            assert _is_recorded(x)
            read(x)
            assert not any(recording.steps for recording in lazy_mode._recordings.values()), read
            assert (x.tolist(), y.tolist()) == ([[2] * 3] * 2, [[4] * 3] * 2)
    with dynaxla.device.lazy():
        x = torch.ones(2, device="jax") + 1
    assert not _is_recorded(x + 1)
    assert x.tolist() == [2, 2]


def check_ops_that_are_not_recorded_between_recorded_ops() -> None:
    """The recorded ops are the same for each size, with other ops that are not recorded between them."""
    for size in (0, 3, 5, 0):
        a, other = torch.arange(3.0, device="jax"), torch.ones(size, device="jax")
        with dynaxla.device.lazy():
            b = a * 2
            if size:
                assert len(torch.nonzero(other)) == size
            c = b + 1
        assert c.tolist() == [1, 3, 5]


def check_views_and_writes() -> None:
    def write(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x.t()[1].mul_(2)
        x[:, 1:3].transpose(0, 1).add_(1)
        x.view(-1)[::5].zero_()
        x.unfold(1, 2, 2)[0, 1].fill_(-1)
        x[1].view(torch.int32)[2:].bitwise_not_()
        x.diagonal().copy_(torch.arange(3.0, device=x.device))
        x[2].copy_(torch.arange(4.0))
        y = x.view(3, 2, 2)
        y.squeeze_(0).transpose_(0, 1).unsqueeze_(0)
        y.as_strided((2,), (1,), 10).add_(torch.ones(1, device=x.device))
        torch.add(x, x, out=torch.empty(0, device=x.device))
        z = x.clone()
        z[0] = x[1]
        x.mul_(x)
        return y, x[x.shape[0] - 1], x.expand(2, 3, 4), z, torch.max(x, 1, out=(x.new_empty(3), x.new_empty(3, dtype=torch.long)))

    with dynaxla.device.lazy():
        done = _counts(lambda: _alike(write, torch.randn(3, 4)))
        assert (done["execute"], done.get("device_ops", 0)) == (1, 0)
        _alike(lambda z: (torch.view_as_real(z).mul_(2), z.conj().imag.add_(1), z.conj() + 1), torch.randn(2, 2, dtype=torch.complex64))


class _LeaveContext(Exception):
    pass


def check_recorded_ops_read_values_from_before_later_writes() -> None:
    x, y = torch.ones(3, device="jax"), torch.zeros(3, device="jax")
    with contextlib.suppress(_LeaveContext), dynaxla.device.lazy():
        increased = x + 1
        x.copy_(torch.full((3,), 5.0))
        y.add_(increased)
        raise _LeaveContext
    x.add_(1)
    assert _is_recorded(increased)
    assert (increased.tolist(), x.tolist(), y.tolist()) == ([2] * 3, [6] * 3, [2] * 3)


def _result_counts(function: Callable[[], Any]) -> list[int]:
    """Returns the number of results of each program that runs during the function."""
    counts: list[int] = []
    run = lazy_programs.run

    def counting_run(steps: Any, arrays: Any, wanted: Any, device: Any) -> Any:
        counts.append(len(wanted))
        return run(steps, arrays, wanted, device)

    lazy_programs.run = counting_run
    try:
        function()
    finally:
        lazy_programs.run = run
    return counts


def check_values_without_references_are_not_computed() -> None:
    x = torch.ones(4, 4, device="jax")
    with dynaxla.device.lazy():
        kept = x @ x
        (x.exp() @ x).sin()
        kept = kept + 1
        assert _result_counts(dynaxla.device.sync) == [1]
        (x + 3).mul_(2)
        assert "execute" not in _counts(dynaxla.device.sync)
        middle = x + 1
        last = middle[0] * 2
        view = middle.t()[:1]
        del middle
        assert _result_counts(dynaxla.device.sync) == [2]  # `last`, and the storage of `middle`, which `view` shares
    assert (kept.tolist(), view.tolist(), last.tolist()) == ([[5] * 4] * 4, [[2] * 4], [4] * 4)


def check_recordings_reuse_programs() -> None:
    """A recording with other numbers compiles nothing. Numbers that compare equal, such as 0.0 and -0.0 or 1 and True, are not confused."""
    x = torch.linspace(-1, 1, 6).to("jax")

    def compute(number: float) -> list[torch.Tensor]:
        with dynaxla.device.lazy():
            y = (x * number).add_(x, alpha=number + 2)
            return [y.clamp(min=number / 4), y[1:].sum() - number, torch.where(y > number, y, number)]

    def expected(number: float) -> list[torch.Tensor]:
        host = torch.linspace(-1, 1, 6)
        y = (host * number).add_(host, alpha=number + 2)
        return [y.clamp(min=number / 4), y[1:].sum() - number, torch.where(y > number, y, number)]

    compute(0.25)
    for number in (0.5, -3.0, float("nan"), 1e30, -0.0, 0.0):
        results: list[torch.Tensor] = []
        counts = _counts(lambda number=number, results=results: results.extend(compute(number)))
        assert counts.get("compile", 0) == 0, number
        for actual, reference in zip(results, expected(number), strict=True):
            torch.testing.assert_close(actual.cpu(), reference, equal_nan=True)
    with dynaxla.device.lazy():
        assert [torch.zeros(1, device="jax").add(number).dtype for number in (0.0, 1, True)] == [torch.float32] * 3
        one = torch.tensor(1, device="jax")
        assert [(one + number).dtype for number in (1.0, 1, True)] == [torch.float32, torch.int64, torch.int64]
        assert (1.0 / (torch.zeros(1, device="jax") * -0.0)).item() == -torch.inf
        assert (1.0 / (torch.zeros(1, device="jax") * 0.0)).item() == torch.inf
        assert torch.sum(x.view(2, 3), dim=(0, 1)).dim() == 0
        assert torch.sum(x.view(2, 3), dim=(0,), keepdim=True).shape == (1, 3)
        assert torch.full((2,), 2**40, device="jax").mul_(3).tolist() == [3 * 2**40] * 2


def check_random_numbers_are_those_of_eager_mode() -> None:
    def draw() -> list[Any]:
        x = torch.rand(3, device="jax")
        drawn = [x, torch.randn(2, 2, device="jax"), nn.functional.dropout(torch.ones(100, device="jax"), 0.3)]
        drawn += [torch.rand(3, device="jax"), x.clone().normal_(), torch.randperm(7, device="jax")]
        return [value.tolist() for value in drawn]

    torch.manual_seed(3)
    expected = draw()
    with dynaxla.device.lazy():
        torch.manual_seed(3)
        assert draw() == expected
        assert draw() != expected
        draws = [torch.rand(4, device="jax") for _ in range(3)]
        dynaxla.device.sync()
        assert len({tuple(drawn.tolist()) for drawn in draws}) == 3
        generated = [torch.rand(2, device="jax", generator=torch.Generator().manual_seed(3)) for _ in range(2)]
        assert generated[0].tolist() == generated[1].tolist()


def check_failed_checks() -> None:
    """The error names the op. Tensors that had values keep them, and reading a result that was not computed raises."""
    table, kept = torch.arange(6.0, device="jax"), torch.ones(2, device="jax")
    with dynaxla.device.lazy():
        kept.add_(1)
        table.mul_(2)
        view = table[1:3]
        found = torch.index_select(table, 0, torch.tensor([0, 17], device="jax"))
        later = found + kept
        with pytest.raises(IndexError) as raised:
            kept.tolist()
        (note,) = raised.value.__notes__
        line = check_failed_checks.__code__.co_firstlineno + 7
        assert f"aten.index_select.default raised this. It was recorded in lazy mode at {__file__}:{line}, in check_failed_checks" in note
        assert (kept.tolist(), table.tolist(), view.tolist()) == ([1, 1], [0, 1, 2, 3, 4, 5], [1, 2])
        for lost in (found, later):
            with pytest.raises(dynaxla.errors.ExecutionError, match=r"has no value.*IndexError"):
                lost.cpu()
            with pytest.raises(dynaxla.errors.ExecutionError, match="has no value"):
                lost + 1
        later.copy_(torch.ones(2))
        assert (later + kept).tolist() == [2, 2]
        torch.index_select(table, 0, torch.tensor([17], device="jax"))  # the result has no reference
        with pytest.raises(IndexError):
            dynaxla.device.sync()
        dynaxla.device.sync()
        with pytest.raises(RuntimeError, match="can't be cast"):
            torch.ones(2, dtype=torch.long, device="jax").add_(2.5)
        with pytest.raises(RuntimeError, match="same device"):
            kept + torch.ones(2)
        with pytest.raises(RuntimeError, match=r"size of tensor|broadcast|shape"):
            kept + torch.ones(3, device="jax")
    assert kept.tolist() == [1, 1]


def check_an_interruption_changes_nothing() -> None:
    x = torch.ones(2, device="jax")
    compiled = lazy_programs.op_compiler.compile_program

    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    with dynaxla.device.lazy():
        y = x * 3
        x.add_(y)
        lazy_programs.op_compiler.compile_program = interrupt
        try:
            with pytest.raises(KeyboardInterrupt):
                dynaxla.device.sync()
        finally:
            lazy_programs.op_compiler.compile_program = compiled
        assert (x.tolist(), y.tolist()) == ([4, 4], [3, 3])


def check_ops_while_a_recording_runs() -> None:
    """A finalizer or a signal handler may use the device meanwhile: its op joins the recording, or runs it."""
    run = lazy_programs.run
    uses: list[tuple[Callable[[torch.Tensor], Any], bool]] = [
        (lambda x: x.add_(1), True), (lambda x: x.add_(1).tolist(), True), (lambda x: (x * 2).sum().item(), False),
    ]  # fmt: skip
    for use, is_written in uses:
        x = torch.full((3,), 2.0, device="jax")
        remaining = [use]

        def interfere(*args: Any, remaining: Any = remaining, x: torch.Tensor = x) -> Any:
            if remaining:
                remaining.pop()(x)
            return run(*args)

        with dynaxla.device.lazy():
            y = (x * 7).add_(x)
            lazy_programs.run = interfere
            try:
                assert y.tolist() == [16] * 3
            finally:
                lazy_programs.run = run
        assert not remaining
        assert x.tolist() == [3 if is_written else 2] * 3


def check_number_of_programs_of_one_recording_is_bounded() -> None:
    """Few programs are compiled, although Python may free reference cycles at any time, and so each run may need other values."""
    x = torch.arange(4.0, device="jax")

    def keep(needed_bits: int) -> int:
        with dynaxla.device.lazy():
            values = [x + (number + 0.5) for number in range(5)]
            total = values[0]
            for value in values[1:]:
                total = total * value
            kept = {number: value for number, value in enumerate(values) if needed_bits >> number & 1}
            del values, value
        for number, value in kept.items():
            assert value.tolist() == [element + number + 0.5 for element in range(4)]
        assert total.tolist()[0] == 0.5 * 1.5 * 2.5 * 3.5 * 4.5
        return len(kept)

    counts = _counts(lambda: [keep(needed_bits) for needed_bits in (31, *range(31))])
    assert counts["compile"] == lazy_programs._MAX_PROGRAMS_PER_KEY
    assert counts["execute"] == 32


def check_modes() -> None:
    def is_lazy() -> bool:
        return _is_recorded(torch.ones(1, device="jax") + 1)

    with pytest.raises(ValueError, match="'fast'"):
        dynaxla.device.set_mode("fast")
    with dynaxla.device.lazy(), dynaxla.device.lazy():
        assert is_lazy()
    assert not is_lazy()
    dynaxla.device.set_mode("lazy")
    with dynaxla.device.lazy():
        assert is_lazy()
    assert is_lazy()
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(is_lazy()))
    thread.start()
    thread.join()
    assert found == [True]
    kept = torch.ones(1, device="jax") + 1
    dynaxla.device.set_mode("eager")
    assert not _is_recorded(kept) or storages.content_of(kept.untyped_storage()).recording is None
    assert not is_lazy()


def check_threads() -> None:
    """The threads add to one recording, and each gets its own values."""
    wrong: list[Any] = []

    def work(number: int) -> None:
        x = torch.full((4,), float(number), device="jax", requires_grad=True)
        for step in range(6):
            y = (x * step + number).sum()
            (gradient,) = torch.autograd.grad(y, x)
            total = x.detach().clone()
            total[1:].add_(gradient[1:])
            if total.tolist() != [number] + [number + step] * 3:
                wrong.append((number, step, total.tolist()))

    with dynaxla.device.lazy():
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


def check_array_that_another_thread_borrows_while_an_op_is_recorded() -> None:
    """A compiled program in another thread takes the storage's array between two reads by the recording thread."""
    find = lazy_mode.eager_mode.find_or_compile
    y = torch.arange(5.0, device="jax")
    storage = y.untyped_storage()
    array, in_use = storages.array_of(storage), storages.InUseContent()

    def find_after_another_program(*args: Any) -> Any:
        assert in_use.acquire([storage], [array])
        program = find(*args)
        in_use.succeed([(storage, array)])
        return program

    with pytest.MonkeyPatch.context() as patch, dynaxla.device.lazy():
        patch.setattr(lazy_mode, "_traced_ops", lazy_mode._TracedOpCache())
        patch.setattr(lazy_mode.eager_mode, "find_or_compile", find_after_another_program)
        y[2:].add_(1)
    assert y.tolist() == [0, 1, 3, 4, 5]


def check_long_recordings_run() -> None:
    max_ops = lazy_mode.MAX_OPS
    lazy_mode.MAX_OPS = 50
    try:
        with dynaxla.device.lazy():
            x = torch.zeros(2, device="jax")
            done = _counts(lambda: [x.add_(1) for _ in range(210)])
        assert done["execute"] == 4
        assert done["later_runs"] == 2
        assert x.tolist() == [210, 210]
    finally:
        lazy_mode.MAX_OPS = max_ops


def check_recordings_leave_no_objects() -> None:
    x = torch.randn(64).to("jax")

    def loop(count: int) -> tuple[int, int]:
        with dynaxla.device.lazy():
            for step in range(count):
                y = (x * (step + 0.5)).sum() + step
                x[3:9].mul_(0.9)
                if step % 4 == 3:
                    y.item()
        gc.collect()
        return len(gc.get_objects()), len(lazy_programs.jax.live_arrays())

    short_loop, long_loop = loop(200), loop(400)
    assert all(late <= early + 20 for early, late in zip(short_loop, long_loop, strict=True)), (short_loop, long_loop)


def check_metrics() -> None:
    dynaxla.metrics.clear()
    x = torch.ones(3, 11, device="jax")
    for _ in range(3):
        with dynaxla.device.lazy():
            y = x.exp().sum()
    y.nonzero()
    values = {name: dynaxla.metrics.counter_value(name) for name in ("CachedCompile", "aten::nonzero", "lazy_ops")}
    assert values == {"CachedCompile": 2, "aten::nonzero": 1, "lazy_ops": 6}
    assert dynaxla.metrics.metric_data("ExecuteTime")[0] == 3
    assert "Counter: aten::nonzero" in dynaxla.metrics.report()


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.GELU(), nn.MaxPool2d(2), nn.Flatten())
        self.head = nn.Sequential(nn.Linear(16, 8), nn.LayerNorm(8), nn.Dropout(0.25), nn.Linear(8, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def check_training_steps_are_one_program() -> None:
    """From the third step on, each step runs one program and compiles none, whatever the learning rate. Weights are as on the CPU."""
    makers: list[Callable[[Any], torch.optim.Optimizer]] = [
        lambda parameters: torch.optim.Adam(parameters, lr=1e-2, foreach=True),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, foreach=False),
    ]
    for make in makers:
        on_cpu = _Net()
        on_cpu.head[2].p = 0.0  # the two devices draw different random numbers
        on_device = copy.deepcopy(on_cpu).to("jax")
        losses = [_train(on_cpu, make, "cpu", []), _train(on_device, make, "jax", counts := [])]
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-3, atol=1e-4)
        for name, value in on_cpu.state_dict().items():
            torch.testing.assert_close(on_device.state_dict()[name].cpu(), value, rtol=5e-3, atol=1e-3, msg=name)
        assert [count.get("compile", 0) for count in counts[2:]] == [0] * 4, counts
        assert [count["execute"] for count in counts[2:]] == [1] * 4, counts
        assert not any("device_fallbacks" in count or "device_ops" in count for count in counts), counts


def check_dropout_in_training() -> None:
    model = _Net().to("jax")
    _train(model, lambda parameters: torch.optim.Adam(parameters, lr=1e-2), "jax", counts := [])
    assert [count.get("compile", 0) for count in counts[2:]] == [0] * 4


def _train(model: nn.Module, make: Callable[[Any], torch.optim.Optimizer], device: str, counts: list[dict[str, int]]) -> torch.Tensor:
    optimizer = make(model.parameters())
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    generator = torch.Generator().manual_seed(5)
    losses: list[float] = []

    def step() -> None:
        data, target = torch.randn(4, 3, 4, 4, generator=generator), torch.randint(5, (4,), generator=generator)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(data.to(device)), target.to(device))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())

    with dynaxla.device.lazy():
        for _ in range(6):
            counts.append(_counts(step))
    return torch.tensor(losses)
