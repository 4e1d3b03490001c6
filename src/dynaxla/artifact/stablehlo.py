"""StableHLO programs: checks of the functions that they call, and a `jax.export.Exported` to call them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from jax import export, lax
from jax.extend.mlir import deserialize_portable_artifact, ir
from jax.extend.mlir.dialects import chlo, sdy, stablehlo

from .manifest import DTYPES, ArraySpec, DamagedModelError, Manifest

# Custom calls that later versions of JAX keep for exported programs: LAPACK on the CPU, vendors' solvers and generators on GPUs,
# factorizations on TPUs, and calls for dynamic dimensions. (The list of jax.export also has Pallas kernels and calls of TensorFlow.)
_STABLE_CUSTOM_CALLS = frozenset(
    [
        *("Eigh", "LuDecomposition", "ProductOfElementaryHouseholderReflectors", "Qr", "ApproxTopK", "AllocateBuffer", "shape_assertion"),
        *("Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape", "annotate_device_placement"),
        *("cu_threefry2x32_ffi", "hip_threefry2x32_ffi", "cu_lu_pivots_to_permutation", "hip_lu_pivots_to_permutation"),
        *("stablehlo.dynamic_approx_top_k", "stablehlo.dynamic_reduce_window", "stablehlo.dynamic_rng_bit_generator"),
        "stablehlo.dynamic_top_k",
        *(
            f"lapack_{kind}{name}_ffi"
            for kind in "sdcz"
            for name in ("gees", "geev", "gehrd", "geqrf", "gesdd", "getrf", "gtsv", "potrf", "trsm")
        ),
        *(f"lapack_{kind}{name}_ffi" for kind in "sd" for name in ("orgqr", "syevd", "sytrd")),
        *(f"lapack_{kind}{name}_ffi" for kind in "cz" for name in ("ungqr", "heevd", "hetrd")),
        *(
            f"{vendor}solver_{name}_ffi"
            for vendor in ("cu", "hip")
            for name in ("geqrf", "gesvd", "gesvdj", "getrf", "orgqr", "potrf", "syevd")
        ),
        *("cusolver_sytrd_ffi", "hipsolver_gesdd_ffi", "cusparse_gtsv2_ffi"),
    ]
)
# Ops that communicate with the host or another device.
_COMMUNICATION_OPS = frozenset(["stablehlo.send", "stablehlo.recv", "stablehlo.infeed", "stablehlo.outfeed"])


def is_allowed(target: str) -> bool:
    """True if an exported program may call this function: later versions of JAX keep it, and it does not call Python code."""
    return target in _STABLE_CUSTOM_CALLS


def called_functions(program: bytes) -> set[str]:
    """Returns the targets of a serialized program's custom calls, and the names of its ops that are in `_COMMUNICATION_OPS`.

    Raises: DamagedModelError if the bytes are not a program that this JAX can read.
    """
    called: set[str] = set()

    def visit(op: Any) -> Any:
        if op.operation.name == "stablehlo.custom_call":
            called.add(ir.StringAttr(op.operation.attributes["call_target_name"]).value)
        elif op.operation.name in _COMMUNICATION_OPS:
            called.add(op.operation.name)
        return ir.WalkResult.ADVANCE

    with ir.Context() as context, ir.Location.unknown():
        for dialect in (stablehlo, chlo, sdy):
            dialect.register_dialect(context)
        try:
            module = deserialize_portable_artifact(program)
        except Exception as error:
            raise DamagedModelError(f"JAX {jax.__version__} cannot read the program: {error}") from None
        module.operation.walk(visit)
    return called


def as_jax_exported(manifest: Manifest, program: bytes) -> export.Exported:
    """Returns a program as a `jax.export.Exported`. Its `call` takes the manifest's `program_inputs`, and returns a list of arrays.

    JAX exports a placeholder function with the same inputs and outputs. In the result, `program` replaces the placeholder's program.

    Raises: DamagedModelError for invalid shapes or bytes, and for a program that calls a function that `is_allowed` rejects.
    """
    unlisted = sorted(name for name in called_functions(program) if not is_allowed(name))
    if unlisted:
        raise DamagedModelError(f"the program calls {', '.join(unlisted)}, which an exported program must not call")
    scope = symbolic_scope(manifest.dimensions)

    def shape_struct(spec: ArraySpec) -> jax.ShapeDtypeStruct:
        try:
            return jax.ShapeDtypeStruct(_shape(spec, scope), DTYPES[spec.dtype])
        except ValueError as error:
            raise DamagedModelError(f"{spec} has no shape: {error}") from None

    with jax.enable_x64(True):
        inputs, outputs = (
            [shape_struct(spec) for spec in manifest.program_inputs()],
            [shape_struct(spec) for spec in manifest.program_outputs()],
        )

        def placeholder(*arrays: jax.Array) -> list[jax.Array]:
            return [lax.full(spec.shape, 0, spec.dtype) for spec in outputs]

        placeholder_export = export.export(jax.jit(placeholder, keep_unused=True), platforms=manifest.platforms)(*inputs)
    return dataclasses.replace(
        placeholder_export,
        fun_name=manifest.name,
        mlir_module_serialized=program,
        calling_convention_version=manifest.calling_convention,
        uses_global_constants=manifest.is_polymorphic,
    )


def symbolic_scope(dimensions: Mapping[str, tuple[int, int | None]]) -> export.SymbolicScope:
    """Returns JAX's scope for symbolic dimensions with these limits: the smallest and the largest size (None: no limit), by name."""
    constraints = [f"{name} >= {low}" for name, (low, _) in dimensions.items()]
    return export.SymbolicScope(constraints + [f"{name} <= {high}" for name, (_, high) in dimensions.items() if high is not None])


def _shape(spec: ArraySpec, scope: export.SymbolicScope) -> tuple[Any, ...]:
    return tuple(export.symbolic_shape(size, scope=scope)[0] if isinstance(size, str) else size for size in spec.shape)
