"""Tests of torch's kernels in programs: references that kernels keep, and their exceptions."""

from __future__ import annotations

import dataclasses
import gc
import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
import pytest
import torch
from jax.errors import JaxRuntimeError
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from dynaxla.lowering.cpu import torch_kernels as lowering_kernels
from dynaxla.runtime import callbacks
from support import internals

kept: list[Any] = []


@torch.library.custom_op("dynaxla_test::keep", mutates_args=())
def keep(x: torch.Tensor, kind: str) -> torch.Tensor:
    out = x * 2
    kept.append({"tensor": x, "view": x[1:], "numpy": x.numpy(), "result": out}[kind])
    return out


@keep.register_fake
def _(x: torch.Tensor, kind: str) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("dynaxla_test::keep_and_write", mutates_args=("y",))
def keep_and_write(x: torch.Tensor, y: torch.Tensor) -> None:
    kept.append(x)
    y.add_(x)


@torch.library.custom_op("dynaxla_test::refuse", mutates_args=())
def refuse(x: torch.Tensor, number: int) -> torch.Tensor:
    raise ArithmeticError(f"caller {number}")


@refuse.register_fake
def _(x: torch.Tensor, number: int) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("dynaxla_test::refuse_negative", mutates_args=())
def refuse_negative(x: torch.Tensor) -> torch.Tensor:
    if x[0] < 0:
        raise ArithmeticError(f"caller {-int(x[0])}")
    return x.clone()


refuse_negative.register_fake(torch.empty_like)


@pytest.fixture(autouse=True)
def clear_kept_values() -> Iterator[None]:
    kept.clear()
    yield
    kept.clear()


def compile_whole(function: Any) -> Any:
    return torch.compile(function, backend="dynaxla", fullgraph=True)


def overwrite_freed_memory() -> None:
    junk = [torch.full((4096,), -7.0) for _ in range(16)]
    del junk


@pytest.mark.parametrize("kind", ["tensor", "view", "numpy", "result"])
def test_values_kept_by_a_custom_op_do_not_change(kind: str) -> None:
    compiled = compile_whole(lambda x: keep(x + 1, kind) + 1)
    for number in range(4):
        compiled(torch.full((4096,), float(number)))
        overwrite_freed_memory()
    for number, item in enumerate(kept):
        expected = float(number + 1) * (2 if kind == "result" else 1)
        assert np.array_equal(np.asarray(item), np.full(len(item), expected, np.float32)), f"the value kept in call {number} has changed"


def test_kept_tensors_have_eager_modes_strides() -> None:
    for x in (torch.arange(12.0).view(3, 4).t(), torch.arange(3.0).expand(4, 3)):
        torch._dynamo.reset()
        kept.clear()
        compile_whole(lambda x: keep(x, "tensor") + 1)(x)
        assert kept[0].stride() == x.stride()
        assert torch.equal(kept[0], x)


def test_argument_kept_by_a_custom_op_that_writes() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        keep_and_write(x * 3, y)
        return y + 1

    compiled = compile_whole(function)
    for number in range(3):
        y = torch.ones(4096)
        compiled(torch.full((4096,), float(number)), y)
        assert torch.equal(y, torch.full((4096,), 3.0 * number + 1))
        overwrite_freed_memory()
    for number, item in enumerate(kept):
        assert torch.equal(item, torch.full((4096,), 3.0 * number))


def test_exception_is_raised_in_its_own_call() -> None:
    """Threads cause different errors in the same program at the same time."""
    compiled = compile_whole(lambda x: refuse_negative(x * 1.0) + 1)
    compiled(torch.ones(8))
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    barrier = threading.Barrier(8)

    def call(number: int) -> None:
        barrier.wait()
        for _ in range(50):
            with pytest.raises(ArithmeticError) as caught:
                compiled(torch.full((8,), -float(number)))
            assert str(caught.value) == f"caller {number}"

    try:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(call, range(1, 9)))
    finally:
        sys.setswitchinterval(before)
    assert not callbacks._failures._kept


def test_one_of_two_exceptions_is_raised_and_none_is_stored() -> None:
    compiled = compile_whole(lambda x: refuse(x, 1) + refuse(x, 2))
    for _ in range(3):
        with pytest.raises(ArithmeticError, match=r"caller [12]"):
            compiled(torch.ones(3))
        assert not callbacks._failures._kept


