"""Eager, lazy and compiled mode on the device, used together: values are the CPU's, and no array is lost, or written to while in use."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import threading
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import dynaxla
from support.comparisons.compare import assert_equal

from .running import MODES, array_of, at_once, compile_anew, quick_switches


def _model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).double()


def check_no_write_is_lost_between_modes() -> None:
    """Threads write to the same storages: compiled, with and without donation, in either order of arguments; in eager and in lazy mode."""

    def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        y.add_(1)
        return x * 2

    x, y = torch.zeros(8, device="jax"), torch.zeros(8, device="jax")

    def eager() -> None:
        for _ in range(60):
            x.add_(1)
            y[2:].add_(1)

    for donate in (True, False):
        compiled = compile_anew(add, donate=donate)
        compiled(x, y)
        for mode in MODES.values():
            x.zero_()
            y.zero_()

            def call_often(first: torch.Tensor, second: torch.Tensor, compiled: Any = compiled) -> None:
                for _ in range(60):
                    compiled(first, second)

            with quick_switches(), mode():
                at_once(lambda call_often=call_often: call_often(x, y), lambda call_often=call_often: call_often(y, x), eager)
            assert x.tolist() == [180] * 8
            assert y.tolist() == [120] * 2 + [180] * 6


def check_compiled_calls_among_recorded_ops() -> None:
    """Recorded values are inputs of compiled graphs, forward and backward, and results of graphs are operands of recorded ops."""
    data, target = torch.randn(4, 5, 6).double(), torch.randn(4, 5, 3).double()

    def train(device: str, compile_it: bool, mode: Callable[[], Any]) -> list[torch.Tensor]:
        model = _model().to(device)
        forward = compile_anew(model) if compile_it else model
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for x, y in zip(data.to(device), target.to(device), strict=True):
            with mode():
                scale = (x.abs().max() + 1).detach()
                optimizer.zero_grad()
                loss = F.mse_loss(forward(x / scale) * scale, y)
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                losses.append(loss.detach())
        return [tensor.detach().cpu() for tensor in [*losses, *model.state_dict().values()]]

    expected = train("cpu", False, contextlib.nullcontext)
    for mode in MODES.values():
        assert_equal(train("jax", True, mode), expected)


def check_graph_breaks_in_lazy_mode() -> None:
    def function(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        y = x * 2
        state.add_(y)
        torch._dynamo.graph_break()
        if y.sum() > 0:
            y = y + state
        return y[y > 0]

    compiled = compile_anew(function)
    for value in (1.0, -1.0, 1.0):
        x, state = torch.full((3,), value), torch.zeros(3)
        x_on_device, state_on_device = x.to("jax"), state.to("jax")
        with dynaxla.device.lazy():
            actual = compiled(x_on_device + 0, state_on_device)
            view = state_on_device[1:]
            state_on_device.mul_(2)
        expected = function(x, state)
        assert_equal(actual.cpu(), expected)
        assert_equal(view.cpu(), state[1:] * 2)


def check_steps_in_lazy_mode() -> None:
    data = torch.randn(4, 5, 6).double()

    def train(device: str, compile_it: bool, mode: Callable[[], Any]) -> Any:
        model = _model().to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        call = dynaxla.compile_step(step, fullgraph=True) if compile_it else step
        losses = []
        for x in data.to(device):
            with mode():
                losses.append(call(x * 2))
                for value in model.parameters():
                    value.data.mul_(0.99)
        return [tensor.detach().cpu() for tensor in [*losses, *model.state_dict().values()]]

    expected = train("cpu", False, contextlib.nullcontext)
    for mode in MODES.values():
        assert_equal(train("jax", True, mode), expected)


def check_recorded_ops_read_values_from_before_a_compiled_write() -> None:
    """A recording refers to an array to which a compiled program is about to write."""

    def add(x: torch.Tensor) -> None:
        x.add_(1)

    compiled = compile_anew(add)
    x = torch.arange(3.0, device="jax")
    compiled(x)
    for _ in range(3):
        before = x.tolist()
        with dynaxla.device.lazy():
            later = x * 2
            compiled(x)
            last = x * 3
            compiled(x)
        assert later.tolist() == [2 * value for value in before]
        assert last.tolist() == [3 * (value + 1) for value in before]
        assert x.tolist() == [value + 2 for value in before]


def check_held_values_do_not_change() -> None:
    """Copies of every kind, arrays, NumPy's views of arrays, and exported arrays keep their values while programs write in place."""

    def add(x: torch.Tensor) -> None:
        x.add_(1)

    holders: list[Callable[[torch.Tensor], Any]] = [
        lambda x: x.clone(), lambda x: torch.empty_like(x).copy_(x), copy.deepcopy, lambda x: x.to("jax", copy=True),
        lambda x: array_of(x), lambda x: np.asarray(array_of(x)), lambda x: np.asarray(array_of(x))[1:],
        lambda x: torch.from_dlpack(array_of(x)), lambda x: np.from_dlpack(array_of(x)),
        lambda x: jax.device_put(array_of(x)), lambda x: array_of(x).addressable_shards[0].data, lambda x: jax.numpy.asarray(array_of(x)),
        lambda x: x.cpu(), lambda x: copy.copy(nn.ParameterList([x.clone()]).state_dict()), lambda x: x * 1,
        lambda x: jax.jit(lambda array: array)(array_of(x)), lambda x: list(x.clone().split(2)),
    ]  # fmt: skip
    compiled = compile_anew(add)

    def values(held: Any) -> Any:
        if isinstance(held, dict):
            held = next(iter(held.values()))
        if isinstance(held, list):
            return [value for part in held for value in values(part)]
        return held.tolist()

    for mode in MODES.values():
        x = torch.arange(300.0).to("jax")
        for hold in holders:
            with mode():
                compiled(x)
                held = hold(x)
                compiled(x)
                before = values(held)
                compiled(x)
                compiled(x)
            assert values(held) == before
            del held
            assert len(before) >= 299
            assert x[-1].item() == before[-1] + 3


