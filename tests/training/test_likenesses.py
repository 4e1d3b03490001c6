"""A tensor like another one has all that ops look at: shape, strides, dtype, device, and the marks of conjugates and negatives."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from dynaxla.training.likenesses import bare, fake_like, hollow_like, op_before
from dynaxla.training.traces import geometry

pytestmark = pytest.mark.quick

C = torch.tensor([[1 + 2j, 3 - 4j]])
TENSORS = {
    "strided": torch.arange(12.0).view(3, 4)[1:, ::2],
    "transposed": torch.arange(6).view(2, 3).t(),
    "conjugate": C.conj(),
    "negative": C.conj().imag,
    "requires a gradient": torch.ones(2, requires_grad=True),
}


@pytest.mark.parametrize("name", TENSORS)
def test_bare(name: str) -> None:
    """On the same memory, without a history or a version that autograd would look at."""
    tensor = TENSORS[name]
    other = bare(tensor)
    assert geometry(other) == geometry(tensor)
    assert torch.equal(other, tensor)
    assert not other.requires_grad
    assert other.untyped_storage()._cdata == tensor.untyped_storage()._cdata
    before = tensor._version
    with torch.no_grad():
        other.mul_(1)
    assert tensor._version == before


@pytest.mark.parametrize("name", TENSORS)
def test_without_values(name: str) -> None:
    tensor = TENSORS[name]
    empty = hollow_like(tensor)
    assert (empty.shape, empty.stride(), empty.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
    with FakeTensorMode():
        fake = fake_like(tensor)
    assert isinstance(fake, FakeTensor)
    # The offset says where in a storage, and a fake has a storage of its own.
    shape, stride, _, *others = geometry(tensor)
    assert geometry(fake) == (shape, stride, 0, *others)


def test_before_an_op_changed_what_a_tensor_reads() -> None:
    tensor = torch.arange(6.0).view(2, 3)[:, 1:]
    before, values = geometry(tensor), tensor.clone()
    tensor.t_()
    assert torch.equal(op_before(tensor, before), values)
    assert tensor.shape == (2, 2)
