"""Tests of buffers/arguments.py: a call's tensors as arrays are never stale, never misread, and copied only if necessary."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import jax
import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from dynaxla.buffers.arguments import Arguments, ExpectedInput
from dynaxla.capture.graph import AtenGraph
from dynaxla.config import Options
from dynaxla.engine.unit import CompilationUnit
from dynaxla.engine.xla import CompiledGraph
from dynaxla.errors import DynaxlaError, UnsupportedTensor
from dynaxla.observe import metrics
from dynaxla.runtime import clients
from dynaxla.runtime.layout import Layout

pytestmark = pytest.mark.quick


def arguments(*tensors: torch.Tensor, static: bool = False) -> Arguments:
    """Returns the arguments of a program for tensors like these."""
    parameters = [
        ExpectedInput(tuple(tensor.shape), tensor.stride(), tensor.dtype, Layout.of(tuple(tensor.shape), tensor.stride()), static)
        for tensor in tensors
    ]
    return Arguments(parameters, torch.device("cpu"), clients.cpu_device())


def pointers(arrays: list[jax.Array]) -> list[int]:
    return [array.unsafe_buffer_pointer() for array in arrays]


@pytest.fixture
def counted() -> None:
    metrics.reset()


def counts() -> dict[str, int]:
    return {name: count for name, count in metrics.snapshot().items() if name in ("aliases", "imports", "input_copies")}


@pytest.mark.usefixtures("counted")
def test_tensor_at_the_same_address_is_imported_once() -> None:
    parameter, x = torch.ones(4, 16), torch.ones(16)
    call_arguments = arguments(parameter, static=True)
    for value in (1, 2, 3):
        parameter.fill_(value)
        (array,) = call_arguments.arrays([parameter])
        assert pointers([array]) == [parameter.data_ptr()]
        assert np.asarray(array).sum() == 64 * value, "an update in place is visible"
    assert counts() == {"aliases": 1}
    call_arguments = arguments(x)
    for expected in ({"imports": 1}, {"imports": 1, "aliases": 1}, {"imports": 1, "aliases": 1}):
        metrics.reset() if "aliases" not in expected else None
        call_arguments.arrays([x])
        assert counts() == expected, "an input is aliased when it has the same address for the second time"


def test_each_tensor_has_its_own_array() -> None:
    one, other, third = torch.zeros(16), torch.ones(16), torch.full((16,), 2.0)
    call_arguments = arguments(one, other, static=True)
    for tensors in ([one, other], [one, third], [other, one], [one, other], [one, one]):
        assert pointers(call_arguments.arrays(tensors)) == [tensor.data_ptr() for tensor in tensors]


def test_tensors_are_not_kept_alive() -> None:
    x = torch.ones(16)
    call_arguments = arguments(x, static=True)
    call_arguments.arrays([x])
    gone = weakref.ref(x.untyped_storage())
    del x
    gc.collect()
    assert gone() is None


COPIED = {
    "misaligned": (torch.zeros(16), lambda: torch.zeros(17)[1:]),
    "transposed": (torch.zeros(4, 4), lambda: torch.zeros(4, 4).t()),
    "gapped": (torch.zeros(4, 16)[:, ::2], lambda: torch.zeros(4, 16)[:, ::2]),
    "conjugate": (torch.zeros(4, dtype=torch.complex64), lambda: torch.zeros(4, dtype=torch.complex64).conj()),
    "expanded": (torch.zeros(4, 4), lambda: torch.zeros(4, 1).expand(4, 4)),
}


@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize("name", COPIED)
def test_copies_have_the_values_of_the_call(name: str) -> None:
    like, make = COPIED[name]
    call_arguments, tensor = arguments(like, static=True), make()
    for value in (1, 2, 3):
        (tensor[:, :1] if name.startswith("expanded") else tensor).fill_(complex(0, value) if tensor.is_complex() else value)
        (array,) = call_arguments.arrays([tensor])
        assert np.array_equal(np.asarray(array), tensor.resolve_conj().numpy())
    assert counts()["input_copies"] == 3
    plain = like.clone() + 5
    assert np.array_equal(np.asarray(call_arguments.arrays([plain])[0]), plain.numpy()), "no copy is cached"


def test_arrays_are_in_memory_order_without_repeated_elements() -> None:
    base = torch.arange(64.0).view(4, 16)
    transposed, expanded = base.t(), base[:, None].expand(4, 3, 16)
    call_arguments = arguments(transposed, expanded)
    for _ in range(3):
        arrays = call_arguments.arrays([transposed, expanded])
        assert pointers(arrays) == [base.data_ptr()] * 2
        assert [array.shape for array in arrays] == [(4, 16), (4, 1, 16)]


def test_tensors_that_would_be_misread_are_refused() -> None:
    x, expanded = torch.zeros(2, 3), torch.zeros(2, 1).expand(2, 3)
    for like, tensor in ((x, torch.zeros(3, 2)), (x, x.double()), (x, x[0]), (expanded, x)):
        with pytest.raises(DynaxlaError, match="was called with"):
            arguments(like).arrays([tensor])
    with FakeTensorMode() as mode, pytest.raises(UnsupportedTensor, match="fake"):
        arguments(x).arrays([mode.from_tensor(x)])


def test_input_with_other_strides_than_traced() -> None:
    """torch.compile's guards prevent this. A program that is called by other means must not misread the memory, either."""
    module = make_fx(lambda x: [x.view(-1), x * 2], tracing_mode="fake")(torch.randn(2, 3))
    program = CompiledGraph(CompilationUnit(AtenGraph("other_strides", module), Options()))
    expanded = make_fx(lambda x: [x * 2], tracing_mode="fake")(torch.randn(2, 1).expand(2, 3))
    compiled_for_expanded = CompiledGraph(CompilationUnit(AtenGraph("expanded", expanded), Options()))
    assert compiled_for_expanded([torch.ones(2, 1).expand(2, 3)])[0].sum() == 12
    with pytest.raises(DynaxlaError, match=r"strides \[1, 0\] was called with .* strides \[3, 1\]"):
        compiled_for_expanded([torch.randn(2, 3)])
    for x in (torch.randn(2, 3), torch.randn(3, 2).t(), torch.randn(2, 6)[:, ::2], torch.randn(1, 3).expand(2, 3)):
        flat, twice = program([x])
        assert torch.equal(flat, x.reshape(-1))
        assert torch.equal(twice, x * 2)


