"""Eager mode on the device agrees with the CPU."""

from __future__ import annotations

import copy
import gc
import logging
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import jax
import pytest
import torch
from torch import nn

from dynaxla.device import cpu_fallback, eager_mode
from dynaxla.observe import metrics
from dynaxla.runtime.cache import LeastRecentlyUsed
from support.comparisons.compare import TOLERANCE, strides


def _same(actual: Any, expected: Any) -> None:
    if isinstance(expected, (tuple, list)):
        assert len(actual) == len(expected)
        for actual_item, expected_item in zip(actual, expected, strict=True):
            _same(actual_item, expected_item)
        return
    if not isinstance(expected, torch.Tensor):
        assert actual == expected
        return
    assert (actual.dtype, actual.shape, strides(actual)) == (expected.dtype, expected.shape, strides(expected))
    relative, absolute = TOLERANCE.get(expected.dtype, (0.0, 0.0))
    torch.testing.assert_close(actual.detach().cpu(), expected.detach(), rtol=relative, atol=absolute, equal_nan=True)


def _alike(function: Callable[..., Any], *tensors: torch.Tensor) -> None:
    """Checks that the function has the same results, and the same effects on its arguments, on the device and on the CPU."""
    on_device, on_cpu = [tensor.to("jax") for tensor in tensors], copy.deepcopy(tensors)
    _same(function(*on_device), function(*on_cpu))
    _same(on_device, list(on_cpu))


