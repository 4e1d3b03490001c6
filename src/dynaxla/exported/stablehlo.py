"""A program as StableHLO: what it may call, and how JAX calls it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from jax import export, lax
from jax.extend.mlir import deserialize_portable_artifact, ir
from jax.extend.mlir.dialects import chlo, sdy, stablehlo

from .manifest import DTYPES, ArraySpec, Damaged, Manifest

# What later versions of JAX keep for exported programs: LAPACK on the CPU, the vendors' solvers and generators on GPUs, factorizations on
# TPUs, and what belongs to dynamic dimensions. (jax.export has a list of the same purpose, which also has kernels of users.)
_KEPT = frozenset(
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
# Elsewhere than in the device's program.
_OUTSIDE = frozenset(["stablehlo.send", "stablehlo.recv", "stablehlo.infeed", "stablehlo.outfeed"])


def is_stable(target: str) -> bool:
    """Whether an exported program may call this function: later versions of JAX have it, and it runs nothing of the host's."""
    return target in _KEPT


def calls(program: bytes) -> set[str]:
    """The functions that a serialized program calls, and its ways out of the device, by name.

    Raises: Damaged if these bytes are no program.
    """
    found: set[str] = set()

    def look(op: Any) -> Any:
        if op.operation.name == "stablehlo.custom_call":
            found.add(ir.StringAttr(op.operation.attributes["call_target_name"]).value)
        elif op.operation.name in _OUTSIDE:
            found.add(op.operation.name)
        return ir.WalkResult.ADVANCE

    with ir.Context() as context, ir.Location.unknown():
        for dialect in (stablehlo, chlo, sdy):
            dialect.register_dialect(context)
        try:
            module = deserialize_portable_artifact(program)
        except Exception as error:
            raise Damaged(f"the program is no StableHLO that this JAX reads: {error}") from None
        module.operation.walk(look)
    return found


def exported(manifest: Manifest, program: bytes) -> export.Exported:
    """The program as JAX's exported functions are: from flat arrays to a list of arrays.

    JAX makes an exported function that takes and gives the same, and this program is put in its place.
    Raises: Damaged for shapes that cannot be, and for a program that calls what is not listed.
    """
    unlisted = sorted(name for name in calls(program) if not is_stable(name))
    if unlisted:
        raise Damaged(f"the program calls {', '.join(unlisted)}: exported programs may not")
    scope = scope_of(manifest.dimensions)

    def described(spec: ArraySpec) -> jax.ShapeDtypeStruct:
        try:
            return jax.ShapeDtypeStruct(_shape(spec, scope), DTYPES[spec.dtype])
        except ValueError as error:
            raise Damaged(f"{spec} has no shape: {error}") from None

    with jax.enable_x64(True):
        taken, given = [described(spec) for spec in manifest.taken()], [described(spec) for spec in manifest.given()]

        def hollow(*arrays: jax.Array) -> list[jax.Array]:
            return [lax.full(spec.shape, 0, spec.dtype) for spec in given]

        made = export.export(jax.jit(hollow, keep_unused=True), platforms=manifest.platforms)(*taken)
    return dataclasses.replace(
        made,
        fun_name=manifest.name,
        mlir_module_serialized=program,
        calling_convention_version=manifest.calling_convention,
        uses_global_constants=manifest.is_polymorphic,
    )


def scope_of(dimensions: Mapping[str, tuple[int, int | None]]) -> export.SymbolicScope:
    """JAX's, in which dynamic dimensions have these limits."""
    found = [f"{name} >= {low}" for name, (low, _) in dimensions.items()]
    return export.SymbolicScope(found + [f"{name} <= {high}" for name, (_, high) in dimensions.items() if high is not None])


def _shape(spec: ArraySpec, scope: export.SymbolicScope) -> tuple[Any, ...]:
    return tuple(export.symbolic_shape(size, scope=scope)[0] if isinstance(size, str) else size for size in spec.shape)
