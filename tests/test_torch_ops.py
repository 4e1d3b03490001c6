"""Tests of ops that the installed torch does not have: only these ops are lost."""

from __future__ import annotations

import sys

import pytest
import torch

from dynaxla.errors import UnsupportedVersion
from dynaxla.lowering.registry import Registry, _load, registry
from dynaxla.runtime import private
from dynaxla.torch_ops import MissingOp, aten, without_missing_ops
from support import internals
from support.processes.scripts import run_script


def test_ops_are_torchs_objects() -> None:
    assert aten.cumsum.default is torch.ops.aten.cumsum.default
    assert aten.add.Tensor is aten.add.Tensor
    assert aten.add(torch.ones(2), 1).tolist() == [2, 2]


def test_missing_op() -> None:
    missing = aten.an_op_of_tomorrow.default
    assert isinstance(missing, MissingOp)
    assert missing is aten.an_op_of_tomorrow.default
    assert isinstance(aten.add.an_overload_of_tomorrow, MissingOp)
    with pytest.raises(UnsupportedVersion, match=r"has no aten\.an_op_of_tomorrow\.default"):
        missing(torch.ones(2))
    assert without_missing_ops({missing: 1, aten.add.Tensor: 2}) == {aten.add.Tensor: 2}
    assert registry.find(missing) is None
    own_registry = Registry()
    own_registry.register(missing, lambda x: x)
    assert len(own_registry) == 0


SCRIPT = """
import torch
import torch._dynamo
import torch.distributed.tensor  # names most ops itself
from torch._ops import OpOverloadPacket, _OpNamespace

LOST = {"lgamma", "digamma", "prelu_backward_of_tomorrow"}
found, found_overload = _OpNamespace.__getattr__, OpOverloadPacket.__getattr__

def without_lost(self, name):
    if self.name == "aten" and name in LOST:
        raise AttributeError(name)
    return found(self, name)

def without_overload(self, name):
    if str(self) == "aten.lerp" and name == "Tensor":
        raise AttributeError(name)
    return found_overload(self, name)

for name in LOST:
    torch.ops.aten.__dict__.pop(name, None)
torch.ops.aten.lerp.__dict__.pop("Tensor", None)
_OpNamespace.__getattr__, OpOverloadPacket.__getattr__ = without_lost, without_overload
from dynaxla.torch_ops import aten
aten.lgamma.default, aten.digamma.default, aten.lerp.Tensor  # as they are at import time
import dynaxla
from dynaxla.lowering.registry import registry

count = sum(op.namespace in ("aten", "prims") for op in registry.ops())
_OpNamespace.__getattr__, OpOverloadPacket.__getattr__ = found, found_overload
model = torch.nn.Sequential(torch.nn.Conv1d(4, 4, 3), torch.nn.BatchNorm1d(4), torch.nn.GELU(), torch.nn.Flatten(), torch.nn.Linear(24, 2))
compiled = torch.compile(model, backend="dynaxla", fullgraph=True)
x = torch.randn(2, 4, 8)
torch.testing.assert_close(compiled(x), model(x))
compiled(x).sum().backward()
lost = torch.compile(lambda x, y: torch.lgamma(x) + torch.lerp(x, y, y), backend="dynaxla", fullgraph=True)
y = torch.rand(3) + 1
torch.testing.assert_close(lost(y, y + 1), torch.lgamma(y) + torch.lerp(y, y + 1, y + 1))
print(count)
"""


def test_without_some_ops_only_these_have_no_lowering() -> None:
    """torch's kernels compute them, in the same program."""
    complete = sum(op.namespace in ("aten", "prims") for op in registry.ops())
    reduced = int(run_script(SCRIPT))
    # The three ops, and ops with the same lowerings: prims.lgamma, prims.digamma, and foreach ops.
    assert 3 <= complete - reduced <= 8


# Ops that a supported release of torch does not have: removed in 2.14, or new in 2.12. So a misspelled name fails the test.
ABSENT_SOMEWHERE = {"aten.cholesky.default", "aten._upsample_lanczos2d_aa.default", "aten._upsample_lanczos2d_aa_backward.default"}

MISSING = """
import importlib, pkgutil
import dynaxla
from dynaxla.lowering.registry import registry
from dynaxla.torch_ops import MissingOp, aten, prims

registry.fill()
for package in ("buffers", "capture", "device", "interop", "lowering", "sharding", "training"):
    for module in pkgutil.walk_packages([f"{dynaxla.__path__[0]}/{package}"], f"dynaxla.{package}."):
        importlib.import_module(module.name)
overloads = [value for namespace in (aten, prims) for op in vars(namespace).values() for value in getattr(op, "__dict__", {}).values()]
assert len(overloads) > 1000
print(*(op.name for op in overloads if isinstance(op, MissingOp)))
"""


def test_only_ops_that_some_release_lacks_are_missing() -> None:
    """Foreach ops are excluded: dynaxla names all combinations of an op and an overload, of which torch has only some."""
    missing = {name for name in run_script(MISSING).split() if not name.startswith("aten._foreach_")}
    assert missing <= ABSENT_SOMEWHERE


def test_failed_load_of_lowerings_is_undone_and_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    working = []

    def load() -> None:
        own_registry.register(torch.ops.aten.sin.default, lambda x: x, by="dynaxla.a_module_that_does_not_load")
        if not working:
            raise ImportError("a module of tomorrow")
        monkeypatch.setitem(sys.modules, "dynaxla.a_module_that_does_not_load", sys)

    own_registry = Registry(load)
    for _ in range(2):
        with pytest.raises(ImportError, match="a module of tomorrow"):
            own_registry.fill()
    working.append(True)
    assert len(own_registry) == 1


def test_newer_releases_are_logged_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    internals.tested_releases(monkeypatch, {"torch": ("1.0", "1.9"), "jax": ("0.1", "99.0")})
    try:
        for size in (2, 3):
            torch._dynamo.reset()
            torch.compile(lambda x: x + 1, backend="dynaxla")(torch.ones(size))
    finally:
        private.warn_of_newer_releases.cache_clear()
    (message,) = [record.getMessage() for record in caplog.records if "not tested" in record.getMessage()]
    assert message.startswith(f"dynaxla is not tested with torch {torch.__version__} yet")
    assert "dynaxla doctor" in message


@pytest.mark.parametrize("is_newer", [False, True])
def test_error_with_newer_releases_names_the_tested_ones(monkeypatch: pytest.MonkeyPatch, is_newer: bool) -> None:
    def load() -> None:
        raise AttributeError("gone")

    internals.failing_load_of_lowerings(monkeypatch, load)
    known = {"torch": ("2.11", "2.11" if is_newer else "99.0"), "jax": ("0.10", "99.0")}
    internals.tested_releases(monkeypatch, known)
    if is_newer and private.release(torch.__version__) == (2, 11):
        pytest.skip("this torch is the oldest supported one")
    with pytest.raises(UnsupportedVersion if is_newer else AttributeError, match="gone") as raised:
        _load()
    if is_newer:
        assert "torch 2.11 to 2.11 and jax 0.10 to 99.0" in str(raised.value)