def check_views_write_to_one_storage() -> None:
    def write(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x.t()[1].mul_(2)
        x[:, 1:3].transpose(0, 1).add_(1)
        x.view(-1)[::5].zero_()
        x.unfold(1, 2, 2)[0, 1].fill_(-1)
        x[1].view(torch.int32)[2:].bitwise_not_()
        x.diagonal().copy_(torch.arange(3.0, device=x.device))
        y = x.view(3, 2, 2)
        y.squeeze_(0).transpose_(0, 1).unsqueeze_(0)
        y.as_strided((2,), (1,), 10).add_(torch.ones(1, device=x.device))
        return y, x[x.shape[0] - 1], x.expand(2, 3, 4)

    _alike(write, torch.randn(3, 4))
    complex_values = torch.randn(2, 2, dtype=torch.complex64)
    _alike(lambda z: (torch.view_as_real(z).mul_(2), z.conj().imag.add_(1), z.conj() + 1, z.imag.sum()), complex_values)
    _alike(lambda z: z.copy_(z.clone().conj().t()), complex_values)
    _alike(lambda x: torch.as_strided(x, (3, 2), (1, 1)).sum(1), torch.randn(4))
    with pytest.raises(RuntimeError, match="more than one element"):
        torch.zeros(1, device="jax").expand(3).add_(1)


def check_strided_copies_beyond_their_operand() -> None:
    def copied(x: torch.Tensor) -> list[torch.Tensor]:
        part, new = x[1:4:2, 1:4:2], x.new_zeros(2, 2)
        scattered = torch.as_strided_scatter(part, new, (2, 2), (12, 4), 2)
        return [
            scattered, scattered.as_strided((6, 6), (6, 1), 0), torch.as_strided_copy(part, (2, 3), (1, 2), 0),
            torch.as_strided_copy(part, (2, 3), (1, 2), 0, out=x.new_empty(0)),
            torch.ops.aten.as_strided_scatter.out(part, new, (2, 2), (2, 12), out=x.new_empty(0)),
            torch.as_strided_scatter(x[0, :1].expand(6), new, (2, 2), (1, 3)),
        ]  # fmt: skip

    _alike(copied, torch.arange(36.0).view(6, 6))
    for size, stride in (((2, 2), (0, 1)), ((2,), (1,))):
        with pytest.raises(RuntimeError, match=r"single memory location|to have a size equal"):
            torch.as_strided_scatter(torch.ones(3, device="jax"), torch.zeros(2, 2, device="jax"), size, stride)


def check_writes_that_overlap_reads() -> None:
    def is_refused(x: torch.Tensor, write: Callable[[torch.Tensor], Any]) -> bool:
        try:
            write(x)
        except RuntimeError as error:
            return "refer to a single memory location" in str(error)
        return False

    for write in (
        lambda x: x[1:].copy_(x[:-1]), lambda x: x[:2].copy_(x[2:]), lambda x: x.copy_(x.t()), lambda x: x.mul_(x), lambda x: x.add_(x.t()),
        lambda x: x.copy_(x[0].expand(4, 4)), lambda x: torch.mul(x[:2], 2, out=x[1:3]),
    ):  # fmt: skip
        x = torch.arange(16.0).view(4, 4)
        on_device = x.to("jax")
        assert is_refused(on_device, write) == is_refused(x, write)
        _same(on_device, x)


def check_ops_that_write() -> None:
    _alike(lambda x: torch.add(x, x, out=torch.empty(0, device=x.device)), torch.randn(3))
    _alike(lambda x: torch.mul(x, 2, out=x.t().clone().t()), torch.randn(3, 2))
    _alike(lambda x: torch.max(x, 1, out=(x.new_empty(2), x.new_empty(2, dtype=torch.long))), torch.randn(2, 3))
    _alike(lambda x: x.clamp_(0).add_(2.5).pow_(2).neg_(), torch.randn(3))
    _alike(lambda x: x.index_put_((torch.tensor([0, 2]),), torch.tensor(5.0)), torch.randn(3))
    _alike(lambda x: x.masked_fill_(x > 0, 1).t_(), torch.randn(3, 2))
    _alike(lambda x: torch._foreach_add_([x, x[:1]], 1.0), torch.randn(3))
    with warnings.catch_warnings(action="ignore"):  # it is deprecated, and gone from torch 2.14 on
        if hasattr(torch.ops.aten, "cholesky"):
            _alike(lambda x: torch.cholesky(x @ x.t() + x.new_ones(3).diag(), upper=True, out=x.new_empty(0)), torch.randn(3, 3))
    with pytest.raises(RuntimeError, match="can't be cast"):
        torch.ones(2, dtype=torch.long, device="jax").add_(2.5)
    x, wide = torch.ones(2, device="jax"), torch.empty(2, dtype=torch.float64, device="jax")
    for write in (
        lambda: torch.aminmax(x, dim=0, out=(x[0], wide[0])),
        lambda: torch.complex(wide, wide, out=torch.view_as_complex(torch.empty(2, 2, device="jax"))),
        lambda: torch.polar(x, x, out=torch.view_as_complex(torch.empty(2, 2, dtype=torch.float64, device="jax"))),
    ):
        with pytest.raises(RuntimeError, match="to have dtype"):
            write()
    with pytest.warns(UserWarning, match="An output with one or more elements was resized"):
        torch.add(torch.ones(2, device="jax"), 1, out=torch.ones(3, device="jax"))


def check_numbers_dtypes_and_factories() -> None:
    def make(x: torch.Tensor) -> list[torch.Tensor]:
        place = x.device
        return [
            torch.arange(5, device=place), torch.arange(0, 1, 0.25, dtype=torch.float64, device=place), torch.eye(2, 3, device=place),
            torch.linspace(0, 1, 5, device=place), torch.full((2,), 3, device=place), torch.tensor([1.5, 2], device=place), x + 1, x * 2.5,
            x / 3, x.long() / 2, x.bool() + True, x.to(torch.bfloat16) * 1.1, x.double(), x ** 2, 2 - x, x // 0.3, torch.zeros_like(x),
            torch.where(x > 0, x, 0.0), x * torch.tensor(2.0), torch.ones(2, 0, device=place).sum(0), x[..., None] @ x[:, None],
            x.softmax(-1), x.sort().values, torch.cat([x, x.double()]), x.sum(), x.max(), x.argmax(),
            torch.tril_indices(3, 3, device=place), x.to(torch.int8), x.half().exp(), x.cumsum(0), torch.nn.functional.pad(x, (1, 2)),
        ]  # fmt: skip

    _alike(make, torch.randn(2, 3))
    assert [torch.zeros(1, device="jax").add(number).item() for number in (0.0, 1, True)] == [0.0, 1.0, 1.0]
    assert torch.tensor(1.0, device="jax").div(-0.0).item() == -torch.inf
    assert torch.tensor(1.0, device="jax").div(0.0).item() == torch.inf
    assert f"{torch.tensor(1.5, device='jax'):.2f}" == "1.50"
    assert repr(torch.ones(2, device="jax")) == "tensor([1., 1.], device='jax:0')"
    assert [1, 2, 3][torch.tensor(1, device="jax")] == 2


def check_other_devices_are_refused() -> None:
    x, host = torch.ones(2, 3).to("jax"), torch.ones(2, 3)
    for op in (
        lambda: x + host, lambda: host + x, lambda: host.add_(x), lambda: x.add_(host), lambda: x @ host.t(), lambda: torch.cat([x, host]),
        lambda: torch.add(x, x, out=host), lambda: torch.where(x > 0, host, x), lambda: nn.functional.linear(x, host),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match="to be on the same device"):
            op()
    assert host.tolist() == x.tolist() == [[1] * 3] * 2
    row, index, scalar = torch.tensor([0]), torch.tensor([0], device="jax"), torch.tensor(1.0)
    for op in (
        lambda: host[index], lambda: x.index_put_((row,), host[:1]), lambda: host.index_put_((row,), x[:1]), lambda: scalar.add_(x[0, 0]),
        lambda: scalar.index_put_((torch.tensor(True),), x[0, 0]),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match="to be on the same device"):
            op()
    assert x[row].tolist() == [[1] * 3], "an index may be on the CPU"
    assert (x + scalar).tolist() == [[2] * 3] * 2


def check_writes_to_expanded_tensors() -> None:
    """A tensor without elements can be written: no element occurs twice."""
    assert torch.empty(1, device="jax").expand(0).zero_().shape == (0,)
    assert torch.empty_strided((0, 3), (0, 1), device="jax").fill_(3.0).shape == (0, 3)
    with pytest.raises(RuntimeError, match="single memory location"):
        torch.empty(1, device="jax").expand(3).zero_()


def check_a_failed_check_writes_nothing() -> None:
    x = torch.zeros(3, device="jax")
    with pytest.raises((IndexError, RuntimeError)):
        x.index_add_(0, torch.tensor([0, 7], device="jax"), torch.ones(2, device="jax"))
    assert x.tolist() == [0, 0, 0]


def check_cpu_fallback() -> None:
    """Results that XLA does not compute come from the CPU. Each fallback is counted, and is logged once for each op."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dynaxla").addHandler(handler)
    before = metrics.snapshot().get("device_fallbacks", 0)
    x = torch.tensor([3.0, 0.0, 1.0]).to("jax")
    try:
        for _ in range(2):
            assert x.nonzero().tolist() == [[0], [2]]
            assert x[x > 0].tolist() == [3, 1]
    finally:
        logging.getLogger("dynaxla").removeHandler(handler)
    assert metrics.snapshot()["device_fallbacks"] == before + 4
    assert torch.equal(x, x.clone())
    assert not torch.equal(x, x + 1)
    assert not torch.equal(x, x[:2])
    assert metrics.snapshot()["device_fallbacks"] == before + 4
    assert len([record for record in records if "aten.nonzero" in record]) <= 1
    written = torch.zeros(2, 2, device="jax")
    cpu_fallback.run_on_cpu(torch.ops.aten.fill_.Scalar, (written.t()[0], 4.0), {}, "a test")
    assert written.tolist() == [[4, 0], [4, 0]]
    cpu_fallback.run_on_cpu(torch.ops.aten.add.out, (written, 1.0), {"out": written}, "a test")
    assert written.tolist() == [[5, 1], [5, 1]]


def check_histograms_of_integers() -> None:
    """The device accepts integers, as GPUs do: transformers' experts count their tokens this way on devices other than the CPU.

    The CPU's kernel refuses integers.
    """
    x = torch.tensor([0, 3, 1, 1, 2, 7, 3, 0, 5, 4, 100], dtype=torch.int8)
    for bins, low, high in ((4, 0, 3), (3, 0, 9), (4, 0, 0), (2, 1.9, 5.9)):
        first, last = (int(x.min()), int(x.max())) if low == high else (int(low), int(high))
        expected = [0] * bins
        for value in x.tolist():
            if first <= value <= last:
                expected[min((value - first) * bins // (last - first), bins - 1)] += 1
        histogram = torch.histc(x.to("jax"), bins, low, high)
        assert (histogram.dtype, histogram.tolist()) == (torch.int8, expected), (bins, low, high)
    for refused in (x, x.to("jax").bool()):
        with pytest.raises(NotImplementedError, match="not implemented for"):
            torch.histc(refused, 4)
    with pytest.raises(RuntimeError, match="max must be larger than min"):
        torch.histc(x.to("jax"), 4, 5, 2)


def check_grouped_products() -> None:
    """XLA computes them, in float32 too. torch's kernel for devices other than GPUs would read addresses."""
    before = metrics.snapshot().get("device_fallbacks", 0)
    for shapes, last_offset in (([(6, 8), (3, 5, 8)], 6), ([(3, 5, 8), (6, 8)], 6), ([(5, 8), (6, 8)], 8), ([(3, 5, 8), (3, 5, 8)], None)):
        x, y = (torch.randn(shape) for shape in shapes)
        offsets = None if last_offset is None else torch.tensor([1, 1, last_offset], dtype=torch.int32)
        for dtype in (torch.float32, torch.bfloat16):
            results = []
            for device in ("jax", "cpu"):
                left, right = (tensor.to(device, dtype) for tensor in (x, y))
                results.append(torch._grouped_mm(left, right.mT, offs=None if offsets is None else offsets.to(device)))
            assert results[0].stride() == results[1].stride(), (shapes, results[0].stride(), results[1].stride())
            torch.testing.assert_close(results[0].cpu(), results[1], **({} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 1e-1}))
    assert metrics.snapshot().get("device_fallbacks", 0) == before


