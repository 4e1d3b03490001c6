"""Compiled graphs on the device: values, strides, aliases and writes are those of eager mode, and arrays are not copied."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import pytest
import torch
from torch.utils import _pytree as pytree

import dynaxla
from dynaxla.bench import suites
from dynaxla.device import storage_buffers, storages
from dynaxla.engine import compile as engine_compile
from dynaxla.observe import metrics
from support.comparisons.compare import assert_equal

from .running import array_of, at_once, compile_anew, quick_switches


def _to(device: str, value: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.clone().to(device), value)


def _agrees(function: Callable[..., Any], *args: Any, backend: str = "dynaxla", dynamic: bool | None = None, **options: Any) -> None:
    """Compares two calls on the device with calls on the CPU. The second call gets the tensors as the first call leaves them."""
    torch._dynamo.reset()
    compiled = torch.compile(function, backend=backend, options=options, dynamic=dynamic)
    host, on_device = _to("cpu", args), _to("jax", args)
    for _ in range(2):
        expected, actual = function(*host), compiled(*on_device)
        for expected_leaf, actual_leaf in zip(pytree.tree_leaves((expected, host)), pytree.tree_leaves((actual, on_device)), strict=True):
            assert not isinstance(expected_leaf, torch.Tensor) or expected_leaf.stride() == actual_leaf.stride()
            assert_equal(actual_leaf.cpu() if isinstance(actual_leaf, torch.Tensor) else actual_leaf, expected_leaf)


def _count(name: str) -> int:
    return metrics.snapshot().get(name, 0)


def check_results() -> None:
    x = torch.randn(4, 6)
    for options in ({}, {"tune": True}, {"donate": False}, {"fallback": "error"}):
        _agrees(lambda x: (x @ x.t()).relu().t(), x, **options)
    _agrees(lambda x: (x @ x.t()).relu(), x, backend="dynaxla_retrace")
    _agrees(lambda x, s: (x * s, torch.tensor(3.0), x.sum().cpu(), x.shape[0]), x, 2.5)
    _agrees(lambda x: x[x > 0] * 2, x)
    _agrees(lambda x: torch.view_as_complex(x.view(-1, 2)).conj() * 2, x)
    scaled = compile_anew(lambda x, s: x * s)
    assert_equal(scaled(x.to("jax"), torch.tensor(3.0)).cpu(), x * 3)


def check_sizes() -> None:
    for sizes in ("exact", "buckets"):
        compiled = compile_anew(lambda x: torch.softmax(x, 0).sum(1), sizes=sizes)
        for count in (3, 5, 9, 12):
            x = torch.randn(count, 6)
            assert_equal(compiled(x.to("jax")).cpu(), torch.softmax(x, 0).sum(1))


def check_refused_options_and_devices() -> None:
    x = torch.randn(3).to("jax")
    for options in ({"freeze": True}, {"compile": "background"}):
        with pytest.raises(dynaxla.errors.OptionError, match=next(iter(options))):
            compile_anew(lambda x: x + 1, **options)(x)
    with pytest.raises(RuntimeError, match="same device"):
        compile_anew(lambda x, y: torch.cat([x, y]))(x, torch.randn(3))


def check_views_are_inputs_without_copies() -> None:
    def function(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a * 2 + b

    big = torch.randn(10, 12)
    on_device, compiled = big.to("jax"), compile_anew(function)
    metrics.reset()
    pairs: list[Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = [
        lambda t: (t[::2, :6], t[1::2, 6:]),
        lambda t: (t[:5, 1:7], t[5:, ::2]),
        lambda t: (t.t()[:5, :6], t[2:7, 3:9]),
        lambda t: (t[:1].expand(5, 12), t[5:]),
        lambda t: (t.view(torch.int32)[:5], t[:5]),
    ]
    for pair in pairs:
        assert_equal(compiled(*pair(on_device)).cpu(), function(*pair(big)))
    assert not _count("input_copies")
    compiled = compile_anew(lambda x: x.sum(1))
    batches = [on_device[index : index + 2] for index in (0, 4, 8)]
    compiled(batches[0])
    before = _count("trace")
    for batch in batches:
        assert_equal(compiled(batch).cpu(), batch.cpu().sum(1))
    assert _count("trace") == before  # the offset of a view is an input


def check_storages_written_through_other_views() -> None:
    x = torch.zeros(3, 4, device="jax")
    compiled = compile_anew(lambda x: x + 1)
    compiled(x)
    x.view(-1).copy_(torch.arange(12.0))
    x.view(torch.int32)[0, 0] = 0
    assert_equal(compiled(x).cpu(), x.cpu() + 1)
    assert compiled(torch.empty(3, 4, device="jax")).tolist() == torch.ones(3, 4).tolist()


def check_inputs_in_one_storage() -> None:
    """The inputs are views of one storage in several shapes, and it was written through another shape. Calls keep its array."""

    def function(a: torch.Tensor, part: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
        return a.sum() + part.sum() * 2 + flat[3] * 5

    compiled = compile_anew(function)
    x = torch.randn(2, 3, 4)
    on_device = x.to("jax")
    changes: list[Callable[[torch.Tensor], Any]] = [lambda t: t.view(-1).mul_(2), lambda t: t.view(6, 4).add_(1), lambda t: t.mul_(3)]
    for change in changes:
        for _ in range(2):
            for tensor in (x, on_device):
                change(tensor)
            before = array_of(on_device)
            views = [(t, t.view(6, 4)[1:5:2], t.view(-1)) for t in (on_device, x)]
            assert_equal(compiled(*views[0]).cpu(), function(*views[1]))
            assert array_of(on_device) is before


def check_conjugate_and_negative_bits() -> None:
    """Bits of gradients, for which nothing was compiled, and of scalars on the CPU."""
    x = torch.randn(4, dtype=torch.complex64)
    other = torch.randn(4, dtype=torch.complex64)
    on_device = x.to("jax").requires_grad_()
    compiled = compile_anew(lambda x: x * x)
    views: list[Callable[[torch.Tensor], torch.Tensor]] = [torch.conj, torch._neg_view, lambda t: torch._neg_view(t.conj()), lambda t: t]
    for view in views:
        (actual,) = torch.autograd.grad(compiled(on_device), on_device, view(other.to("jax")))
        assert_equal(actual.cpu(), (x * 2).conj() * view(other).resolve_conj().resolve_neg())
    number = torch.tensor(1 + 2j).conj()
    assert_equal(compile_anew(lambda x, n: x * n)(x.to("jax"), number).cpu(), x * number)


def check_writes() -> None:
    def add(x: torch.Tensor) -> Any:
        x.add_(1)
        return x * 2

    def row(cache: torch.Tensor, value: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        cache[:, index] = value
        return cache.sum(0)

    def swap(a: torch.Tensor, b: torch.Tensor) -> None:
        old = a.clone()
        a.copy_(b)
        b.copy_(old)

    def both(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        new = a + b
        a.copy_(new)
        b.copy_(new)
        return new

    def take(a: torch.Tensor, b: torch.Tensor) -> None:
        a.copy_(b)
        b.add_(1)

    for backend in ("dynaxla", "dynaxla_retrace"):
        _agrees(add, torch.randn(3, 4), backend=backend)
        _agrees(row, torch.zeros(2, 5, 3), torch.randn(2, 1, 3), torch.tensor([3]), backend=backend)
        for function in (swap, both, take):
            _agrees(function, torch.randn(3), torch.randn(3), backend=backend)
    x = torch.zeros(3).to("jax")
    compiled = compile_anew(add)
    for count in range(3):
        assert x._version == count
        compiled(x)


def check_writes_to_views_of_one_storage() -> None:
    def function(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.add_(1)
        b.mul_(2)
        return a.sum() + b.sum()

    flat = torch.randn(10)
    on_device, compiled = flat.to("jax"), compile_anew(function)
    pairs: list[Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = [
        lambda t: (t[:4], t[4:]),
        lambda t: (t[6:], t[:6]),
        lambda t: (t[::2], t[1::2]),
        lambda t: (t[:6], t[4:]),
        lambda t: (t[1:5], t[1:5]),
        lambda t: (t[4:8].view(2, 2), t),
    ]
    for pair in [*pairs, *pairs]:
        expected, actual = function(*pair(flat)), compiled(*pair(on_device))
        assert_equal(actual.cpu(), expected)
        assert_equal(on_device.cpu(), flat)


def check_aliases() -> None:
    def function(a: torch.Tensor, b: torch.Tensor) -> Any:
        a.add_(1)
        c = b * 2
        return a, a[1:], a.view(-1), b.t(), c, c[0]

    host = torch.randn(4, 6), torch.randn(3, 2)
    on_device, compiled = _to("jax", host), compile_anew(function)
    expected, actual = function(*host), compiled(*on_device)
    for outputs, inputs in ((expected, host), (actual, on_device)):
        outputs[1].zero_()
        outputs[3].add_(5)
        outputs[5].fill_(7)
        assert outputs[0] is inputs[0]
    for expected_tensor, actual_tensor in zip((*expected, *host), (*actual, *on_device), strict=True):
        assert_equal(actual_tensor.cpu(), expected_tensor)


def check_written_arrays_are_donated_unless_others_refer_to_them() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x * 2

    x = torch.zeros(100, 100).to("jax")
    compiled = compile_anew(function)
    compiled(x)  # the first array is NumPy's memory
    address = array_of(x).unsafe_buffer_pointer()
    metrics.reset()
    for _ in range(3):
        compiled(x)
        assert array_of(x).unsafe_buffer_pointer() == address
    assert not _count("undonated")
    held = array_of(x)
    compiled(x)
    assert not held.is_deleted()
    assert float(held[0, 0]) == 4
    other = x.clone()
    copied = torch.empty_like(x).copy_(x)
    saved = copy.deepcopy(x)
    compiled(x)
    assert _count("undonated") == 2
    assert (x[0, 0].item(), [value[0, 0].item() for value in (other, copied, saved)]) == (6, [5, 5, 5])
    without_donation = compile_anew(function, donate=False)
    held = array_of(x)
    without_donation(x)
    assert not held.is_deleted()
    assert x[0, 0].item() == 7


def check_failing_kernel() -> None:
    fails = [False]

    def kernel(x: torch.Tensor) -> torch.Tensor:
        if fails[0]:
            raise ValueError("it fails")
        return x.clone()

    torch.library.custom_op("device_cases::fails", kernel, mutates_args=(), schema="(Tensor x) -> Tensor").register_fake(torch.empty_like)

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return torch.ops.device_cases.fails(x @ x) + y

    for donate in (True, False):
        fails[0] = False
        x, y = torch.ones(300, 300).to("jax"), torch.ones(300, 300).to("jax")
        compiled = compile_anew(function, donate=donate)
        compiled(x, y)
        fails[0] = True
        version = x._version
        with pytest.raises(ValueError, match="it fails"):
            compiled(x, y)
        assert x._version == version
        assert y.sum().item() == 90000
        if donate:
            with pytest.raises(RuntimeError, match=r"float32\[300, 300\] on jax:0.*'donate': False"):
                x.cpu()
        else:
            assert x[0, 0].item() == 2


def check_failed_check_precedes_writes() -> None:
    def function(table: torch.Tensor, count: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        count.add_(1)
        return torch.nn.functional.embedding(index, table)

    compiled = compile_anew(function)
    table, count = torch.randn(5, 3).to("jax"), torch.zeros(2).to("jax")
    compiled(table, count, torch.tensor([4]).to("jax"))
    with pytest.raises(IndexError, match="out of range"):
        compiled(table, count, torch.tensor([5]).to("jax"))
    assert (count.tolist(), count._version) == ([1, 1], 1)


def check_rows_of_a_cache_are_written_in_place() -> None:
    def function(cache: torch.Tensor, value: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        cache.index_copy_(1, index, value)
        return cache[:, :2].sum()

    def late_check(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """The index is checked only after a product."""
        x.add_(1)
        return torch.nn.functional.embedding((x @ x).sum().long() + index, x)

    compiled, cache = compile_anew(function), torch.zeros(2, 100, 8).to("jax")
    value = torch.ones(2, 1, 8).to("jax")
    compiled(cache, value, torch.tensor([1]).to("jax"))
    address = array_of(cache).unsafe_buffer_pointer()
    assert compiled(cache, value, torch.tensor([7]).to("jax")).item() == 16
    with pytest.raises(IndexError):
        compiled(cache, value, torch.tensor([100]).to("jax"))
    assert array_of(cache).unsafe_buffer_pointer() == address
    assert cache.sum().item() == 32
    compiled, x = compile_anew(late_check), torch.full((2, 2), -1.0).to("jax")
    compiled(x, torch.tensor([1]).to("jax"))
    with pytest.raises(IndexError):
        compiled(x, torch.tensor([1]).to("jax"))
    assert x.tolist() == [[0, 0], [0, 0]]


def check_random_numbers() -> None:
    compiled = compile_anew(lambda x: torch.nn.functional.dropout(x, 0.5) + torch.rand_like(x))
    x = torch.ones(64).to("jax")

    def draw() -> list[list[float]]:
        torch.manual_seed(3)
        return [compiled(x).tolist() for _ in range(2)]

    first = draw()
    assert first == draw()
    assert first[0] != first[1]


def _model() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3),
        torch.nn.BatchNorm2d(4),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(36, 2),
    )


def check_training() -> None:
    host = _model()
    on_device = copy.deepcopy(host).to("jax")
    compiled = compile_anew(on_device)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (host, on_device)]
    for _ in range(3):
        x = torch.randn(4, 3, 8, 8)
        losses = []
        for model, optimizer, picture in ((host, optimizers[0], x), (compiled, optimizers[1], x.to("jax"))):
            optimizer.zero_grad()
            loss = model(picture).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach().cpu())
        assert_equal(losses[1], losses[0])
    for name, value in host.state_dict().items():
        assert_equal(on_device.state_dict()[name].cpu(), value)
    version = on_device[1].running_mean._version
    compiled(x.to("jax"))
    assert on_device[1].running_mean._version == version + 1


def check_bert() -> None:
    """Forward and backward pass. `make device-models` trains ten models."""
    with warnings.catch_warnings(action="ignore"):  # the model library warns
        settings = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
        host, x = suites.Bert(**settings).eval(), torch.randint(3, 90, (2, 12))
        on_device = copy.deepcopy(host).to("jax")
        results = []
        for model, inputs in ((host, x), (compile_anew(on_device, fallback="error"), x.to("jax"))):
            result = pytree.tree_leaves(model(inputs))[0]
            result.square().sum().backward()
            results.append(result.detach().cpu())
        torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)
        pairs = [(p.grad, q.grad) for p, q in zip(host.parameters(), on_device.parameters(), strict=True) if p.grad is not None]
        largest = max(float(expected.abs().max()) for expected, _ in pairs)
        for expected, actual in pairs:
            assert actual is not None
            assert float((expected - actual.cpu()).abs().max()) < 1e-4 * largest


def check_writes_to_saved_tensors() -> None:
    x = torch.randn(3, requires_grad=True)
    on_device = x.detach().to("jax").requires_grad_()
    state = torch.zeros(3, device="jax")

    def function(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        state.add_(x.detach())
        return (x * state.clone()).sum()

    compiled = compile_anew(function)
    losses = [compiled(on_device, state) for _ in range(2)]
    losses[0].backward()
    losses[1].backward()
    assert_equal(on_device.grad.cpu(), 3 * x.detach())


def check_compiled_steps() -> None:
    makers: list[Callable[[Any], torch.optim.Optimizer]] = [
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    ]
    for make in makers:
        host = _model()
        on_device = copy.deepcopy(host).to("jax")
        optimizers = [make(model.parameters()) for model in (host, on_device)]

        def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
            loss = model(x)[[0, 2, 3]].square().mean()  # the index is copied to the device
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        compiled = dynaxla.compile_step(lambda x, on_device=on_device, own=optimizers[1]: step(on_device, own, x), fullgraph=True)
        for count in range(4):
            x = torch.randn(4, 3, 8, 8)
            expected, picture = step(host, optimizers[0], x), x.to("jax")
            metrics.reset()
            loss = compiled(picture)
            if count > 1:
                counts = metrics.snapshot()
                assert counts == {"calls": 1, "execute": 1, "later_runs": 1, "steps": 1}, counts
            assert_equal(loss.cpu(), expected)
        assert_equal(on_device[0].weight.cpu(), host[0].weight)


def check_compiled_steps_after_eager_steps() -> None:
    """Eager mode's optimizer has created the step counts on the CPU."""
    host = _model()
    on_device = copy.deepcopy(host).to("jax")
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.01) for model in (host, on_device)]

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    compiled = dynaxla.compile_step(lambda x: step(on_device, optimizers[1], x), fullgraph=True)
    for count in range(5):
        x = torch.randn(4, 3, 8, 8)
        expected = step(host, optimizers[0], x)
        loss = compiled(x.to("jax")) if count > 1 else step(on_device, optimizers[1], x.to("jax"))
        assert_equal(loss.cpu(), expected)
    assert [state["step"].item() for state in optimizers[1].state.values()] == [5] * 6


