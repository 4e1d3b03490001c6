"""Tests of the order in which a CUDA device executes torch's and XLA's work, on a simulated device (simulated_gpu.py)."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from dynaxla.buffers.arguments import Arguments, ExpectedInput
from dynaxla.buffers.native import GraphDevice, NativeBinding
from dynaxla.engine.executable import Executable
from dynaxla.errors import OutOfMemory, UnsupportedOp
from dynaxla.runtime import late_checks, streams
from dynaxla.runtime.layout import Layout
from dynaxla.runtime.programs import XlaProgram
from support.fakes import simulated_gpu
from support.fakes.simulated_gpu import CUDA, Device, Stream, install

CHECKS = [(IndexError, "out of range"), (ValueError, "not positive")]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return install(monkeypatch)


def executable(
    device: Device,
    compute: Callable[..., Sequence[torch.Tensor]],
    inputs: Sequence[torch.Tensor] = (),
    shapes: Sequence[tuple[int, ...]] = ((4,),),
    *,
    draws: bool = False,
    checks: Sequence[tuple[type[Exception], str]] = (),
    waits: bool = False,
    acts: bool = False,
) -> Executable:
    """Returns a program with these inputs. Its results are float64 arrays of these shapes; with checks, the last one is their code."""
    parameters = [ExpectedInput(tuple(x.shape), x.stride(), x.dtype, Layout.of(tuple(x.shape), x.stride()), False) for x in inputs]
    arguments = Arguments(parameters, torch.device("cpu"), device)
    graph_device = GraphDevice(CUDA, device)
    binding = NativeBinding(arguments, list(range(len(inputs))), lambda results, _: list(results), graph_device, draws, waits)
    return Executable("a program", XlaProgram(device.program(compute, *shapes), str), binding, checks, acts)


def checked(device: Device, codes: Sequence[int], **options: Any) -> Executable:
    """Returns a program whose calls report these check codes, one after another."""
    codes_left = list(codes)
    return executable(device, lambda seed: [torch.tensor(codes_left.pop(0), dtype=torch.float64)], shapes=[()], checks=CHECKS, **options)


ORDERS = {
    "XLA first": lambda device: [device.compute, *device.external, *device.streams.values()],
    "torch first": lambda device: [device.default, *device.streams.values()],
}


@pytest.fixture(params=ORDERS.values(), ids=ORDERS.keys())
def order(request: pytest.FixtureRequest, device: Device) -> Callable[[], Sequence[Stream]]:
    return lambda: request.param(device)


# Before a program


def test_program_runs_after_torchs_queued_writes(device: Device, order: Callable[[], Sequence[Stream]]) -> None:
    x = torch.zeros(4)
    program = executable(device, lambda _, x: [x * 2], [x])
    for turn in range(4):  # imported for one call, then cached
        device.queue(lambda turn=turn: x.fill_(turn))
        (result,) = program([x])
        device.go(order())
        assert result.tolist() == [2 * turn] * 4
    assert device.host_waits == []


def test_program_reads_torchs_copy_of_an_input_with_gaps(device: Device) -> None:
    gaps = torch.arange(8.0)[::2]
    program = executable(device, lambda _, x: [x], [gaps])
    (result,) = program([gaps])
    device.go()
    assert result.tolist() == [0, 2, 4, 6]


def test_program_without_inputs_runs_after_torchs_queued_work(device: Device) -> None:
    written: list[str] = []
    device.queue(lambda: written.append("torch"))
    executable(device, lambda _: [torch.full((4,), len(written))])([])
    device.go()
    assert written == ["torch"]
    (result,) = executable(device, lambda _: [torch.full((4,), len(written))])([])
    device.queue(lambda: written.append("later"))
    device.go()
    assert result.tolist() == [1] * 4


def test_seed_is_written_before_the_program_runs(device: Device) -> None:
    program = executable(device, lambda seed: [seed[:1].expand(4)], draws=True)
    results = [program([])[0] for _ in range(3)]
    device.go()
    assert [int(result[0]) for result in results] == [1, 2, 3]
    assert device.host_waits == []


def test_program_is_ordered_with_the_current_stream(device: Device, order: Callable[[], Sequence[Stream]]) -> None:
    x = torch.zeros(4)
    program = executable(device, lambda _, x: [x + 1], [x])
    side = Stream(50)
    read: list[float] = []
    for turn in range(3):
        with device.stream(side):
            device.queue(lambda turn=turn: x.fill_(turn))
            (result,) = program([x])
            device.queue(lambda result=result: read.append(float(result[0])))
        device.go(order())
    assert read == [1, 2, 3]


# After a program


@pytest.mark.parametrize("shapes", [[(4,)], [()]], ids=["a result", "only a placeholder"])
def test_torchs_later_writes_run_after_the_program(device: Device, shapes: list[tuple[int, ...]]) -> None:
    x, read = torch.zeros(4), []

    def compute(_: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
        read.append(x.tolist())
        return [torch.zeros(shape) for shape in shapes]

    program = executable(device, compute, [x], shapes)
    for turn in range(3):
        device.queue(lambda turn=turn: x.fill_(turn))
        program([x])
        device.queue(lambda: x.fill_(-1))
        device.go([device.default, *device.streams.values()])
    assert read == [[turn] * 4 for turn in range(3)]


def test_torch_reads_results_after_the_program(device: Device, order: Callable[[], Sequence[Stream]]) -> None:
    program = executable(device, lambda _: [torch.ones(4), torch.full((2,), 2.0)], shapes=[(4,), (2,)])
    first, second = program([])
    read: list[Any] = []
    device.queue(lambda: read.extend([first.tolist(), second.tolist()]))
    device.go(order())
    assert read == [[1] * 4, [2] * 2]


@pytest.mark.parametrize("elsewhere", [False, True], ids=["the same stream", "another stream"])
def test_memory_of_a_freed_result_is_reused_after_torch_has_read_it(device: Device, elsewhere: bool) -> None:
    numbers = [1.0, 2.0]
    program = executable(device, lambda _: [torch.full((4,), numbers.pop(0))])
    (result,) = program([])
    read: list[Any] = []
    device.queue(lambda: read.append(result.tolist()))
    device.free.append(result)
    with device.stream(Stream(50)) if elsewhere else contextlib.nullcontext():
        (other,) = program([])
    assert other is result, "XLA's allocator takes the same memory"
    device.go([device.compute, *device.external, *reversed(device.streams.values())])
    assert (read, other.tolist()) == ([[1] * 4], [2] * 4)
    assert device.host_waits == []


def test_destroyed_foreign_stream_is_not_waited_for(device: Device) -> None:
    foreign = Stream(70, is_torchs=False)
    program = executable(device, lambda _: [torch.zeros(4)])
    with device.stream(foreign):
        program([])
    device.go()
    del device.streams[70]
    foreign.mark = None  # its owner has destroyed it
    program([])
    device.go()


# Checks


def test_failed_check_is_raised_by_a_later_call(device: Device) -> None:
    program = checked(device, [0, 2, 2])
    program([])
    program([])
    assert (device.executions, device.host_waits) == (2, []), "the device has not executed the first call yet"
    device.go()
    with pytest.raises(IndexError, match="out of range") as raised:
        program([])
    assert "An earlier call of a program" in raised.value.__notes__[0]
    assert (device.executions, device.host_waits) == (2, []), "the error is raised before the program runs"
    program([])
    device.go()
    assert device.executions == 3, "a failure is raised once"


def test_failed_check_is_raised_by_the_next_call_of_any_program(device: Device) -> None:
    checked(device, [1])([])
    device.go()
    other = executable(device, lambda _: [torch.zeros(4)])
    with pytest.raises(ValueError, match="not positive"):
        other([])
    other([])


def test_failures_are_raised_in_order(device: Device) -> None:
    program = checked(device, [2, 1, 0, 2])
    for _ in range(4):
        program([])
    device.go()
    with pytest.raises(ValueError, match="not positive"):
        program([])
    with pytest.raises(IndexError, match="out of range"):
        late_checks.finish()
    late_checks.finish()


def test_code_is_not_read_before_its_event(device: Device) -> None:
    checked(device, [0])([])
    while any(stream.step() for stream in (device.compute, *device.external)) or len(device.default.work) > 2:
        if device.default.work and len(device.default.work) > 2:
            device.default.step()  # all work except the copy of the code and the event after it
    late_checks.raise_if_failed(CUDA)
    device.go()
    with pytest.raises(IndexError):
        late_checks.raise_if_failed(CUDA)


def test_finish_waits_for_pending_checks(device: Device) -> None:
    checked(device, [0])([])
    with pytest.raises(IndexError, match="out of range"):
        late_checks.finish()
    assert device.host_waits == ["event"]


def test_unraised_failures_are_logged_at_exit(device: Device, caplog: pytest.LogCaptureFixture) -> None:
    program = checked(device, [0, 2, 1])
    for _ in range(3):
        program([])
    with caplog.at_level(logging.ERROR, "dynaxla"):
        late_checks.of(CUDA).at_exit()
    assert [record.getMessage().splitlines()[0] for record in caplog.records] == ["IndexError: out of range", "ValueError: not positive"]


def test_error_of_the_device_at_exit_is_logged(device: Device, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("CUDA error")

    checked(device, [0])([])
    simulated_gpu.on_synchronization_of_checks(monkeypatch, fail)
    late_checks.of(CUDA).at_exit()
    assert "CUDA error" in caplog.text


def test_number_of_pending_codes_is_limited(device: Device) -> None:
    program = checked(device, [2] * late_checks.MAX_IN_FLIGHT + [2, 0] + [2] * 20)
    for _ in range(late_checks.MAX_IN_FLIGHT):
        program([])
    assert device.host_waits == []
    program([])
    assert device.host_waits == ["event"], "the call waits for the first code"
    program([])
    for _ in range(late_checks.MAX_IN_FLIGHT - 2):
        program([])
    with pytest.raises(IndexError):
        program([])
    late_checks.finish()


def test_failed_copy_of_a_code_takes_no_slot(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    reports = late_checks.CudaReports(CUDA)
    free = list(reports._free)

    def fail(_: Any) -> Stream:
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(torch.cuda, "current_stream", fail)
    with pytest.raises(RuntimeError, match="CUDA error"):
        reports.add(torch.tensor(0), CHECKS, "a program")
    assert reports._free == free


def test_waiting_program_raises_in_its_own_call(device: Device) -> None:
    program = executable(device, lambda _: [torch.tensor(0.0)], shapes=[()], checks=CHECKS, waits=True)

    class Code:
        def __int__(self) -> int:
            device.go()
            return 0

    program.binding.export = lambda results, tensors: [Code()]
    with pytest.raises(IndexError, match="out of range"):
        program([])


# Memory


def test_call_without_memory_is_repeated_after_torch_frees_its_cache(device: Device) -> None:
    x = torch.zeros(4)
    program = executable(device, lambda seed, x: [x + seed[0]], [x], draws=True)
    device.queue(lambda: x.fill_(5))
    device.missing = 1
    (result,) = program([x])
    device.go()
    assert result.tolist() == [6] * 4
    assert (device.executions, device.given_back, device.drawn) == (2, 1, 1), "the call is repeated with the same seed"


def test_call_fails_if_memory_is_missing_after_torch_frees_its_cache(device: Device) -> None:
    program = executable(device, lambda _: [torch.zeros(4)])
    device.missing = 2
    with pytest.raises(OutOfMemory):
        program([])
    assert (device.executions, device.given_back) == (2, 1)
    assert device.host_waits == ["device"] * 2, "a failed call does not read torch's memory after it raises"
    program([])


def test_call_with_side_effects_is_not_repeated(device: Device) -> None:
    program = executable(device, lambda _: [torch.zeros(4)], acts=True)
    device.missing = 1
    with pytest.raises(OutOfMemory):
        program([])
    assert device.executions == 1


# Threads


def test_two_threads_on_their_own_streams(device: Device) -> None:
    calls, failed, wrong = 40, [], []

    def work(number: int) -> None:
        x = torch.zeros(4)
        double_program = executable(device, lambda _, x: [x * 2], [x])
        check = checked(device, [2, 2, 0, 2] * (calls // 4))
        with device.stream(Stream(50 + number)):
            for turn in range(calls):
                try:
                    check([])
                    device.queue(lambda turn=turn: x.fill_(turn))
                    (result,) = double_program([x])
                    with device.lock:
                        device.go()
                except IndexError:
                    failed.append(number)
                    continue
                if result.tolist() != [2 * turn] * 4:
                    wrong.append((number, turn, result.tolist()))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    device.go()
    with contextlib.suppress(IndexError):
        late_checks.finish()
    assert wrong == []
    assert failed, "no failed check was raised"


def test_call_is_not_repeated_if_torch_caches_no_memory(device: Device) -> None:
    device.cached_bytes, device.missing = 0, 1
    with pytest.raises(OutOfMemory):
        executable(device, lambda seed: [torch.ones(4)])([])
    assert (device.executions, device.given_back) == (1, 0)


def test_call_during_cuda_graph_capture_is_refused(device: Device) -> None:
    streams.check_not_captured()
    device.is_capturing = True
    with pytest.raises(UnsupportedOp, match=r"outside torch\.cuda\.graph"):
        streams.check_not_captured()
