"""The parts of the report. `python -m commands.gpu_report.parts NAME` runs one part in this process and writes its facts."""

# ruff: noqa: B023  (the lambdas in loops are called in the same iteration)

from __future__ import annotations

import contextlib
import copy
import cProfile
import importlib.metadata
import pstats
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch import nn
from torch.nn import functional as F

import dynaxla
from dynaxla.observe import metrics
from dynaxla.runtime import devices, private, streams, transfer

from .facts import device, fact, milliseconds, relative_error, synchronize

DEVICE = device()
ON_GPU = DEVICE.type == "cuda"
PACKAGES = (
    "torch",
    "jax",
    "jaxlib",
    "jax-cuda13-plugin",
    "numpy",
    "triton",
    "nvidia-cudnn-cu13",
    "nvidia-cublas",
    "pytest",
    "transformers",
)
# Cycles of a delay kernel: about a tenth of a second, and about a millisecond.
LONG_DELAY, SHORT_DELAY = 200_000_000, 2_000_000
# A rehearsal on the CPU uses small sizes (rows of a matrix, images of a batch, pixels of an edge), and few calls and networks.
ROWS, PICTURES, PIXELS = (2048, 32, 224) if ON_GPU else (128, 2, 64)
CALLS, MANY_CALLS = (2000, 10_000) if ON_GPU else (20, 100)
MOST_ROWS = 30  # the maximum number of rows of a profile
RESNETS = [(torch.float32, False), *([(torch.bfloat16, True)] if ON_GPU else [])]


def full_precision() -> None:
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False


def compiled(function: Any, **options: Any) -> Any:
    return torch.compile(function, backend="dynaxla", fullgraph=True, options=options or None)


def free_memory() -> list[float]:
    """Returns the free and the total memory of the GPU, in GiB."""
    return [round(size / 2**30, 1) for size in torch.cuda.mem_get_info()] if ON_GPU else []


def versions() -> None:
    with fact("versions", "packages") as fields:
        for name in PACKAGES:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                fields[name] = importlib.metadata.version(name)
    with fact("versions", "torch") as fields:
        fields["sum"] = float(torch.ones(4, device=DEVICE).sum())
        fields["free_gib"] = free_memory()
    with fact("versions", "JAX's client") as fields:
        xla_device = devices.jax_device(DEVICE)
        fields["device"] = [str(xla_device), xla_device.device_kind, getattr(xla_device, "local_hardware_id", None)]
        fields["platform_version"] = str(getattr(xla_device.client, "platform_version", ""))[:200]
        fields["free_gib"] = free_memory()
        if ON_GPU:
            free, total = torch.cuda.mem_get_info()
            fields["ok"] = free > 0.9 * total
    with fact("versions", "plain JAX: a product") as fields:
        fields["sum"] = float(jax.jit(lambda x: (x @ x).sum())(jax.device_put(jnp.ones((64, 64)), xla_device)))
        fields["ok"] = fields["sum"] == 64.0**3
    with fact("versions", "plain JAX: libdevice; if it fails, XLA_FLAGS=--xla_gpu_cuda_data_dir=/usr/local/cuda") as fields:
        x = jax.device_put(jnp.arange(1.0, 9.0), xla_device)
        fields["sum"] = float(jax.jit(lambda x: (jnp.tanh(x) + jax.lax.lgamma(x) + jax.lax.erf(x) + x**1.7).sum())(x))
    with fact("versions", "CUDA's tools") as fields:
        fields["where"] = {name: shutil.which(name) for name in ("ptxas", "nvcc", "nvlink")}