def check_memory_of_a_step() -> None:
    """By XLA's analysis, a step needs little memory besides parameters, states, gradients and activations."""
    programs: list[Any] = []
    compile_lowered = engine_compile.programs.compile_lowered

    def recording_programs(lowered: Any, *args: Any) -> Any:
        programs.append(lowered)
        return compile_lowered(lowered, *args)

    width, rows, depth = 512, 64, 4
    model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(depth)]).to("jax")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    @dynaxla.compile_step(fullgraph=True)
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    engine_compile.programs.compile_lowered = recording_programs
    try:
        for _ in range(3):
            step(torch.randn(rows, width).to("jax"))
    finally:
        engine_compile.programs.compile_lowered = compile_lowered
    analysis = programs[-1].compile().memory_analysis()
    peak = analysis.argument_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes + analysis.temp_size_in_bytes
    parameters = depth * (width * width + width) * 4
    activations = (depth + 1) * rows * width * 4
    assert analysis.alias_size_in_bytes >= 3 * parameters
    assert peak <= 1.1 * (4 * parameters + activations), (peak, parameters)


def check_other_threads_wait_for_written_tensors() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return (x @ x @ x).sum()

    x = torch.zeros(400, 400).to("jax")
    compiled = compile_anew(function)
    compiled(x)
    failed: list[BaseException] = []
    is_over = threading.Event()

    def read() -> None:
        try:
            while not is_over.is_set():
                value = x[0, 0].item()
                assert value == int(value)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    for _ in range(40):
        compiled(x)
    is_over.set()
    thread.join()
    assert not failed, failed
    assert x[0, 0].item() == 41