def check_ops_are_compiled_once() -> None:
    x = torch.ones(7, 3, device="jax")
    (x * x).sum()
    before = metrics.snapshot()["compile"]
    for _ in range(20):
        (x * x).sum()
    assert metrics.snapshot()["compile"] == before
    assert len(eager_mode._programs) <= eager_mode.CAPACITY


def _at_once(count: int, work: Callable[[], Any]) -> list[Any]:
    """Returns the results of threads that start at the same time."""
    start, results = threading.Barrier(count), []

    def run() -> None:
        start.wait()
        results.append(work())

    threads = [threading.Thread(target=run, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(results) == count, "threads wait for each other"
    return results


def check_threads_compile_a_new_op_once() -> None:
    x = torch.full((3, 17), 4.0, device="jax")
    before = metrics.snapshot()["compile"]

    def work() -> float:
        return (x.rsqrt() * 0.25).logsumexp(1).cpu()[0].item()

    results = _at_once(8, work)
    compilations = metrics.snapshot()["compile"] - before
    assert len(set(results)) == 1
    work()
    assert compilations == metrics.snapshot()["compile"] - before
    assert compilations <= 4, compilations
    assert not eager_mode._compile_locks._locks


def check_compilations_in_several_threads() -> None:
    """After a failed compilation, a waiting thread compiles. Two threads that need each other's results both compile."""
    cache: Any = LeastRecentlyUsed(10)
    failures = [RuntimeError("first"), RuntimeError("second")]
    tried: list[Any] = []

    def make(problem: Any) -> Any:
        tried.append(problem)
        time.sleep(0.02)
        if failures:
            raise failures.pop()
        return [problem]

    def find(key: str, make: Callable[[Any], Any]) -> Any:
        try:
            return eager_mode.find_or_compile(cache, make, key, (), False, lambda: key)[0]
        except RuntimeError as error:
            return str(error)

    found = _at_once(5, lambda: find("fails twice", make))
    assert len(tried) == 3
    assert {"first", "second"} <= {item for item in found if isinstance(item, str)}
    assert sum(item == ["fails twice"] for item in found) == 3
    both = threading.Barrier(2)
    order = iter(["one", "other"])

    def needs(problem: Any) -> Any:
        both.wait(30)
        return [problem, find({"one": "other", "other": "one"}[problem], lambda inner: [inner])]

    _at_once(2, lambda: find(next(order), needs))
    assert not eager_mode._compile_locks._locks


def check_ops_leave_no_objects() -> None:
    """3,600 ops. The result was the same for 100,000 ops."""
    x, total = torch.randn(64).to("jax"), torch.zeros(64, device="jax")

    def loop(count: int) -> tuple[int, int, int]:
        for step in range(count):
            (x * (step + 0.5)).sum()
            total.add_(x, alpha=1 / (step + 2))
            total[3:9].mul_(0.9)
        gc.collect()
        return len(gc.get_objects()), len(jax.live_arrays()), len(eager_mode._programs)

    before = loop(400)
    after = loop(800)
    assert all(late <= early + 20 for late, early in zip(after, before, strict=True)), (before, after)


def check_numbers_are_inputs() -> None:
    """Changing hyperparameters, such as 1,000 learning rates, need one compilation. Parameters are those of the CPU."""

    changing_options: dict[str, Callable[[int], Any]] = {}

    def train(device: str, optimizer: str, steps: int, compilations: list[int], **options: Any) -> torch.Tensor:
        weight = torch.linspace(-1, 1, 6).to(device).requires_grad_()
        weight.grad = torch.linspace(1, 2, 6).to(device)
        instance = getattr(torch.optim, optimizer)([weight], lr=0.1, **options)
        for step in range(steps):
            instance.param_groups[0]["lr"] = 0.3 / (step + 3)
            instance.param_groups[0].update({name: change(step) for name, change in changing_options.items()})
            instance.step()
            if step == 3:
                compilations.append(metrics.snapshot()["compile"])
        compilations.append(metrics.snapshot()["compile"])
        return weight.detach()

    for optimizer, steps, options in [
        ("SGD", 1000, {"momentum": 0.9, "weight_decay": 0.01}),
        ("Adam", 60, {"foreach": False}),
        ("AdamW", 60, {"foreach": True, "amsgrad": True}),
        ("NAdam", 60, {}),
    ]:
        compilations: list[int] = []
        actual = train("jax", optimizer, steps, compilations, **options)
        assert compilations[0] == compilations[1], optimizer
        torch.testing.assert_close(actual.cpu(), train("cpu", optimizer, steps, [], **options))
    changing_options["weight_decay"] = lambda step: 0.1 / (step + 1)
    for optimizer, name, change in (
        ("AdamW", "betas", lambda step: (0.9 - step / 200, 0.99)),
        ("SGD", "momentum", lambda step: 0.9 - step / 200),
    ):
        changing_options[name] = change
        compilations = []
        actual = train("jax", optimizer, 30, compilations, fused=True)
        assert compilations[0] == compilations[1], optimizer
        torch.testing.assert_close(actual.cpu(), train("cpu", optimizer, 30, [], fused=True))


def check_values_of_scalars() -> None:
    """Scalars for which a program is compiled, scalars that use an earlier program, and scalars that need another one."""

    def compute(x: torch.Tensor, n: Any) -> list[torch.Tensor]:
        y = x.flip(0)
        return [
            x + n, n - x, x * n, x / n, n / x, x // 0.7, x % n, torch.fmod(x, n), torch.addcmul(x, y, y, value=n),
            x.clamp(n), x.clamp(max=n), x.clone().fill_(n), x.masked_fill(x > 0, n), torch.where(x > 0, x, n), x == n, x < n,
            torch.full_like(x, n), x**n, x.double() * n, x.to(torch.complex64) * n, x.to(torch.bfloat16) * n, x.bool() * n,
            x.clone()[1:].mul_(n), torch.lerp(x, y, n), torch.add(x, y, alpha=n), torch.nn.functional.leaky_relu(x, n),
            (x.double() + n).sum(), *torch._foreach_mul([x, y], [n, n]),
        ]  # fmt: skip

    x = torch.tensor([-2.5, 0.5, 3.0, torch.inf])
    for n in (0.3, 0.75, 2.0, 1.0, -1.5, 0.0, -0.0, torch.nan, torch.inf, 3, 1, 0, -2, 2**62):
        _alike(lambda x, n=n: compute(x, n), x)
    _alike(lambda x: [x & 1, x | 6, x ^ True, x << 2, 1 << x, x % 3, x.clone().remainder_(2), torch.copysign(x, -1.0)], torch.arange(1, 4))
    assert torch.tensor([5.0], device="jax").div(-0.0).item() == -torch.inf
    for write in (torch.Tensor.mul_, torch.Tensor.add_, torch.Tensor.div_):
        with pytest.raises(RuntimeError, match=r"result type Float can't be cast to the desired output type Long|Promotion of int"):
            write(torch.ones(2, dtype=torch.long, device="jax"), 2.5)


def _network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.GELU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 8),
        nn.LayerNorm(8), nn.Linear(8, 5),
    )  # fmt: skip


