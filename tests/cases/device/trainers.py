"""Features of torch that training scripts use with a device: autocast, gradient scaling, the device module, torch.func."""

from __future__ import annotations

import copy
import io
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from dynaxla.observe import metrics
from dynaxla.runtime import private

with warnings.catch_warnings(action="ignore"):  # this module of torch warns when forward mode imports it
    import torch._decomp.decompositions_for_jvp


def _network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.GELU(), nn.Flatten(), nn.Linear(16, 8), nn.LayerNorm(8), nn.Linear(8, 5))


def _close(actual: Any, expected: Any, **tolerance: float) -> None:
    torch.testing.assert_close(torch.utils._pytree.tree_map(lambda value: value.detach().cpu(), actual), expected, **tolerance)


def check_autocast() -> None:
    """Dtypes are the CPU's, forward and backward. Autocasting ends with its context."""
    on_cpu = _network()
    on_device = copy.deepcopy(on_cpu).to("jax")
    data = torch.randn(2, 3, 4, 4)
    for dtype in (torch.bfloat16, torch.float16):
        results: list[list[torch.Tensor]] = []
        for model, device in ((on_cpu, "cpu"), (on_device, "jax")):
            x = data.to(device)
            with torch.autocast(device, dtype=dtype):
                y = model(x)
                results.append([
                    y, y.softmax(-1), nn.functional.mse_loss(y, y * 2), torch.cat([y, x.flatten(1)[:, :5]]), torch.stack([y, y]),
                    y.double() @ y.double().t(), y.sum(), (x[0, 0] @ x[0, 1]).exp(), torch.fft.rfft(y.float()),
                    nn.functional.scaled_dot_product_attention(x, x, x), y.float().prod(), torch.arange(3, device=device) * 2,
                ])  # fmt: skip
                with torch.autocast(device, enabled=False):
                    results[-1].append(x[0, 0] @ x[0, 1])
            results[-1] += [model[4].weight @ model[4].weight.t()]
            model.zero_grad()
            y.float().square().sum().backward()
            results[-1] += [parameter.grad for parameter in model.parameters()]
        expected, actual = results
        assert [value.dtype for value in actual] == [value.dtype for value in expected]
        _close(actual, [value.detach() for value in expected], rtol=0.1, atol=0.05)
    with torch.autocast("jax", dtype=torch.bfloat16), torch.autocast("cpu", dtype=torch.float16):
        assert (on_device[4].weight @ on_device[4].weight.t()).dtype == torch.bfloat16
        assert (on_cpu[4].weight @ on_cpu[4].weight.t()).dtype == torch.float16
    with pytest.warns(UserWarning, match="not supported"):
        torch.autocast("jax", dtype=torch.float64)


def check_autocast_covers_the_ops_of_the_cpu() -> None:
    """Fails if torch adds ops to the CPU's list: the device needs them too."""
    names = {op._schema.name.removeprefix("aten::") for op in private.ops_with_kernel("AutocastCPU")}
    known = {op._schema.name.removeprefix("aten::") for op in private.ops_with_kernel("AutocastPrivateUse1")}
    assert names == known
    assert {"conv2d", "mm", "bmm", "linear", "matmul", "addmm", "scaled_dot_product_attention"} <= names
    assert 100 < len(names) < 125


def check_gradient_scaling() -> None:
    """Steps whose gradients overflow are skipped, and the scale falls."""
    model = _network().to("jax")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("jax", init_scale=8.0)
    before = metrics.snapshot().get("device_fallbacks", 0)
    for size, scale in ((1.0, 8.0), (torch.inf, 4.0), (1.0, 4.0)):
        weight = model[4].weight.detach().clone()
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 3, 4, 4, device="jax")).square().sum() * size).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == scale
        assert torch.equal(weight, model[4].weight) == (size == torch.inf)
    assert metrics.snapshot().get("device_fallbacks", 0) == before


def check_streams_and_events() -> None:
    module = torch.get_device_module("jax")
    begin, end = module.Event(enable_timing=True), module.Event(enable_timing=True)
    x = torch.ones(300, 300, device="jax")
    (x @ x).sum().item()
    with pytest.raises(RuntimeError, match="recorded"):
        begin.elapsed_time(end)
    started = time.perf_counter()
    begin.record()
    for _ in range(20):
        x = x @ x / 300
    end.record()
    whole = (time.perf_counter() - started) * 1e3
    assert 0 < begin.elapsed_time(end) <= whole
    assert end.query()
    with module.stream(module.Stream()) as stream:
        stream.wait_stream(module.current_stream())
        event = stream.record_event()
    event.wait()
    event.synchronize()
    stream.synchronize()
    assert stream.query()
    assert stream == module.default_stream()
    module.set_stream(stream)
    with pytest.raises(NotImplementedError, match="between processes"):
        module.Event(interprocess=True)