def check_snapshots_between_steps() -> None:
    """State dicts, files, averaged weights, views of parameters, accumulated gradients, and replaced `.data`."""
    data = torch.randn(6, 5, 6).double()

    def train(device: str, make: Callable[[Any], Any], mode: Callable[[], Any]) -> list[torch.Tensor]:
        model = _model().to(device)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
        view = model[0].weight.detach()[1:3]

        def step(x: torch.Tensor, is_last: bool) -> torch.Tensor:
            loss = model(x).square().mean()
            loss.backward()
            if is_last:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            return loss.detach()

        call, snapshots = make(step), []
        for index, x in enumerate(data.to(device)):
            with mode():
                snapshots.append(call(x, index % 2 == 1))
                snapshots += [view.clone(), *({name: value.clone() for name, value in model.state_dict().items()}.values())]
                average.update_parameters(model)
                if index == 2:
                    file = io.BytesIO()
                    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
                if index == 3:
                    model[3].bias.data = model[3].bias.data.clone().mul_(2)
                if index == 4:
                    file.seek(0)
                    loaded = torch.load(file)
                    model.load_state_dict(loaded["model"])
                    optimizer.load_state_dict(loaded["optimizer"])
        return [value.detach().cpu() for value in [*snapshots, view, *model.state_dict().values(), *average.state_dict().values()]]

    expected = train("cpu", lambda step: step, contextlib.nullcontext)
    for make, name in ((dynaxla.compile_step, "eager"), (dynaxla.compile_step, "lazy"), (lambda step: step, "lazy")):
        assert_equal(train("jax", make, MODES[name]), expected)