def check_training() -> None:
    """Steps of training on the device and on the CPU: forward, backward and the optimizer. Then evaluation."""
    on_cpu = _network()
    on_device = copy.deepcopy(on_cpu).to("jax")
    data, target = torch.randn(4, 3, 4, 4), torch.randint(5, (4,))
    for model, device in ((on_cpu, "cpu"), (on_device, "jax")):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(data.to(device)), target.to(device)).backward()
            optimizer.step()
    for name, value in on_cpu.state_dict().items():
        torch.testing.assert_close(on_device.state_dict()[name].cpu(), value, rtol=1e-3, atol=1e-4, msg=name)
    _same([parameter.grad for parameter in on_device.parameters()][-1].cpu().sign(), list(on_cpu.parameters())[-1].grad.sign())
    torch.testing.assert_close(on_device.eval()(data.to("jax")).cpu(), on_cpu.eval()(data), rtol=1e-3, atol=1e-3)
    other = _network()
    other.load_state_dict(on_device.state_dict())
    torch.testing.assert_close(other.eval()(data), on_cpu(data), rtol=1e-3, atol=1e-3)


def check_autograd() -> None:
    host = torch.ones(2, requires_grad=True)
    (host.to("jax") * 3).cpu().sum().backward()
    assert host.grad is not None
    assert host.grad.tolist() == [3, 3]
    x = torch.randn(3, dtype=torch.float64, device="jax", requires_grad=True)
    assert torch.autograd.gradcheck(lambda y: (y[1:] * y[:2]).exp().sum(), (x,))
    saved = x.exp()
    saved.sum()
    with torch.no_grad():
        saved.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.sum().backward()
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        x.add_(1)
    gradients: list[torch.Tensor] = []

    def run() -> None:
        leaf = torch.ones(2, device="jax", requires_grad=True)
        (leaf * leaf).sum().backward()
        gradients.append(leaf.grad)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [gradient.tolist() for gradient in gradients] == [[2, 2]] * 3


