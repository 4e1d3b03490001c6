"""Tests of compiled programs: their calls, their entries in the cache directory, and their fingerprints."""

from __future__ import annotations

import gc
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from jax import numpy as jnp
from torch import nn

from dynaxla.lowering.cpu import onednn_support
from dynaxla.observe import metrics
from dynaxla.runtime import clients, heap, private, programs
from dynaxla.runtime.store import Store
from support import internals
from support.forced_implementations import backend_with
from support.processes.scripts import run_script


def lowered(function: Callable[..., Any], *shapes: tuple[int, ...]) -> jax.stages.Lowered:
    with jax.default_device(clients.cpu_device()):
        return jax.jit(function, keep_unused=True).lower(*(jax.ShapeDtypeStruct(shape, "float32") for shape in shapes))


@pytest.mark.usefixtures("way")
def test_call_returns_all_results_with_unused_inputs() -> None:
    device = clients.cpu_device()
    program = programs.compile_lowered(lowered(lambda x, y: (x + 1, {"a": x * 2}), (3,), (2,)), device, {})
    arrays = [jax.device_put(np.arange(size, dtype=np.float32), device) for size in (3, 2)]
    assert [result.tolist() for result in program.call(arrays)] == [[1, 2, 3], [0, 2, 4]]
    assert "HloModule" in program.text()


def test_results_of_later_calls_have_the_properties_of_the_first() -> None:
    """They are ordinary arrays of JAX. Each call's results have their own memory, and are not kept alive."""
    device = clients.cpu_device()
    dtypes = [np.bool_, np.int8, np.int64, np.float32, np.float64, np.complex64, jnp.bfloat16]

    def function(x: jax.Array) -> list[jax.Array]:
        return [*(x.astype(dtype) for dtype in dtypes), x.sum(), x[:0], x.reshape(1, 3, 1)]

    with jax.enable_x64(True):
        program = programs.compile_lowered(lowered(function, (3,)), device, {})
    calls = [program.call([jax.device_put(np.full(3, number, np.float32), device)]) for number in range(3)]
    assert private.Fast.result_handler is not None, "this test is for the fast path"

    def properties(array: jax.Array) -> tuple[Any, ...]:
        return type(array), array.aval, array.weak_type, array.sharding, array.committed, array.devices(), array.format

    for number, results in enumerate(calls):
        assert list(map(properties, results)) == list(map(properties, calls[0]))
        assert [np.asarray(array).tolist() for array in results[:4]] == [[bool(number)] * 3, *[[number] * 3] * 3]
        assert (results[7].item(), results[8].shape, np.asarray(results[6] + results[6]).tolist()) == (3 * number, (0,), [2 * number] * 3)
    reference = weakref.ref(calls[0][3])
    del calls, results
    assert reference() is None


@pytest.mark.parametrize("changed", ["nothing", "no program", "a short file", "the options", "the program", "the number of threads"])
def test_only_the_same_program_is_loaded_from_the_store(changed: str, tmp_path: Path) -> None:
    store, before = Store(tmp_path), torch.get_num_threads()
    programs.compile_lowered(lowered(lambda x: x + 1, (3,)), clients.cpu_device(), {}, store)
    (key,) = store
    if changed == "no program":
        store.put(key, b"no program at all")
    elif changed == "a short file":
        (tmp_path / key).write_bytes((tmp_path / key).read_bytes()[:-7])
    elif changed == "the number of threads":
        torch.set_num_threads(before + 1)
    number = 2.0 if changed == "the program" else 1.0
    options = {"xla_cpu_prefer_vector_width": 128} if changed == "the options" else {}
    loads = metrics.snapshot().get("loads", 0)
    try:
        device = clients.cpu_device()
        program = programs.compile_lowered(lowered(lambda x: x + number, (3,)), device, options, store)
        array = jax.device_put(np.zeros(3, np.float32), device)
        assert program.call([array])[0].tolist() == [number] * 3
    finally:
        torch.set_num_threads(before)
    assert metrics.snapshot().get("loads", 0) - loads == (changed == "nothing")
    assert len(list(store)) == (1 if changed in ("nothing", "no program", "a short file") else 2)