@pytest.mark.usefixtures("counted")
def test_copied_input_does_not_affect_aliases() -> None:
    """A scalar is copied at each call. The parameter next to it is not imported again."""
    parameter, number = torch.ones(16), torch.zeros((), dtype=torch.complex64)
    call_arguments = arguments(parameter, number, static=True)
    for value in (1, 2, 3):
        parameter.fill_(value)
        aliased, copied = call_arguments.arrays([parameter, torch.tensor(value * 1j).conj()])
        assert pointers([aliased]) == [parameter.data_ptr()]
        assert np.asarray(copied) == -value * 1j
    assert counts() == {"aliases": 1, "imports": 3, "input_copies": 3}


def test_only_scalars_are_copied_from_another_device() -> None:
    parameter = ExpectedInput((3,), (1,), torch.float32, Layout.of((3,), (1,)), False)
    call_arguments = Arguments([parameter], torch.device("meta"), clients.cpu_device())
    with pytest.raises(DynaxlaError, match="compiled for meta was called with a tensor on cpu"):
        call_arguments.arrays([torch.ones(3)])


def test_unpacked_inputs_are_shared_in_their_layout() -> None:
    """The array has the tensor's shape, and shares its memory. A tensor with other strides, or misaligned, is copied."""
    layout = Layout.ordered((4, 16), (1, 0))
    parameter = ExpectedInput((4, 16), layout.strides, torch.float32, layout, static=True, is_unpacked=True)
    call_arguments = Arguments([parameter], torch.device("cpu"), clients.cpu_device())
    values = torch.arange(64.0).view(4, 16)
    laid_out = values.t().contiguous().t()
    misaligned = torch.empty(65)[1:].view(16, 4).t().copy_(values)
    for tensor, copies in ((laid_out, 0), (values, 1), (misaligned, 1)):
        metrics.reset()
        (array,) = call_arguments.arrays([tensor])
        assert np.array_equal(np.asarray(array), values.numpy())
        assert array.format.layout.major_to_minor == (1, 0)
        assert counts().get("input_copies", 0) == copies
        assert (pointers([array]) == [tensor.data_ptr()]) == (not copies)


def test_modes_do_not_see_the_ops_of_aliases() -> None:
    """AOTAutograd has a mode at each first call, and handling an op in it takes longer than the op."""
    ops = []

    class OpRecorder(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            ops.append(func)
            return func(*args, **(kwargs or {}))

    tensors = [torch.ones(4, 16), torch.ones(16, 4).t()]
    with OpRecorder():
        arrays = arguments(*tensors, static=True).arrays(tensors)
        assert ops == []
        torch.ones(1)
    assert len(ops) == 1, "the mode is active again"
    assert [array.shape for array in arrays] == [(4, 16), (16, 4)]