def hand_over() -> None:
    xla_device = devices.jax_device(DEVICE)
    x = torch.arange(8, device=DEVICE, dtype=torch.float32)
    stream = None
    if ON_GPU:
        with fact("hand_over", "streams of XLA") as fields:
            fields["handles"] = [hex(xla_device.get_stream_for_external_ready_events()) for _ in range(5)]
            stream = streams.of(devices.with_index(DEVICE), xla_device).stream_for_import()
    for name, handle in (("without a stream", None), *((("with a stream", stream),) if stream else ())):
        with fact("hand_over", f"import {name}") as fields:
            array = transfer.import_tensor(x, xla_device, handle)
            fields["shares_memory"] = array.unsafe_buffer_pointer() == x.data_ptr()
            fields["sum"] = float(array.sum())
            fields["ok"] = fields["shares_memory"] and fields["sum"] == 28.0
    with fact("hand_over", "export") as fields:
        result = jax.jit(lambda value: value * 2)(array)
        tensor = transfer.export_array(result, 1 if ON_GPU else None)
        fields["ok"] = bool((tensor == x * 2).all()) and tensor.data_ptr() == result.unsafe_buffer_pointer()
        fields["device"] = str(tensor.device)
    with fact("hand_over", "public DLPack") as fields:
        public = jax.dlpack.from_dlpack(x)
        back = torch.from_dlpack(jax.jit(lambda value: value + 1)(public))
        fields["ok"] = float(public.sum()) == 28.0 and bool((back == x + 1).all())
    with fact("hand_over", "fast paths") as fields:
        fields["missing"] = [f"{name}: {state}" for name, state in private.fast_paths().items() if state != "live"] + private.missing
    with fact("hand_over", "cost in microseconds") as fields:
        fields["import"] = round(1e3 * milliseconds(lambda: transfer.import_tensor(x, xla_device, stream), 500)["host_ms"], 2)
        fields["export"] = round(1e3 * milliseconds(lambda: transfer.export_array(result, 1 if ON_GPU else None), 500)["host_ms"], 2)
        if ON_GPU:
            order = streams.of(devices.with_index(DEVICE), xla_device)
            fields["wait for torch's stream"] = round(1e3 * milliseconds(order.stream_for_import, 500)["host_ms"], 2)


def add(part: str = "add") -> None:
    x = torch.randn(1000, device=DEVICE)
    function = compiled(lambda x: x * 2 + 1)
    with fact(part, "x * 2 + 1") as fields:
        for _ in range(3):
            result = function(x)
        fields["error"] = relative_error(result, x * 2 + 1)
        metrics.reset()
        function(x)
        fields["copies"] = metrics.snapshot().get("input_copies", 0)
        fields["ok"] = fields["error"] < 1e-6 and not fields["copies"]
    with fact(part, "time") as fields:
        fields.update(dynaxla=milliseconds(lambda: function(x), 200), eager=milliseconds(lambda: x * 2 + 1, 200))
    if ON_GPU:
        with fact(part, "no call waits for the device") as fields:
            synchronize()
            torch.cuda._sleep(LONG_DELAY)
            event = torch.cuda.Event()
            event.record()
            start = time.perf_counter()
            result = function(x)
            fields["call_ms"] = (time.perf_counter() - start) * 1e3
            fields["ok"] = not event.query() and fields["call_ms"] < 2
            synchronize()
            fields["error"] = relative_error(result, x * 2 + 1)
        with fact(part, "order of writes before and after a call") as fields:
            fields["wrong"] = 0
            for turn in range(50):
                torch.cuda._sleep(SHORT_DELAY)
                x.fill_(turn)
                result = function(x)
                x.fill_(-1)
                fields["wrong"] += not bool((result == 2 * turn + 1).all())
            fields["ok"] = fields["wrong"] == 0
    with fact(part, "dropout follows torch.manual_seed") as fields:
        dropout = compiled(lambda x: F.dropout(x, 0.5))
        torch.manual_seed(1)
        first, second = dropout(x), dropout(x)
        torch.manual_seed(1)
        fields["ok"] = torch.equal(dropout(x), first) and not torch.equal(first, second)
    with fact(part, "an op without a lowering") as fields, torch.library._scoped_library("gpu_report", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        torch.library.register_fake("gpu_report::twice", torch.empty_like, lib=library)
        fields["error"] = relative_error(compiled(lambda x: torch.ops.gpu_report.twice(x + 1) - 1)(x), (x + 1) * 2 - 1)
        fields["ok"] = fields["error"] < 1e-6


def public_ways() -> None:
    """Runs the part "add" with only the public functions of torch and JAX."""
    with private.force_public():
        add("public_ways")


def linear() -> None:
    cases = [
        ("float32", torch.float32, "highest", 1e-6),
        ("float32 with TF32", torch.float32, "high", 2e-3),
        ("bfloat16", torch.bfloat16, "highest", 1e-2),
        ("float64", torch.float64, "highest", 1e-14),
    ]
    for name, dtype, precision, bound in cases:
        with fact("linear", name) as fields:
            torch.set_float32_matmul_precision(precision)
            torch._dynamo.reset()
            x, w = (torch.randn(ROWS, ROWS, device=DEVICE, dtype=dtype) for _ in range(2))

            def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
                return F.gelu(x @ w)

            call = compiled(function)
            start = time.perf_counter()
            result = call(x, w)
            synchronize()
            fields["first_call_seconds"] = round(time.perf_counter() - start, 2)
            expected = F.gelu(x.double() @ w.double())
            fields.update(error=relative_error(result, expected), eager_error=relative_error(function(x, w), expected))
            fields.update(dynaxla=milliseconds(lambda: call(x, w)), eager=milliseconds(lambda: function(x, w)))
            fields["ok"] = fields["error"] < bound


def _training_step(model: Any, optimizer: torch.optim.Optimizer, loss_of: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def step(x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model(x), *rest)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _train(part: str, whole_step: bool) -> None:
    full_precision()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 256, 10)).to(DEVICE)
    nets = [net, copy.deepcopy(net)]
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3) for each in nets]
    if whole_step:
        mine = dynaxla.compile_step(_training_step(nets[0], optimizers[0], F.cross_entropy), fullgraph=True)
    else:
        mine = _training_step(compiled(nets[0]), optimizers[0], F.cross_entropy)
    theirs = _training_step(nets[1], optimizers[1], F.cross_entropy)
    x, y = torch.randn(8, 3, 16, 16, device=DEVICE), torch.randint(0, 10, (8,), device=DEVICE)
    with fact(part, "8 steps, losses of dynaxla and of eager mode") as fields:
        fields["losses"] = [[round(float(mine(x, y)), 5), round(float(theirs(x, y)), 5)] for _ in range(8)]
        fields["ok"] = all(abs(a - b) < 5e-3 * max(1, abs(b)) for a, b in fields["losses"])
    with fact(part, "time") as fields:
        fields.update(dynaxla=milliseconds(lambda: mine(x, y)), eager=milliseconds(lambda: theirs(x, y)))
    with fact(part, "checks"):
        dynaxla.synchronize()