def check_input_that_changes_shape_while_its_program_is_compiled() -> None:
    """The first program is compiled for another shape of the storage's array than the call has. Later calls have a program of their own."""
    compiled = compile_anew(lambda x: x + 1)
    compiled(torch.zeros(4, device="jax"))
    base = torch.arange(6.0, device="jax")
    storage, buffers, requests = base.untyped_storage(), storage_buffers.buffers, []
    array = storages.array_of(storage)
    assert array is not None
    reshaped = array.reshape(2, 3)

    def buffers_of_reshaped(request: Any) -> Any:
        requests.append(request)
        if len(requests) > 1:
            return buffers(request)
        storages.set_content(storage, reshaped)
        result = buffers(request)
        storages.set_content(storage, array)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage_buffers, "buffers", buffers_of_reshaped)
        for _ in range(2):
            assert compiled(base[2:]).tolist() == [3, 4, 5, 6]
    assert len(requests) == 2


def check_other_threads_synchronize_while_arrays_are_donated() -> None:
    compiled = compile_anew(lambda x: x.add_(1))
    x = torch.zeros(200_000, device="jax")
    compiled(x)
    is_over = threading.Event()

    def train() -> None:
        try:
            for _ in range(500):
                compiled(x)
        finally:
            is_over.set()

    def synchronize() -> None:
        while not is_over.is_set():
            event = torch.jax.Event()
            event.record()
            torch.jax.Stream().query()
            torch.jax.synchronize()
            event.query()
            event.synchronize()

    with quick_switches():
        at_once(train, synchronize, synchronize)
    assert x[0].item() == 501


def check_array_that_is_deleted_after_it_is_listed() -> None:
    event, live_arrays = torch.jax.Event(), jax.live_arrays

    def with_deleted_array() -> list[jax.Array]:
        array = jax.numpy.zeros(50_000_000, dtype="int8")
        array.delete()
        return [*live_arrays(), array]

    with mock.patch.object(jax, "live_arrays", with_deleted_array):
        event.record()
        torch.jax.synchronize()
        assert torch.jax.Stream().query()
        assert event.query()
        event.synchronize()
        assert torch.jax.memory_allocated() < 50_000_000


def check_code_after_a_graph_break() -> None:
    """TorchDynamo does not trace the Python code of the device's kernels."""

    def function(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x[x > 0] * 2

    compiled = compile_anew(function)
    x = torch.randn(5, 6)
    assert_equal(compiled(x.to("jax")).cpu(), function(x))
