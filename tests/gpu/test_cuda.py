"""Tests of CUDA tensors: passed without copies, ordered by streams, without waits on the host."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import dynaxla
from dynaxla.observe import metrics
from support.comparisons.compare import assert_equal

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU and a CUDA build of torch"),
]

LONG = 200_000_000  # cycles of a delay kernel: about a tenth of a second


@pytest.fixture(autouse=True)
def full_precision() -> None:
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False


def cuda(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda")


def test_result_without_input_copies() -> None:
    layer = nn.Linear(64, 64, device="cuda")
    compiled = torch.compile(layer, backend="dynaxla", fullgraph=True)
    x = cuda(8, 64)
    with torch.no_grad():
        compiled(x)
        metrics.reset()
        assert_equal(compiled(x), layer(x), tolerance=(1e-4, 1e-4))
    assert metrics.snapshot().get("input_copies", 0) == 0


def test_views_and_mutations() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x * 2
        x.add_(1)
        return y.t(), y[1:], x.view(-1)

    compiled = torch.compile(function, backend="dynaxla", fullgraph=True)
    for _ in range(3):
        mine = cuda(4, 6)
        theirs = mine.clone()
        assert_equal(compiled(mine), function(theirs))
        assert_equal(mine, theirs)


def test_call_does_not_wait_for_the_device() -> None:
    compiled = torch.compile(lambda x: x * 2, backend="dynaxla")
    x = cuda(1000)
    compiled(x)
    compiled(x)
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    delay_ended = torch.cuda.Event()
    delay_ended.record()
    out = compiled(x)
    assert not delay_ended.query(), "the call returned after the delay: it waited for the device"
    assert_equal(out, x * 2)


def test_parameters_updated_under_a_delayed_stream_are_seen() -> None:
    layer = nn.Linear(256, 256, device="cuda")
    compiled = torch.compile(layer, backend="dynaxla", fullgraph=True)
    x = cuda(32, 256)
    with torch.no_grad():
        compiled(x)
        compiled(x)
        for turn in range(5):
            torch.cuda._sleep(LONG)
            layer.weight.fill_(turn)
            layer.bias.fill_(turn)
            out = compiled(x)
            assert_equal(out, layer(x), tolerance=(1e-3, 1e-3))


def test_input_written_after_the_call_does_not_reach_the_result() -> None:
    compiled = torch.compile(lambda x: (x @ x) @ x, backend="dynaxla")
    for _ in range(10):
        x = torch.ones(2048, 2048, device="cuda")
        out = compiled(x)
        x.zero_()
        assert torch.all(out == 2048.0**2)


def test_output_freed_while_torch_still_reads_it() -> None:
    compiled = torch.compile(lambda x: x + 1, backend="dynaxla")
    x = torch.zeros(1 << 20, device="cuda")
    compiled(x)
    for turn in range(20):
        out = compiled(x)
        torch.cuda._sleep(LONG // 10)
        later = out.clone()
        del out
        others = [compiled(torch.full_like(x, 100.0 + turn)) for _ in range(3)]
        assert torch.all(later == 1), "the memory of a freed result was written while it was still being read"
        del others


def test_side_stream() -> None:
    compiled = torch.compile(lambda x: x * 3, backend="dynaxla")
    x = cuda(1 << 20)
    compiled(x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG)
        y = x + 1
        out = compiled(y)
        expected = y * 3
    stream.synchronize()
    assert_equal(out, expected)


def test_precision_follows_torchs_setting() -> None:
    compiled = torch.compile(lambda x: x @ x, backend="dynaxla")
    x = cuda(512, 512)
    exact = (x.double() @ x.double()).float()
    fine = (compiled(x) - exact).abs().max()
    torch.set_float32_matmul_precision("high")
    coarse = (compiled(x) - exact).abs().max()
    assert coarse > 5 * fine, "TF32 must be used if and only if torch's setting allows it"
    torch.set_float32_matmul_precision("highest")
    assert (compiled(x) - exact).abs().max() <= 2 * fine


def test_xla_preallocates_no_memory() -> None:
    if any(name.startswith("XLA_PYTHON_CLIENT") for name in os.environ):
        pytest.skip("the environment sets JAX's allocator")
    compiled = torch.compile(lambda x: x + 1, backend="dynaxla")
    compiled(cuda(10))
    free, total = torch.cuda.mem_get_info()
    assert free > 0.8 * total


def test_rank_zero_cpu_tensor_with_cuda_tensors() -> None:
    compiled = torch.compile(lambda x, s: x * s, backend="dynaxla", fullgraph=True)
    x = cuda(8)
    for value in (2.0, 3.0):
        assert_equal(compiled(x, torch.tensor(value)), x * value)


def test_rank_zero_cpu_results_stay_on_the_cpu() -> None:
    compiled = torch.compile(lambda x, s: (x * s, s + 1), backend="dynaxla", fullgraph=True)
    x, s = cuda(8), torch.tensor(2.0)
    assert_equal(compiled(x, s), (x * 2, torch.tensor(3.0)))


def test_random_follows_manual_seed() -> None:
    compiled = torch.compile(lambda x: torch.nn.functional.dropout(x, 0.5), backend="dynaxla")
    x = torch.ones(1000, device="cuda")
    torch.manual_seed(1)
    first, second = compiled(x), compiled(x)
    torch.manual_seed(1)
    assert_equal(compiled(x), first)
    assert not torch.equal(first, second)


def test_training_step() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4)).cuda()
    x = cuda(4, 3, 8, 8)
    compiled = torch.compile(net, backend="dynaxla", fullgraph=True)
    net(x).square().mean().backward()
    expected = [parameter.grad.clone() for parameter in net.parameters()]
    net.zero_grad()
    compiled(x).square().mean().backward()
    assert_equal([parameter.grad for parameter in net.parameters()], expected, tolerance=(1e-3, 1e-4))


def test_convolution_and_channels_last() -> None:
    net = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)).cuda().eval()
    compiled = torch.compile(net, backend="dynaxla", fullgraph=True)
    x = cuda(2, 3, 16, 16)
    with torch.no_grad():
        for example in (x, x.to(memory_format=torch.channels_last)):
            assert_equal(compiled(example), net(example), tolerance=(1e-4, 1e-4))


@contextlib.contextmanager
def delayed() -> Iterator[None]:
    """In this context, the device is busy with a delay kernel. Fails if the host waits for it."""
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    delay_ended = torch.cuda.Event()
    delay_ended.record()
    yield
    assert not delay_ended.query(), "the host has waited for the device"


def test_calls_do_not_wait_but_programs_do() -> None:
    """Calls with a random seed, with a copied input, and with a check."""
    x, index = torch.zeros(64, 8, device="cuda"), torch.tensor([0, 5], device="cuda")
    gaps = x[:, ::2]
    draw = torch.compile(lambda: torch.rand(100, device="cuda"), backend="dynaxla")
    copied = torch.compile(lambda x: x + 1, backend="dynaxla")
    checked = torch.compile(lambda x, index: torch.nn.functional.embedding(index, x), backend="dynaxla")
    for _ in range(3):
        draw(), copied(gaps), checked(x, index)
    dynaxla.synchronize()
    for turn in range(5):
        with delayed():
            x.fill_(turn)
            results = copied(gaps), checked(x, index), draw()
        assert torch.all(results[0] == turn + 1)
        assert torch.all(results[1] == turn)
        assert results[2].min() >= 0
        assert results[2].max() < 1


class Counted(nn.Module):
    """An embedding whose indices are checked, and a buffer that the same program writes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return self.embedding(index)