def attention() -> None:
    for length, causal in ((256, False), (256, True), (1024, True)) if ON_GPU else ((32, True),):
        with fact("attention", f"bfloat16, {length} tokens{', causal' if causal else ''}") as fields:
            torch._dynamo.reset()
            torch.manual_seed(0)
            tensors = [
                torch.randn(2, length, 8, 64, device=DEVICE, dtype=torch.bfloat16).transpose(1, 2).requires_grad_() for _ in range(3)
            ]

            def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = causal) -> torch.Tensor:
                return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

            def both(call: Any, *args: torch.Tensor) -> list[torch.Tensor]:
                out = call(*args)
                return [out.detach(), *torch.autograd.grad(out, args, torch.ones_like(out))]

            call = compiled(function, fallback="error")
            mine, eager = both(call, *tensors), both(function, *tensors)
            exact = both(function, *(tensor.detach().double().requires_grad_() for tensor in tensors))
            fields["errors"] = [[relative_error(a, true), relative_error(b, true)] for a, b, true in zip(mine, eager, exact, strict=True)]
            fields["ok"] = all(a < 2 * b + 1e-2 for a, b in fields["errors"])
            fields.update(dynaxla=milliseconds(lambda: both(call, *tensors)), eager=milliseconds(lambda: both(function, *tensors)))


def _resnet18(dtype: torch.dtype, channels_last: bool) -> tuple[nn.Module, torch.Tensor]:
    from dynaxla.bench.suites import torchvision_model

    full_precision()
    torch._dynamo.reset()
    torch.manual_seed(0)
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    net = torchvision_model("resnet18").to(DEVICE, dtype, memory_format=memory_format)
    return net, torch.randn(PICTURES, 3, PIXELS, PIXELS, device=DEVICE, dtype=dtype).to(memory_format=memory_format)


def resnet18() -> None:
    for dtype, channels_last in RESNETS:
        net, x = _resnet18(dtype, channels_last)
        net.eval().requires_grad_(False)
        expected, eager = copy.deepcopy(net).double()(x.double()), net(x)
        for name, options in (("as it is", {}), ("frozen", {"freeze": True})):
            with fact("resnet18", f"{dtype}, {name}") as fields:
                torch._dynamo.reset()
                call = compiled(net, **options)
                start = time.perf_counter()
                result = call(x)
                synchronize()
                fields["first_call_seconds"] = round(time.perf_counter() - start, 1)
                fields.update(error=relative_error(result, expected), eager_error=relative_error(eager, expected))
                fields.update(dynaxla=milliseconds(lambda: call(x), 10), eager=milliseconds(lambda: net(x), 10))
                fields["ok"] = fields["error"] < 3 * fields["eager_error"] + 1e-5