def check_fused_optimizers_rrelu_and_cholesky_solve() -> None:
    """XLA computes these ops, which write to lists or to operands besides their result. A learning rate is an input."""
    before = metrics.snapshot().get("device_fallbacks", 0)
    x = torch.randn(4, 5, device="jax", requires_grad=True)
    y = nn.functional.rrelu(x, training=True)
    y.sum().backward()
    assert x.grad is not None
    slopes = x.grad.cpu()
    torch.testing.assert_close((y / x).detach().cpu(), slopes)
    assert torch.equal(slopes == 1, x.detach().cpu() > 0)
    assert float(slopes.min()) >= 0.125
    in_place = x.detach().clone()
    nn.functional.rrelu_(in_place, training=True)
    assert torch.equal(in_place.cpu() == x.detach().cpu(), x.detach().cpu() > 0)
    matrix = torch.randn(3, 3)
    factor, b = torch.linalg.cholesky(matrix @ matrix.T + 3 * torch.eye(3)), torch.randn(3, 2)
    torch.testing.assert_close(torch.cholesky_solve(b.to("jax"), factor.to("jax")).cpu(), torch.cholesky_solve(b, factor))
    for make in (
        lambda params: torch.optim.AdamW(params, lr=0.01, fused=True, amsgrad=True),
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, fused=True),
    ):
        on_cpu = nn.Linear(4, 3)
        on_device = copy.deepcopy(on_cpu).to("jax")
        optimizers = make(on_cpu.parameters()), make(on_device.parameters())
        for rate in (0.1, 0.07, 0.05):
            batch = torch.randn(5, 4)
            for optimizer in optimizers:
                optimizer.param_groups[0].update({"betas": (1 - rate, 0.99), "weight_decay": rate / 2, "momentum": 1 - rate})
            for model, optimizer, device in zip((on_cpu, on_device), optimizers, ("cpu", "jax"), strict=True):
                optimizer.param_groups[0]["lr"] = rate
                optimizer.zero_grad()
                model(batch.to(device)).square().sum().backward()
                optimizer.step()
        for actual, expected in zip(on_device.parameters(), on_cpu.parameters(), strict=True):
            torch.testing.assert_close(actual.cpu(), expected)
            for name, value in optimizers[0].state[expected].items():
                torch.testing.assert_close(optimizers[1].state[actual][name].cpu(), value)
    assert metrics.snapshot().get("device_fallbacks", 0) == before


def check_layers_whose_input_needs_no_gradient() -> None:
    """torch's meta functions return a gradient of the input although output_mask excludes it."""
    for make, shape in (
        (lambda: nn.BatchNorm1d(4), (6, 4)),
        (lambda: nn.BatchNorm2d(4).eval(), (2, 4, 3, 3)),
        (lambda: nn.InstanceNorm2d(4, affine=True), (2, 4, 3, 3)),
        (lambda: nn.GroupNorm(2, 4), (2, 4, 3, 3)),
        (lambda: nn.LayerNorm(4), (6, 4)),
        (lambda: nn.Conv2d(4, 4, 3), (2, 4, 3, 3)),
    ):
        torch.manual_seed(0)
        model, x = make(), torch.randn(shape)
        for device in ("cpu", "jax"):
            model.zero_grad()
            model.to(device)(x.to(device)).square().sum().backward()
            gradients = [parameter.grad.cpu() for parameter in model.parameters()]
            if device == "cpu":
                expected = gradients
        torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-4)