def test_failed_check_is_raised_later_and_its_program_writes_nothing() -> None:
    model = Counted().cuda()
    compiled = torch.compile(model, backend="dynaxla", fullgraph=True)
    good, bad = torch.tensor([1, 2], device="cuda"), torch.tensor([1, 10], device="cuda")
    with torch.no_grad():
        compiled(good)
        compiled(good)
        dynaxla.synchronize()
        with delayed():
            compiled(bad)
            compiled(good)
        torch.cuda.synchronize()
        with pytest.raises(IndexError):
            compiled(good)
        assert model.calls.item() == 3, "the failed call or the call that raised was counted"
        compiled(bad)
        with pytest.raises(IndexError):
            dynaxla.synchronize()
        assert model.calls.item() == 3
        compiled(good)
        assert model.calls.item() == 4


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_failed_step_changes_no_parameter(kind: type[torch.optim.Optimizer]) -> None:
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 3)).cuda()
    optimizer = kind(model.parameters(), lr=0.1)

    @dynaxla.compile_step(fullgraph=True)
    def step(index: torch.Tensor) -> torch.Tensor:
        loss = model(index).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    good, bad = torch.tensor([1, 2], device="cuda"), torch.tensor([1, 10], device="cuda")
    step(good)
    dynaxla.synchronize()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    step(bad)
    with pytest.raises(IndexError):
        dynaxla.synchronize()
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    step(good)
    assert not any(torch.equal(old, new) for old, new in zip(before[1:], list(model.parameters())[1:], strict=True))


def test_freed_result_is_not_overwritten_by_a_call_on_another_stream() -> None:
    compiled = torch.compile(lambda x: x + 1, backend="dynaxla")
    x = torch.zeros(1 << 20, device="cuda")
    compiled(x), compiled(x)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    for turn in range(10):
        out = compiled(x)
        out.record_stream(side)  # has no effect on XLA, but must be allowed
        torch.cuda._sleep(LONG // 10)
        later = out.clone()
        del out
        with torch.cuda.stream(side):
            others = [compiled(torch.full_like(x, 100.0 + turn)) for _ in range(3)]
        assert torch.all(later == 1), "another stream's call has written memory that was still being read"
        side.synchronize()
        del others


def test_threads_on_their_own_streams() -> None:
    compiled = torch.compile(lambda x: (x * 2).sin(), backend="dynaxla")
    compiled(cuda(1 << 16)), compiled(cuda(1 << 16))
    torch.cuda.synchronize()
    wrong: list[int] = []

    def work(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for turn in range(50):
                x = torch.full((1 << 16,), float(turn), device="cuda")
                out = compiled(x)
                del x
                if not torch.allclose(out, torch.full_like(out, 2.0 * turn).sin(), atol=1e-5):
                    wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_torchs_cached_memory_is_freed_for_a_program() -> None:
    free, total = torch.cuda.mem_get_info()
    size = int(0.15 * total) // 4
    compiled = torch.compile(lambda x: x + torch.zeros(size, device="cuda"), backend="dynaxla")
    x = torch.ones(1, device="cuda")
    block = torch.empty(int(free - 0.05 * total), dtype=torch.uint8, device="cuda")
    del block  # torch's allocator caches the memory
    metrics.reset()
    assert torch.all(compiled(x)[:: size // 100] == 1)
    assert metrics.snapshot().get("repeated") == 1


def test_out_of_memory_writes_nothing() -> None:
    size = torch.cuda.mem_get_info()[1] // 2
    compiled = torch.compile(lambda x: x.add_(torch.zeros(size, device="cuda").sum()) + torch.zeros(size, device="cuda"), backend="dynaxla")
    x = torch.ones(1, device="cuda")
    with pytest.raises(dynaxla.errors.OutOfMemory):
        compiled(x)
    assert x.item() == 1
    assert torch.all(torch.compile(lambda x: x + 1, backend="dynaxla")(x) == 2)