def resnet18_step() -> None:
    for dtype, channels_last in RESNETS:
        with fact("resnet18_step", f"{dtype}") as fields:
            net, x = _resnet18(dtype, channels_last)
            nets = [net, copy.deepcopy(net)]
            optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-4) for each in nets]
            steps = [
                _training_step(each, optimizer, lambda out: out.float().square().mean())
                for each, optimizer in zip(nets, optimizers, strict=True)
            ]
            mine, theirs = dynaxla.compile_step(steps[0], fullgraph=True), steps[1]
            start = time.perf_counter()
            fields["losses"] = [[float(mine(x)), float(theirs(x))] for _ in range(4)]
            fields["first_4_steps_seconds"] = round(time.perf_counter() - start, 1)
            fields.update(dynaxla=milliseconds(lambda: mine(x), 10), eager=milliseconds(lambda: theirs(x), 10))
            fields["ok"] = abs(fields["losses"][1][0] - fields["losses"][1][1]) < 2e-2 * abs(fields["losses"][1][1])


def callbacks() -> None:
    """Programs that call torch's kernels back, from several threads, while other work holds the GIL."""
    import threading

    with torch.library._scoped_library("gpu_report", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        torch.library.register_fake("gpu_report::twice", torch.empty_like, lib=library)
        call = compiled(lambda x: torch.ops.gpu_report.twice(x.sin()) + 1)
        x = torch.randn(1 << 16, device=DEVICE)
        with fact("callbacks", "one thread") as fields:
            fields["error"] = relative_error(call(x), x.sin() * 2 + 1)
            fields["ok"] = fields["error"] < 1e-6
            fields.update(milliseconds(lambda: call(x), 100))
        with fact("callbacks", "three threads on streams of their own") as fields:
            wrong: list[int] = []

            def work(number: int) -> None:
                with torch.cuda.stream(torch.cuda.Stream()) if ON_GPU else contextlib.nullcontext():
                    for turn in range(50):
                        y = torch.full((1 << 16,), float(turn), device=DEVICE)
                        if not torch.allclose(call(y), y.sin() * 2 + 1, atol=1e-5):
                            wrong.append(number)

            threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            fields["ok"] = not wrong and not any(thread.is_alive() for thread in threads)
            fields["wrong"] = len(wrong)


def graph_capture() -> None:
    """A call during the capture of a CUDA graph must raise an error that says so, and later calls must work."""
    if not ON_GPU:
        return
    call = compiled(lambda x: x * 2 + 1)
    x = torch.randn(1000, device=DEVICE)
    call(x), call(x)
    synchronize()
    with fact("graph_capture", "a call during capture raises") as fields:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                call(x)
            fields["ok"] = False
        except Exception as error:
            fields["raised"] = f"{type(error).__name__}: {error}"[:400]
            fields["ok"] = isinstance(error, dynaxla.errors.DynaxlaError)
    with fact("graph_capture", "calls work afterwards") as fields:
        fields["error"] = relative_error(call(x), x * 2 + 1)
        fields["ok"] = fields["error"] < 1e-6


def call_time() -> None:
    """Measures the host time of calls and of their steps, in microseconds. The device's work is negligible."""

    def microseconds(call: Callable[[], Any], calls: int = CALLS) -> float:
        return round(1e3 * milliseconds(call, calls)["host_ms"], 2)

    x = torch.randn(8, 64, device=DEVICE)
    layer = nn.Linear(64, 64, device=DEVICE).requires_grad_(False)
    xla_device = devices.jax_device(DEVICE)
    with fact("call_time", "whole calls") as fields:
        fields["eager x * 2 + 1"] = microseconds(lambda: x * 2 + 1)
        fields["eager linear"] = microseconds(lambda: layer(x))
        add_one, linear = compiled(lambda x: x * 2 + 1), compiled(layer)
        nothing = torch.compile(lambda x: x * 2 + 1, backend=lambda module, inputs: lambda *args: [args[0]])
        for name, call in (("dynaxla x * 2 + 1", add_one), ("dynaxla linear", linear), ("a backend that does nothing", nothing)):
            fields[name] = microseconds(lambda call=call: call(x))
    with fact("call_time", "Inductor") as fields:
        inductor = torch.compile(nn.Linear(64, 64, device=DEVICE).requires_grad_(False))
        fields["linear"] = microseconds(lambda: inductor(x))
    with fact("call_time", "JAX") as fields, jax.enable_x64(True):
        array = jax.device_put(jnp.ones((8, 64), jnp.float32), xla_device)
        weight = jax.device_put(jnp.ones((64, 64), jnp.float32), xla_device)
        small = jax.jit(lambda x, w: x @ w)
        fields["jit call"] = microseconds(lambda: small(array, weight))
        runtime = small.lower(array, weight).compile().runtime_executable()
        fields["execute_sharded with a token"] = microseconds(lambda: runtime.execute_sharded([array, weight], with_tokens=True))
        fields["execute_sharded"] = microseconds(lambda: runtime.execute_sharded([array, weight]))
        fields["execute_sharded and disassemble"] = microseconds(
            lambda: runtime.execute_sharded([array, weight]).disassemble_into_single_device_arrays()
        )
        result = small(array, weight)
        fields["export"] = microseconds(lambda: transfer.export_array(result, 1 if ON_GPU else None))
        fields["import"] = microseconds(lambda: transfer.import_tensor(x, xla_device))
    if ON_GPU:
        with fact("call_time", "CUDA streams and events") as fields:
            order = streams.of(devices.with_index(DEVICE), xla_device)
            handle = order.stream_for_import()
            external, event = torch.cuda.ExternalStream(handle), torch.cuda.Event()
            current = torch.cuda.current_stream()
            fields["before"] = microseconds(order.stream_for_import)
            fields["after"] = microseconds(order.stream_for_export)
            fields["import with a stream"] = microseconds(lambda: transfer.import_tensor(x, xla_device, handle))
            fields["get_stream_for_external_ready_events"] = microseconds(xla_device.get_stream_for_external_ready_events)
            fields["current_stream"] = microseconds(torch.cuda.current_stream)
            fields["record an event"] = microseconds(lambda: event.record(current))
            fields["wait for an event"] = microseconds(lambda: external.wait_event(event))
            fields["is_current_stream_capturing"] = microseconds(torch.cuda.is_current_stream_capturing)
    with fact("call_time", f"profile of {CALLS} calls of linear, microseconds of each call") as fields:
        fields["functions"] = functions(lambda: linear(x), CALLS)


def functions(call: Callable[[], Any], calls: int) -> list[list[Any]]:
    """Returns the Python functions that take most of the host's time: name, calls, own and cumulative microseconds, per call."""
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(calls):
        call()
    profile.disable()
    synchronize()
    rows = sorted(pstats.Stats(profile).stats.items(), key=lambda row: -row[1][2])[:MOST_ROWS]
    return [
        [f"{Path(file).name}:{line} {name}"[-70:], round(count / calls, 1), round(own / calls * 1e6, 2), round(total / calls * 1e6, 2)]
        for (file, line, name), (_, count, own, total, _) in rows
    ]


def kernels(call: Callable[[], Any], calls: int) -> dict[str, Any]:
    """Returns the kernels of a call: their number, their milliseconds, and both by name for the kernels that take most time."""
    activities = [torch.profiler.ProfilerActivity.CPU, *([torch.profiler.ProfilerActivity.CUDA] if ON_GPU else [])]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        for _ in range(calls):
            call()
        synchronize()
    rows_by_name: dict[str, list[float]] = {}
    for event in profile.events():
        if event.device_type.name == "CUDA" and not event.is_user_annotation:
            row = rows_by_name.setdefault(event.name[:70], [0, 0.0])
            row[0], row[1] = row[0] + 1 / calls, row[1] + (event.time_range.end - event.time_range.start) / calls / 1e3
    rows = sorted(rows_by_name.items(), key=lambda row: -row[1][1])
    return {
        "count": round(sum(count for count, _ in rows_by_name.values()), 1),
        "ms": round(sum(ms for _, ms in rows_by_name.values()), 3),
        "kinds": [[name, round(count, 1), round(ms, 3)] for name, (count, ms) in rows[:MOST_ROWS]],
    }


def profile_step() -> None:
    """Profiles a training step on the host and on the device: BERT's, or that of one block of GPT-2 in a rehearsal."""
    from benchmarks import suites
    from dynaxla.bench.runner import ModelSetup

    name = "bert_base" if ON_GPU else "gpt_block"
    with fact("profile_step", f"{name}, bfloat16") as fields:
        setup = ModelSetup(PICTURES, torch.bfloat16, DEVICE, torch.get_num_threads(), training="adamw")
        (case,) = suites.choose("gpu", [name])
        args = setup.inputs(case, torch.Generator().manual_seed(1))
        training = setup.model(case)
        step = dynaxla.compile_step(training.step, fullgraph=True)
        start = time.perf_counter()
        for _ in range(3):
            step(*args)
        synchronize()
        fields["first_3_steps_seconds"] = round(time.perf_counter() - start, 1)
        fields.update(milliseconds(lambda: step(*args), 10))
        fields["functions"], fields["kernels"] = functions(lambda: step(*args), 5), kernels(lambda: step(*args), 2)


def many_calls() -> None:
    """Measures the growth of the process's resident memory, in MiB, over MANY_CALLS calls, twice. A leak of each call shows in both."""

    def resident_mib() -> float:
        return round(int(Path("/proc/self/statm").read_text().split()[1]) * 4 / 1024, 1)

    x, layer = torch.randn(8, 64, device=DEVICE), nn.Linear(64, 64, device=DEVICE).requires_grad_(False)
    xla_device = devices.jax_device(DEVICE)
    array = jax.device_put(jnp.ones((8, 64), jnp.float32), xla_device)
    small, linear, add_one = jax.jit(lambda x: x * 2 + 1), compiled(layer), compiled(lambda x: x * 2 + 1)
    imported = transfer.import_tensor(x, xla_device)
    calls = {
        "plain JAX, one array": lambda: small(array),
        "plain JAX, one imported array": lambda: small(imported),
        "plain JAX, an array imported at each call": lambda: small(transfer.import_tensor(x, xla_device)),
        "x * 2 + 1": lambda: add_one(x),
        "linear": lambda: linear(x),
    }
    for name, call in calls.items():
        with fact("many_calls", name) as fields:
            for _ in range(MANY_CALLS // 10):
                call()
            synchronize()
            sizes, start = [resident_mib()], time.perf_counter()
            for _ in range(2):
                for _ in range(MANY_CALLS):
                    call()
                synchronize()
                sizes.append(resident_mib())
            fields["microseconds"] = round((time.perf_counter() - start) / (2 * MANY_CALLS) * 1e6, 1)
            fields["resident_mib"] = sizes
            fields["ok"] = sizes[2] - sizes[1] < 8


def out_of_memory() -> None:
    if not ON_GPU:
        return
    size = torch.cuda.mem_get_info()[1] // 2
    x = torch.ones(1, device=DEVICE)
    with fact("out_of_memory", "raises OutOfMemory and writes nothing") as fields:
        call = compiled(lambda x: x.add_(torch.zeros(size, device=DEVICE).sum()) + torch.zeros(size, device=DEVICE))
        start = time.perf_counter()
        try:
            call(x)
            fields["ok"] = False
        except dynaxla.errors.OutOfMemory as error:
            fields["raised"] = str(error)[:300]
        fields["seconds"] = round(time.perf_counter() - start, 1)
        fields["x"] = x.item()
        fields["ok"] = fields.get("ok", True) and x.item() == 1
    with fact("out_of_memory", "calls work afterwards") as fields:
        fields["ok"] = bool((compiled(lambda x: x + 1)(x) == 2).all())


PARTS: dict[str, Callable[[], None]] = {
    "versions": versions,
    "hand_over": hand_over,
    "add": add,
    "public_ways": public_ways,
    "linear": linear,
    "train_model": lambda: _train("train_model", False),
    "train_step": lambda: _train("train_step", True),
    "attention": attention,
    "resnet18": resnet18,
    "resnet18_step": resnet18_step,
    "callbacks": callbacks,
    "graph_capture": graph_capture,
    "call_time": call_time,
    "profile_step": profile_step,
    "many_calls": many_calls,
    "out_of_memory": out_of_memory,
}


if __name__ == "__main__":
    PARTS[sys.argv[1]]()
