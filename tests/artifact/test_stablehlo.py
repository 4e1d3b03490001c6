"""Tests of the custom calls that an exported program may contain."""

from __future__ import annotations

import importlib

import jax
import numpy as np
import pytest
from jax import export

from dynaxla.artifact.manifest import ArraySpec, DamagedModelError, Manifest
from dynaxla.artifact.stablehlo import _STABLE_CUSTOM_CALLS, as_jax_exported, called_functions, is_allowed


def _program(function: object, checked: bool = True) -> tuple[Manifest, bytes]:
    disabled = [] if checked else [export.DisabledSafetyCheck.custom_call("ALL")]
    exported = export.export(jax.jit(function), platforms=("cpu",), disabled_checks=disabled)(jax.ShapeDtypeStruct((2, 2), np.float32))
    spec = ArraySpec("x", (2, 2), "float32")
    array = {"kind": "array"}
    manifest = Manifest(
        "f", ("cpu",), {}, (), (spec,), (spec,), {"kind": "tuple", "items": [array]}, array, (), (), False,
        exported.calling_convention_version, False, {},
    )  # fmt: skip
    return manifest, exported.mlir_module_serialized


def test_unlisted_custom_call_is_refused() -> None:
    call = jax.ffi.ffi_call("__onednn$matmul", jax.ShapeDtypeStruct((2, 2), np.float32))
    manifest, program = _program(lambda x: call(x), checked=False)
    assert called_functions(program) == {"__onednn$matmul"}
    with pytest.raises(DamagedModelError, match=r"calls __onednn\$matmul"):
        as_jax_exported(manifest, program)


def test_listed_custom_call_runs() -> None:
    manifest, program = _program(lambda x: jax.numpy.linalg.cholesky(x))
    assert called_functions(program) == {"lapack_spotrf_ffi"}
    results = as_jax_exported(manifest, program).call(np.array([[4, 0], [0, 9]], np.float32))
    assert np.array_equal(results[0], [[2, 0], [0, 3]])


def test_invalid_bytes_are_refused() -> None:
    with pytest.raises(DamagedModelError, match=r"JAX \S+ cannot read the program"):
        called_functions(b"nothing of the kind")


def test_all_listed_custom_calls_are_stable_in_jax() -> None:
    listed = importlib.import_module("jax._src.export._export")._CUSTOM_CALL_TARGETS_GUARANTEED_STABLE
    assert listed >= _STABLE_CUSTOM_CALLS
    for target in ("lapack_spotrf_ffi", "lapack_zgesdd_ffi", "cusolver_getrf_ffi", "shape_assertion", "Qr", "cu_threefry2x32_ffi"):
        assert is_allowed(target)
    for target in ("__onednn$matmul", "xla_ffi_python_gpu_callback", "lapack_spotrf", "dynaxla_in_memory", "__gpu$xla.gpu.triton", ""):
        assert not is_allowed(target)
