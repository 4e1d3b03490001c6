"""A scenario for each promise of docs/promises.md. Random inputs come from a generator of this module, because torch's is watched."""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import os
import tempfile
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import jax
import pytest
import torch
from torch import nn

import dynaxla
from dynaxla.observe import coverage, metrics
from support.comparisons.compare import assert_equal, check

from .visible import State, differences, keeps_freed_memory, snapshot

_generator = torch.Generator().manual_seed(0)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=_generator)


def network() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(function, backend="dynaxla", options=options or None)


def results_of_eager_mode() -> None:
    """Values and metadata of results, aliases and mutations are those of eager mode. Random ops follow torch.manual_seed."""
    check(lambda x: (x.t(), x.t() * 2, x[1:], (x > 0).long(), x.double().sum(0)), randn(4, 6))
    check(lambda x: (x.add_(1), x * 3, x.view(-1)), randn(4, 6))
    check(lambda x: x.permute(2, 0, 1) + 1, randn(2, 3, 4))
    x, y = randn(4, 8).requires_grad_(), randn(4, 8)
    results = [run(x, y) for run in (compiled(lambda x, y: (x * y, y * 2)), lambda x, y: (x * y, y * 2))]
    assert_equal(results[0], results[1])
    drop = compiled(lambda x: nn.functional.dropout(x))
    exact = compiled(lambda x: nn.functional.dropout(x, 0.3), exact_rng=True)
    ones = torch.ones(1000)

    def draw(function: Callable[[torch.Tensor], torch.Tensor], seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return function(ones)

    with torch.random.fork_rng(devices=[]):
        assert torch.equal(draw(drop, 1), draw(drop, 1))
        assert not torch.equal(draw(drop, 1), draw(drop, 2))
        assert torch.equal(draw(exact, 3), draw(lambda x: nn.functional.dropout(x, 0.3), 3))


def no_stale_parameters() -> None:
    """The next call uses each change of a parameter, however it was made, and nothing keeps a model alive."""
    watched = _every_way_to_change_a_parameter()
    torch._dynamo.reset()
    gc.collect()
    assert [ref() for ref in watched] == [None] * len(watched)


def _every_way_to_change_a_parameter() -> list[weakref.ref[Any]]:
    """Changes parameters in every way. Returns weak references to the model and its parameters."""
    model, other = network(), network()
    fast = compiled(model)
    x = randn(3, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    weight, bias = model[0].weight, model[0].bias

    def step() -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    def in_place() -> None:
        with torch.no_grad():
            weight.mul_(2)

    def another_tensor() -> None:
        weight.data = weight.data.t().contiguous() * 3

    def through_data() -> None:
        bias.data.add_(1)

    def through_numpy() -> None:
        model[2].bias.detach().numpy()[:] = 7

    before = fast(x)
    for change in (in_place, another_tensor, through_data, through_numpy, step, lambda: model.load_state_dict(other.state_dict())):
        change()
        after = fast(x)
        torch.testing.assert_close(after, model(x))
        assert not torch.equal(before, after)
        before = after
    return [weakref.ref(item) for item in (model, *model.parameters())]


@torch.library.custom_op("promises::scaled", mutates_args=())
def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    if factor < 0:
        raise ValueError("the op refuses")
    return x * factor


scaled.register_fake(lambda x, factor: torch.empty_like(x))
scaled.register_autograd(
    lambda ctx, gradient: (gradient * ctx.factor, None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "factor", inputs[1]),
)


def failed_calls_change_nothing() -> None:
    """A call that fails leaves its inputs, parameters, gradients, optimizer state and buffers as they were."""
    x, index = randn(5), torch.tensor([1, 9])

    def out_of_range(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return x[index]

    def raising(x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return torch.ops.promises.scaled(x, -1.0)

    original = x.clone()
    with pytest.raises(IndexError):
        compiled(out_of_range)(x, index)
    with pytest.raises(ValueError, match="the op refuses"):
        compiled(raising)(x)
    assert torch.equal(x, original)
    model = nn.Sequential(network(), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())

    @dynaxla.compile_step
    def step(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        loss = model(x)[index].square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    good = torch.tensor([0, 1])
    for _ in range(2):
        step(randn(4, 8), good)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    with pytest.raises(IndexError):
        step(randn(4, 8), torch.tensor([0, 77]))
    after = (model.state_dict(), optimizer.state_dict())
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    step(randn(4, 8), good)


def no_dead_ends() -> None:
    """An op without a lowering runs in torch, with gradients, and the graph is split at sizes that depend on values.

    Both are logged once and counted.
    """
    messages: list[str] = []

    class MessageList(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    handler = MessageList()
    logger = logging.getLogger("dynaxla")
    logger.addHandler(handler)
    propagates, logger.propagate = logger.propagate, False
    try:
        x = randn(6).requires_grad_()
        for shift in (1.0, 2.0):
            fast = compiled(lambda x, shift=shift: torch.ops.promises.scaled(x, 3.0).sin() + shift)
            y = fast(x)
            torch.testing.assert_close(y, (x * 3).sin() + shift)
            (gradient,) = torch.autograd.grad(y.sum(), x)
            torch.testing.assert_close(gradient, 3 * (x * 3).cos())
        positive = compiled(lambda x: x[x > 0].sum() + x.nonzero().shape[0])
        fixed = randn(9)
        torch.testing.assert_close(positive(fixed), fixed[fixed > 0].sum() + 9)
        with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
            whole = torch.compile(lambda x: x[x > 0].cos(), backend="dynaxla", fullgraph=True)
            torch.testing.assert_close(whole(fixed), fixed[fixed > 0].cos())
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagates
    assert sum("promises.scaled" in message for message in messages) == 1, messages
    assert sum("the graph is split around it" in message for message in messages) == 1, messages
    assert coverage.snapshot()["promises.scaled.default"]["fallback"] >= 2
    assert metrics.snapshot()["kernels"] > 0


def clear_errors() -> None:
    """Values that eager mode rejects raise eager mode's exception. All other errors are dynaxla's, with the details."""
    with pytest.raises(IndexError):
        compiled(lambda x, i: x[i])(randn(3), torch.tensor([5]))
    with pytest.raises(torch.linalg.LinAlgError):
        compiled(torch.linalg.inv)(torch.zeros(3, 3))
    with pytest.raises(torch.linalg.LinAlgError):
        compiled(torch.linalg.cholesky)(-torch.eye(3))
    with pytest.raises(dynaxla.errors.UnsupportedTensor) as caught:
        compiled(lambda x: x * 2)(torch.empty(3, device="meta"))
    assert caught.value.hint
    # TorchDynamo passes no graph with a sparse tensor to a backend: eager mode runs it.
    assert torch.equal(compiled(lambda x: x * 2)(torch.eye(3).to_sparse()).to_dense(), torch.eye(3) * 2)
    with pytest.raises(dynaxla.errors.OptionError, match="did you mean 'freeze'"):
        compiled(lambda x: x * 2, frieze=True)(randn(3))
    with pytest.raises(dynaxla.errors.CompilationError):
        compiled(lambda x: x * 2, xla={"xla_no_such_option": 1})(randn(3))
    with pytest.raises(dynaxla.errors.UnsupportedOp) as unsupported:
        compiled(lambda x: torch.ops.promises.scaled(x, 2.0), fallback="error")(randn(3))
    assert unsupported.value.op == "promises.scaled.default"
    assert unsupported.value.inputs == "f32[3], factor=2.0"
    assert "scenarios.py" in unsupported.value.where


def no_side_effects() -> None:
    """Options, several sizes, training, and two threads at once change no visible state. The caller compares the state."""
    flags = os.environ.get("XLA_FLAGS")
    model = network()
    with tempfile.TemporaryDirectory() as folder:
        for options in ({}, {"exact_rng": True}, {"dump": folder, "cache": folder}, {"executables": 1}):
            torch._dynamo.reset()
            fast = compiled(model, **options)
            for rows in (3, 3, 5):
                fast(randn(rows, 8)).sum().backward()
        with warnings.catch_warnings():  # the option is deprecated, and an environment variable would be a visible change
            warnings.simplefilter("ignore", DeprecationWarning)
            compiled(lambda x: x @ x, forms={"contraction": "xla"})(randn(8, 8))
        with torch.no_grad():
            for options in ({"freeze": True}, {"tune": True, "cache": folder}):
                compiled(copy.deepcopy(model), **options)(randn(3, 8))
    retraced = torch.compile(lambda x: x.cos() + 1, backend="dynaxla_retrace")
    x = randn(5)
    threads = [threading.Thread(target=retraced, args=(x,), daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    large = randn(1 << 23)
    assert not keeps_freed_memory()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        compiled(lambda x: x + 1, heap="leave")(large)
    assert not keeps_freed_memory()
    assert (os.environ.get("XLA_FLAGS"), os.environ.get("PJRT_NPROC")) == (flags, None)
    # The exception that docs/promises.md names.
    torch._dynamo.reset()
    compiled(lambda x: x + 2)(large)
    assert keeps_freed_memory() in (True, None)


def the_device() -> None:
    """`dynaxla.device.enable` makes only its documented changes, also if called twice. Work on the device changes no visible state."""
    model = network()
    for _ in range(2):
        dynaxla.device.enable()
    mine = copy.deepcopy(model).to("jax")
    optimizer = torch.optim.AdamW(mine.parameters())
    x = randn(3, 8)

    def train() -> None:
        mine(x.to("jax")).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for thread in [threading.Thread(target=train, daemon=True) for _ in range(2)]:
        thread.start()
        thread.join()
    nn.functional.dropout(mine(x.to("jax"))).cpu()
    x.to("jax").nonzero()
    with pytest.raises(RuntimeError, match="same device"):
        mine(x)
    check(lambda x: nn.functional.relu(x) * 2, x)
    model(x).sum().backward()


def meshes() -> None:
    """With eight devices, real and virtual meshes, tensors on them, steps and reports change no visible state.

    JAX has the same devices as before, and torch.compile with other backends works as before.
    """
    flags = os.environ["XLA_FLAGS"]
    dynaxla.device.enable()
    assert len(jax.devices()) == 8
    for mesh in (dynaxla.sharding.Mesh((2, 4), ("fsdp", "tp")), dynaxla.sharding.Mesh((4, 4), ("fsdp", "tp"), virtual=True)):
        model = dynaxla.sharding.shard_module(network(), mesh, {"0.weight": ("tp",), "2.weight": (None, "tp")})
        x = dynaxla.sharding.mark_sharding(randn(16, 8).to("jax"), mesh, ("fsdp",))
        optimizer = torch.optim.AdamW(model.parameters())

        def step(x: torch.Tensor, model: nn.Module = model, optimizer: Any = optimizer) -> torch.Tensor:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        compiled_step = dynaxla.compile_step(step, fullgraph=True)
        assert dynaxla.sharding.report(compiled_step, x, run=not mesh.is_virtual).count("all-reduce")
        for run in (compiled_step, step):
            run(x).item()
        with dynaxla.device.lazy():
            step(x)
        compiled(model)(x).sum().backward()
    assert (os.environ["XLA_FLAGS"], len(jax.devices())) == (flags, 8)
    host = randn(4, 8)
    assert_equal(torch.compile(lambda x: x.sin() @ x.t(), backend="aot_eager")(host), host.sin() @ host.t())


class StateReader:
    """A thread that reads the state while a step is recorded. The step increments a count, and waits until the thread has answered."""

    def __init__(self, read: Callable[[], State]) -> None:
        self._read = read
        self.counts = {"asked": 0, "answered": 0}
        self.before = read()
        self.seen: list[State] = []
        self._is_over = False
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while not self._is_over:
            asked = self.counts["asked"]
            if asked > self.counts["answered"]:
                self.seen.append(self._read())
                self.counts["answered"] = asked
            else:
                time.sleep(0.001)  # leaves the interpreter lock to the step

    def close(self) -> None:
        self._is_over = True
        self._thread.join()


def recording() -> None:
    """While `compile_step` records a step, other threads see torch, JAX, the model and the optimizer unchanged."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def read() -> State:
        groups = {
            f"group[{key}]": (type(value).__name__, repr(value)) for key, value in optimizer.param_groups[0].items() if key != "params"
        }
        gradients = [parameter.grad is None for parameter in model.parameters()]
        values = [parameter.detach().sum().item() for parameter in model.parameters()]
        kinds = [type(parameter).__name__ for parameter in model.parameters()]
        return {**snapshot(), **groups, "gradients": gradients, "values": values, "kinds": kinds, "optimizer": sorted(vars(optimizer))}

    reader = StateReader(read)
    counts = reader.counts

    @dynaxla.compile_step(fullgraph=True)
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        counts["asked"] += 1
        while counts["answered"] < counts["asked"]:
            pass
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    try:
        with contextlib.suppress(dynaxla.errors.CaptureError):  # the recording is rejected, because the step has a side effect
            step(randn(4, 8))
    finally:
        reader.close()
    assert len(reader.seen) > 1
    found = [difference for state in reader.seen for difference in differences(reader.before, state)]
    assert not found, found


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (
        results_of_eager_mode, no_stale_parameters, failed_calls_change_nothing, no_dead_ends, clear_errors, no_side_effects, recording,
        the_device, meshes,
    )
}  # fmt: skip