def check_device_module() -> None:
    module = torch.get_device_module("jax")
    module.reset_peak_memory_stats()
    before = module.max_memory_allocated()
    large = torch.ones(1 << 18, device="jax")
    module.synchronize()
    assert module.memory_allocated() >= large.nbytes
    peak = module.max_memory_allocated("jax:0")
    assert peak >= before + large.nbytes
    del large
    assert module.max_memory_allocated() >= peak
    module.reset_peak_memory_stats(0)
    assert module.max_memory_allocated() < peak
    assert module.memory_reserved() >= module.memory_allocated() > 0
    free, everything = module.mem_get_info()
    assert 0 < free < everything == module.get_device_properties().total_memory
    assert module.get_device_properties(0).name == module.get_device_name()
    assert module.is_bf16_supported()
    module.empty_cache()
    module.ipc_collect()
    states = module.get_rng_state_all()
    first = torch.rand(2, device="jax").tolist()
    module.seed_all()
    assert torch.rand(2, device="jax").tolist() != first
    module.set_rng_state_all(states)
    assert torch.rand(2, device="jax").tolist() == first
    module.set_device("jax:0")
    with module.device(0):
        assert module.current_device() == 0
    with pytest.raises(RuntimeError, match='there is no "jax:9"'), module.device(9):
        pass


def check_dropout_in_a_reentrant_checkpoint() -> None:
    """The recomputation draws the random numbers of the first forward pass."""
    x = torch.ones(64, device="jax", requires_grad=True)
    y = checkpoint(lambda x: nn.functional.dropout(x * 3) * 2, x, use_reentrant=True)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())


def check_torch_func() -> None:
    x = torch.randn(3, 4)

    def compute(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() * x).sum()

    model = nn.Linear(4, 2)
    weights = {name: value.detach() for name, value in model.named_parameters()}

    def loss(weights: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, weights, (x,)).square().sum()

    def tangents(x: torch.Tensor) -> torch.Tensor:
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(compute(forward_ad.make_dual(x, torch.ones_like(x)))).tangent

    functions: list[Callable[[torch.Tensor], Any]] = [
        torch.func.vmap(compute), torch.func.grad(compute), torch.func.vmap(torch.func.grad(compute)), torch.func.hessian(compute),
        torch.func.jacfwd(compute), lambda x: torch.func.jvp(compute, (x,), (x,))[1], tangents,
        lambda x: torch.func.grad(loss)({name: value.to(x.device) for name, value in weights.items()}, x),
        lambda x: torch.func.vmap(torch.func.grad(loss), (None, 0))({name: value.to(x.device) for name, value in weights.items()}, x),
    ]  # fmt: skip
    for function in functions:
        _close(function(x.to("jax")), function(x), rtol=1e-4, atol=1e-5)


def check_training_with_hooks_clipping_averages_and_files() -> None:
    """Trains in float64: the gradient of a bias before a batch norm is only rounding error, and Adam would make full steps of float32's."""

    def train(device: str) -> list[Any]:
        torch.manual_seed(1)
        model = _network().double().to(device)
        average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
        tensors: list[torch.Tensor] = []
        model[4].weight.register_hook(lambda gradient: tensors.append(gradient) or gradient * 0.5)
        model[0].register_forward_hook(lambda _, inputs, result: tensors.append(result))
        for step in range(2):
            optimizer.zero_grad()
            data = torch.linspace(-1, 1, 96, dtype=torch.float64).reshape(2, 3, 4, 4).to(device)
            nn.functional.cross_entropy(model(data), torch.tensor([1, 3]).to(device)).backward()
            tensors.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
            optimizer.step()
            schedule.step()
            average.update_parameters(model)
            if not step:
                file = io.BytesIO()
                torch.save({"optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}, file)
                file.seek(0)
                saved = torch.load(file, map_location="cpu")
                optimizer.load_state_dict(saved["optimizer"])
                schedule.load_state_dict(saved["schedule"])
                assert optimizer.state[model[4].weight]["exp_avg"].device.type == device
        return [tensors, list(average.module.parameters())]

    expected = torch.utils._pytree.tree_map(lambda value: value.detach(), train("cpu"))
    _close(train("jax"), expected, rtol=1e-6, atol=1e-9)


def check_the_default_device() -> None:
    torch.set_default_device("jax")
    try:
        layer = nn.Linear(3, 2)
        assert layer(torch.randn(4, 3)).device == torch.tensor([1.0]).device == torch.device("jax:0")
        assert torch.arange(3).device.type == torch.get_default_device().type == "jax"
        loader = torch.utils.data.DataLoader(list(range(4)), batch_size=2, generator=torch.Generator(device="cpu"), shuffle=True)
        assert sorted(torch.cat(list(loader)).tolist()) == [0, 1, 2, 3]
    finally:
        torch.set_default_device(None)
    assert torch.zeros(1).device.type == "cpu"


def check_synchronize_waits_for_results_without_references() -> None:
    x = torch.ones(600, 600, device="jax")

    def work() -> None:
        y = x
        for _ in range(8):
            y = y @ x

    work()
    torch.jax.synchronize()
    started = time.process_time()
    work()
    torch.jax.synchronize()
    busy_seconds, started = time.process_time() - started, time.process_time()
    time.sleep(2 * busy_seconds)
    assert time.process_time() - started < busy_seconds / 4, "XLA was still computing"