def test_fingerprint_depends_only_on_the_computation() -> None:
    def first(x: jax.Array) -> jax.Array:
        return jnp.sin(x) * 2

    def elsewhere(x: jax.Array) -> jax.Array:
        sine = jnp.sin(x)
        return sine * 2

    elsewhere.__name__ = first.__name__
    fingerprint = programs.fingerprint(lowered(first, (3,)))
    assert programs.fingerprint(lowered(elsewhere, (3,))) == fingerprint
    assert programs.fingerprint(lowered(first, (4,))) != fingerprint
    assert programs.fingerprint(lowered(lambda x: jnp.sin(x) * 3, (3,))) != fingerprint
    with private.force_public():
        assert programs.fingerprint(lowered(first, (3,))) != programs.fingerprint(lowered(first, (4,)))


def test_large_programs_keep_freed_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = internals.kept_memory(monkeypatch)
    for elements, keep, expected in ((8, True, False), (heap.LARGE_BYTES, True, True), (heap.LARGE_BYTES, False, False)):
        calls.clear()
        program = programs.compile_lowered(lowered(jnp.sin, (elements,)), clients.cpu_device(), {}, keep_heap=keep)
        assert program.is_large == bool(calls) == expected


SCRIPT = """
import torch
from dynaxla.observe import metrics
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16), torch.nn.Softmax(-1))
x = torch.randn(4, 8)
with torch.no_grad():
    torch.testing.assert_close(torch.compile(net, backend="dynaxla")(x), net(x))
print(metrics.snapshot().get("loads", 0), metrics.snapshot()["compile"])
"""


def test_second_process_compiles_nothing(tmp_path: Path) -> None:
    assert run_script(SCRIPT, DYNAXLA_CACHE=str(tmp_path)) == "0 1\n"
    assert run_script(SCRIPT, DYNAXLA_CACHE=str(tmp_path)) == "1 1\n"


def test_evicted_program_is_loaded_from_the_store(tmp_path: Path) -> None:
    store = str(tmp_path)
    x = torch.randn(3, 4)
    for loads in (0, 1):
        torch._dynamo.reset()
        gc.collect()
        before = metrics.snapshot().get("loads", 0)
        torch.testing.assert_close(torch.compile(lambda x: x.sinh() + 1, backend="dynaxla", options={"cache": store})(x), x.sinh() + 1)
        assert metrics.snapshot().get("loads", 0) - before == loads


@pytest.mark.parametrize("source", ["by an option", "by the environment"])
def test_no_program_is_stored_with_xla_dumps(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA writes complete dumps only for programs that it compiles, not for loaded programs."""
    store, options = Store(tmp_path / "cache"), {}
    if source == "by an option":
        options = {"xla_dump_to": str(tmp_path / "dump")}
    else:  # XLA has already read the variable
        monkeypatch.setenv("XLA_FLAGS", f"--xla_dump_to={tmp_path / 'dump'}")
    for _ in range(2):
        programs.compile_lowered(lowered(jnp.cosh, (3,)), clients.cpu_device(), options, store)
        assert not list(store)
        if options:
            assert list((tmp_path / "dump").glob("*.before_optimizations.txt"))
            shutil.rmtree(tmp_path / "dump")


def test_programs_with_kernels_are_not_stored(tmp_path: Path) -> None:
    """Another process could not call back into this process."""
    with torch.library._scoped_library("dynaxla_store", "FRAGMENT") as library:
        library.define("halved(Tensor x) -> Tensor")
        library.impl("halved", lambda x: x / 2, "CPU")
        library.impl("halved", torch.empty_like, "Meta")
        compiled = torch.compile(lambda x: torch.ops.dynaxla_store.halved(x) + 1, backend="dynaxla", options={"cache": str(tmp_path)})
        torch.testing.assert_close(compiled(torch.ones(3)), torch.full((3,), 1.5))
    assert not list(Store(tmp_path / "programs"))


@pytest.mark.skipif(not onednn_support.is_available(), reason="this XLA:CPU has no oneDNN")
def test_programs_with_onednn_are_not_stored(tmp_path: Path) -> None:
    """jaxlib cannot serialize these programs, and reports no error."""
    net = nn.Linear(256, 256)
    x = torch.randn(256, 256)
    backend, options = backend_with({"contraction": "onednn"}), {"cache": str(tmp_path)}
    for _ in range(2):
        torch._dynamo.reset()
        with torch.no_grad():
            torch.testing.assert_close(torch.compile(net, backend=backend, options=options)(x), net(x))
        assert not list(Store(tmp_path / "programs"))