def check_readers_of_a_model_that_trains() -> None:
    """One thread trains with a compiled step. Others read parameters, evaluate, and copy state dicts, in each mode."""
    for mode in MODES.values():
        model = nn.Linear(16, 16, bias=False).to("jax")
        with torch.no_grad():
            model.weight.fill_(1.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

        def step(x: torch.Tensor, model: nn.Module = model, optimizer: Any = optimizer) -> torch.Tensor:
            loss = -(model(x).sum())  # a step adds one to each element of the weight
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        compiled, x = dynaxla.compile_step(step, fullgraph=True), torch.ones(1, 16, device="jax")
        compiled(x)
        over = threading.Event()

        def train(compiled: Any = compiled, x: Any = x, over: Any = over) -> None:
            try:
                for _ in range(60):
                    compiled(x)
            finally:
                over.set()

        def read(over: Any = over, model: Any = model) -> None:
            last = 0.0
            while not over.is_set():
                weight = model.weight.detach().cpu()
                assert (weight == weight[0, 0]).all()
                assert weight[0, 0] >= last
                last = weight[0, 0].item()

        def evaluate(over: Any = over, model: Any = model, x: Any = x) -> None:
            while not over.is_set():
                with torch.no_grad():
                    values = model(x).tolist()[0]
                assert values == values[:1] * 16
                assert len({*copy.deepcopy(model.state_dict())["weight"].flatten().tolist()}) == 1

        with quick_switches(), mode():
            at_once(train, read, evaluate)
        assert model.weight.tolist() == [[62.0] * 16] * 16


def check_kernel_that_reads_the_device_does_not_block_recording() -> None:
    """A torch kernel in a compiled program reads from the device while another thread records an op on a written tensor."""
    inside, recorded = threading.Event(), threading.Event()
    other = torch.ones(2, device="jax")

    @torch.library.custom_op("together::slow", mutates_args=())
    def slow(x: torch.Tensor) -> torch.Tensor:
        inside.set()
        recorded.wait(0.3)
        return x * (other * 2).sum().item()

    slow.register_fake(torch.empty_like)

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return slow(y)

    compiled, x, y = compile_anew(function), torch.zeros(2, device="jax"), torch.ones(2, device="jax")
    compiled(x, y)
    inside.clear()

    def record() -> None:
        inside.wait(10)
        x.mul_(3)
        recorded.set()

    with dynaxla.device.lazy():
        results = at_once(lambda: compiled(x, y), record)
    assert results[0].tolist() == [4, 4]
    assert x.tolist() == [6, 6]


def check_failures_write_nothing() -> None:
    """An index is out of range in a compiled graph, or in an op that was recorded before one."""

    def function(table: torch.Tensor, count: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        count.add_(1)
        return table.index_select(0, index)

    for donate in (True, False):
        compiled = compile_anew(function, donate=donate)
        for mode in MODES.values():
            table, count = torch.arange(4.0, device="jax"), torch.zeros(2, device="jax")
            good, bad = torch.tensor([1, 3], device="jax"), torch.tensor([1, 7], device="jax")
            with mode():
                count.add_(0)
                assert compiled(table, count, good).tolist() == [1, 3]
                with pytest.raises(IndexError):
                    compiled(table, count, bad)
                assert count.tolist() == [1, 1]
            with dynaxla.device.lazy():
                table.mul_(2)
                table.index_select(0, bad)
                with pytest.raises(IndexError):
                    compiled(table, count, good)
                assert (count.tolist(), table.tolist()) == ([1, 1], [0, 1, 2, 3])
                assert compiled(table, count, good).tolist() == [1, 3]


def check_hooks_that_raise_in_lazy_backward() -> None:
    class Stop(Exception):
        pass

    def stop(_: torch.Tensor) -> None:
        raise Stop

    model, x = _model().to("jax"), torch.randn(5, 6).double().to("jax")
    forward = compile_anew(model)
    for call in (model, forward):
        with dynaxla.device.lazy():
            for parameter in model.parameters():
                parameter.grad = None
            loss = call(x).square().sum()
            handle = model[0].weight.register_hook(stop)
            with pytest.raises(Stop):
                loss.backward()
            handle.remove()
            call(x).square().sum().backward()
        on_cpu = _model()
        on_cpu(x.cpu()).square().sum().backward()
        assert_equal(model[0].weight.grad.cpu(), on_cpu[0].weight.grad)


def _double(weight: torch.Tensor) -> None:
    with torch.no_grad():
        weight.mul_(2)


def _double_data(weight: torch.Tensor) -> None:
    weight.data.mul_(2)


def check_writes_to_saved_tensors_raise() -> None:
    """After a write to a saved tensor, autograd refuses the backward pass, in each mode, and however much the version rises.

    The version also rises if a compiled graph writes through `.data`, as with every compiler, but not if the CPU's fused optimizers write.
    """

    def outcome(device: str, mode: Callable[[], Any], make: Callable[[torch.Tensor], Callable[[], Any]]) -> Any:
        """Returns the gradient or None, the weight, and the error message."""
        weight = nn.Parameter(torch.arange(1.0, 4.0).to(device))
        write = make(weight)
        for _ in range(3):
            weight.grad = torch.ones_like(weight)
            gradient, message = None, ""
            with mode():
                loss = (weight.sin() * weight).sum()
                write()
                try:
                    (gradient,) = torch.autograd.grad(loss, weight)
                except RuntimeError as error:
                    message = str(error)
        return gradient if gradient is None else gradient.cpu(), weight.detach().cpu(), message

    def step_of(weight: torch.Tensor, wrap: Callable[[Any], Any], **settings: Any) -> Callable[[], Any]:
        optimizer = torch.optim.AdamW([weight], lr=0.1, **settings)

        def step() -> torch.Tensor:
            loss = (weight * 3).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return wrap(step)

    def identity(function: Any) -> Any:
        return function

    recorded = functools.partial(dynaxla.compile_step, fullgraph=True)

    def writer(function: Callable[[torch.Tensor], Any], wrap: Callable[[Any], Any]) -> Any:
        return lambda weight: functools.partial(wrap(function), weight)

    writers: list[tuple[Any, Any, bool]] = [
        (functools.partial(step_of, wrap=identity, **settings), functools.partial(step_of, wrap=wrap, **settings), True)
        for settings in ({"foreach": True}, {"foreach": False}, {"fused": True}) for wrap in (identity, recorded)
    ]  # fmt: skip
    writers += [(writer(_double, identity), writer(_double, wrap), True) for wrap in (identity, compile_anew)]
    writers += [(writer(_double_data, identity), writer(_double_data, wrap), wrap is compile_anew) for wrap in (identity, compile_anew)]
    for writer_on_cpu, writer_on_device, is_refused in writers:
        gradient, expected_values, _ = outcome("cpu", contextlib.nullcontext, writer_on_cpu)
        for mode in MODES.values():
            found, values, message = outcome("jax", mode, writer_on_device)
            assert ("inplace operation" in message) == is_refused, message
            torch.testing.assert_close(values, expected_values)
            if not is_refused:
                torch.testing.assert_close(found, gradient)


def check_random_numbers_in_each_mode() -> None:
    """Two runs from one seed draw the same numbers in each mode, and a recomputation draws the numbers of the first pass."""
    model = nn.Sequential(nn.Linear(6, 64), nn.Dropout(0.5), nn.Linear(64, 64), nn.Dropout(0.5)).to("jax")
    x = torch.randn(4, 6).to("jax")

    def recomputed(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(model, x, use_reentrant=False)

    def draw(call: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        draws = [torch.rand(3, device="jax")]
        with torch.random.fork_rng(devices=[0], device_type="jax"):
            draws.append(torch.rand(3, device="jax"))
        draws.append(torch.rand(3, device="jax"))
        model.zero_grad()
        y = call(x)
        y.sum().backward()
        return [*draws, y.detach(), model[0].weight.grad.clone()]

    for call in (model, recomputed, compile_anew(model), compile_anew(recomputed)):
        for mode in MODES.values():
            runs = []
            for _ in range(2):
                torch.manual_seed(5)
                with mode():
                    runs.append(draw(call))
            for first_run, second_run in zip(*runs, strict=True):
                assert first_run.tolist() == second_run.tolist()
            assert runs[0][1].tolist() == runs[0][2].tolist()
    weight = torch.ones(64, 64, requires_grad=True, device="jax")
    for call in (lambda w: F.dropout(w, 0.5), lambda w: checkpoint(lambda v: F.dropout(v, 0.5), w, use_reentrant=False)):
        for function in (call, compile_anew(call)):
            for mode in MODES.values():
                with mode():
                    y = function(weight)
                    (gradient,) = torch.autograd.grad(y.sum(), weight)
                assert gradient.tolist() == y.tolist()


def check_dropout_in_compiled_steps() -> None:
    model = nn.Sequential(nn.Linear(6, 64), nn.Dropout(0.5), nn.Linear(64, 2)).to("jax")
    first = copy.deepcopy(model.state_dict())
    x = torch.randn(4, 6).to("jax")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @dynaxla.compile_step(fullgraph=True)
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    runs = []
    step(x)
    for mode in (*MODES.values(), contextlib.nullcontext):
        model.load_state_dict(first)
        torch.manual_seed(7)
        with mode():
            losses = [step(x) for _ in range(3)]
        runs.append([loss.item() for loss in losses])
    assert runs[0] == runs[1] == runs[2]
    assert len(set(runs[0])) == 3


_DTYPES = (torch.bfloat16, torch.int8, torch.bool, torch.complex64)


def _sample_values(dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(48) % 7 - 2).to(dtype)


def check_dtypes_and_views_in_each_mode() -> None:
    """Reads and writes of views: whole, with gaps, with an offset, transposed, of rank 0, empty. Results are expanded or transposed."""
    views: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda x: x, lambda x: x[3:40:2], lambda x: x[8:].view(5, 8).t(), lambda x: x.view(6, 8)[1:5, 2:7], lambda x: x[7],
        lambda x: x[5:5],
        lambda x: x.view(2, 4, 6).permute(2, 0, 1)[::2], lambda x: x.as_strided((3, 3), (9, 2), 4),
    ]  # fmt: skip
    for dtype in _DTYPES:

        def write(x: torch.Tensor) -> Any:
            y = x.logical_not() if x.dtype == torch.bool else x + x
            x.copy_(y)
            return y, x.expand(2, *x.shape), x.t() if x.dim() == 2 else x.reshape(-1)

        compiled = torch.compile(write, backend="dynaxla", dynamic=False)
        for view in views:
            host = _sample_values(dtype)
            expected = [*write(view(host)), host]
            for call, mode in ((write, "eager"), (write, "lazy"), (compiled, "eager"), (compiled, "lazy")):
                on_device = _sample_values(dtype).to("jax")
                with MODES[mode]():
                    if mode == "lazy":
                        on_device.copy_(on_device.clone())
                    actual = [*call(view(on_device)), on_device]
                for actual_tensor, expected_tensor in zip(actual, expected, strict=True):
                    assert actual_tensor.stride() == expected_tensor.stride(), (dtype, mode)
                    assert_equal(actual_tensor.cpu().contiguous(), expected_tensor.contiguous())
        torch._dynamo.reset()


def check_views_of_other_dtypes() -> None:
    def write(x: torch.Tensor) -> torch.Tensor:
        x.view(torch.int32).bitwise_xor_(1 << 31)
        return x.view(torch.int16)[1:] + 1

    compiled = compile_anew(write)
    host = torch.randn(8)
    expected = write(host.clone()), (host * -1)
    for call in (write, compiled):
        for mode in MODES.values():
            on_device = host.to("jax")
            with mode():
                result = call(on_device)
            assert_equal(result.cpu(), expected[0])
            assert_equal(on_device.cpu(), expected[1])


def check_sizes_that_change() -> None:
    def function(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        state.add_(x.sum())
        return (x.softmax(0) * 2).cumsum(0)

    for options, dynamic in (({}, True), ({}, None), ({"sizes": "buckets"}, None)):
        torch._dynamo.reset()
        compiled = torch.compile(function, backend="dynaxla", dynamic=dynamic, options=options)
        for mode in MODES.values():
            state, state_on_device = torch.zeros(()), torch.zeros((), device="jax")
            for size in (3, 5, 9, 4, 17):
                x = torch.randn(size)
                x_on_device = x.to("jax")
                if dynamic is None:
                    torch._dynamo.mark_dynamic(x_on_device, 0)
                with mode():
                    result = compiled(x_on_device, state_on_device)
                assert_equal(result.cpu(), function(x, state))
                assert_equal(state_on_device.cpu(), state)


def check_autocast_and_scaled_gradients() -> None:
    data = torch.randn(4, 8, 6)

    def train(compile_it: bool, mode: Callable[[], Any]) -> Any:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1)).to("jax")
        forward = compile_anew(model) if compile_it else model
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.05), torch.amp.GradScaler("jax", init_scale=2.0**20, growth_interval=2)
        found = []
        for index, x in enumerate(data.to("jax")):
            with mode():
                optimizer.zero_grad()
                with torch.autocast("jax", dtype=torch.bfloat16):
                    y = forward(x)
                    assert y.dtype == torch.bfloat16
                    loss = y.float().square().mean() * (float("inf") if index == 2 else 1.0)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                found.append((loss.item(), scaler.get_scale()))
        return found, [value.detach().cpu() for value in model.parameters()]

    (pairs, expected) = train(False, contextlib.nullcontext)
    for compile_it, mode in ((True, "eager"), (True, "lazy"), (False, "lazy")):
        own, found = train(compile_it, MODES[mode])
        assert [scale for _, scale in own] == [scale for _, scale in pairs]
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


class _Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.clamp(-1, 1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() < 2)


def check_torch_func_and_autograd_functions() -> None:
    """torch.func around and inside compiled functions, autograd functions, and checkpoints."""
    warnings.simplefilter("ignore", DeprecationWarning)  # torch warns of autograd functions under TorchDynamo
    weight, x = torch.randn(4, 4).double(), torch.randn(5, 4).double()
    with warnings.catch_warnings(action="ignore"):  # torch's first jvp uses torch.jit.script
        torch.func.jvp(torch.sin, (x,), (x,))

    def loss(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (x @ weight).tanh().sum()

    functions: list[Callable[..., Any]] = [
        lambda weight, x: torch.func.grad(loss)(weight, x),
        lambda weight, x: torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weight, x),
        lambda weight, x: torch.func.jvp(lambda w: loss(w, x), (weight,), (weight * 2,)),
        lambda weight, x: torch.func.jacrev(lambda w: (x @ w).sin())(weight),
        lambda weight, x: _Clipped.apply(x @ weight * 3),
        lambda weight, x: checkpoint(lambda w: (x @ w).tanh(), weight, use_reentrant=False),
    ]
    for function in functions:
        compiled = compile_anew(function)
        expected = function(weight, x)
        for call in (function, compiled):
            for mode in MODES.values():
                with mode():
                    actual = call(weight.to("jax"), x.to("jax"))
                assert_equal(torch.utils._pytree.tree_map(torch.Tensor.cpu, actual), expected)
    for function in functions[-2:]:
        compiled = compile_anew(function)
        weight_on_cpu = weight.clone().requires_grad_()
        (expected,) = torch.autograd.grad(function(weight_on_cpu, x).sum(), weight_on_cpu)
        for call in (function, compiled):
            for mode in MODES.values():
                weight_on_device = weight.to("jax").requires_grad_()
                with mode():
                    (actual,) = torch.autograd.grad(call(weight_on_device, x.to("jax")).sum(), weight_on_device)
                assert_equal(actual.cpu(), expected)
    compiled = compile_anew(loss)
    expected = torch.func.grad(loss)(weight, x)
    with dynaxla.device.lazy():
        assert_equal(torch.func.grad(compiled)(weight.to("jax"), x.to("jax")).cpu(), expected)