def test_kernel_of_an_implementation_raises_its_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    from dynaxla.lowering.ops import matmul

    def run_failing(problem: Any, x: Any, y: Any, *rest: Any) -> Any:
        def write(outputs: Any, operands: Any) -> None:
            raise KeyError("an implementation's own")

        return lowering_kernels.call(write, [x, y], [((problem.rows, problem.columns), problem.out)])[0]

    implementation = next(iter(matmul.CONTRACTION.by_name.values()))
    failing = dataclasses.replace(implementation, run=run_failing, supports=lambda _: True, preferred=lambda _: True)
    internals.implementations_of(monkeypatch, matmul.CONTRACTION, {implementation.name: failing})
    compiled = compile_whole(lambda x: x @ x)
    with pytest.raises(KeyError, match="an implementation's own"):
        compiled(torch.ones(4, 4))
    assert not callbacks._failures._kept


def test_keyboard_interrupt_in_a_kernel_is_raised() -> None:
    @torch.library.custom_op("dynaxla_test::interrupted", mutates_args=())
    def interrupted(x: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt

    interrupted.register_fake(torch.empty_like)
    with pytest.raises(KeyboardInterrupt):
        compile_whole(lambda x: interrupted(x))(torch.ones(3))


def test_traceback_has_no_tensors_on_xlas_memory() -> None:
    """A debugger that inspects an exception's frames would read freed memory."""
    compiled = compile_whole(lambda x: refuse(x * 2, 5))
    with pytest.raises(ArithmeticError) as caught:
        compiled(torch.ones(3))
    trace, locals_by_file = caught.value.__traceback__, {}
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if file.endswith(("runtime/callbacks.py", "lowering/fallback.py")) or file == torch._ops.__file__:
            locals_by_file.setdefault(os.path.basename(file), []).extend(pytree.tree_leaves(dict(trace.tb_frame.f_locals)))
        trace = trace.tb_next
    assert locals_by_file.keys() == {"callbacks.py", "fallback.py", "_ops.py"}
    assert not any(isinstance(value, torch.Tensor) for values in locals_by_file.values() for value in values)


class RecordingFunctionMode(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kept.append(function)
        return function(*args, **(kwargs or {}))


class RecordingDispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kept.append(op)
        return op(*args, **(kwargs or {}))


def test_kernel_runs_without_its_callers_modes() -> None:
    def write(outputs: Any, operands: Any) -> None:
        result = operands[0].requires_grad_() @ operands[0]
        outputs[0].copy_(result)
        kept.append((result.dtype, result.requires_grad))

    x, out = torch.ones(3, 3), torch.zeros(3, 3)
    kernel = callbacks.Kernel(write, [((3, 3), (3, 1))])
    with torch.autocast("cpu", torch.bfloat16), RecordingFunctionMode(), RecordingDispatchMode():
        kernel(None, [out], x)
    assert kept == [(torch.float32, False)]
    assert torch.equal(out, x @ x)


def raised_for(failures: Any, text: str) -> BaseException:
    """Returns the exception that the caller of a program gets for XLA's message."""
    with pytest.raises((ValueError, JaxRuntimeError)) as caught, failures.call():
        raise JaxRuntimeError(text)
    return caught.value


def test_exceptions_are_stored_until_no_program_runs() -> None:
    failures, errors = callbacks._Failures(), [ValueError(str(number)) for number in range(callbacks._MAX_FAILURES + 1)]
    with failures.call():
        texts = [failures.keep(error) for error in errors]
        assert len(failures._kept) == callbacks._MAX_FAILURES
        assert raised_for(failures, f"INTERNAL: {texts[-1]}") is errors[-1]
        assert errors[-1].__suppress_context__
        assert isinstance(raised_for(failures, texts[0]), JaxRuntimeError), "the oldest exception must have been dropped"
        of_another_process = texts[1].replace(f"failure {os.getpid()}.", f"failure {os.getpid() + 1}.")
        assert isinstance(raised_for(failures, of_another_process), JaxRuntimeError)
        assert len(failures._kept) == callbacks._MAX_FAILURES - 1
    assert not failures._kept


def test_exception_with_a_running_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    internals.file_of_callbacks(monkeypatch, __file__)
    failures = callbacks._Failures()
    with pytest.raises(ValueError, match="of this function") as caught:
        raise ValueError("of this function")
    assert raised_for(failures, failures.keep(caught.value)) is caught.value


def test_no_tracers_stay_alive() -> None:
    def tracers() -> list[Any]:
        gc.collect()
        return [obj for obj in gc.get_objects() if issubclass(type(obj), jax.core.Tracer)]

    before = len(tracers())
    compiled = compile_whole(lambda x: keep(x.sin(), "tensor") @ x)
    compiled(torch.ones(3, 3))
    assert len(tracers()) == before
