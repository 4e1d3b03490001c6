"""The functions that a program may call on a platform, and the cases that cannot be lowered or compiled there."""

from __future__ import annotations

from .cases import Case

# The kinds of failures.
LOWERING, COMPILING, ABORTS = "cannot be lowered", "cannot be compiled", "aborts"

# Functions that JAX may call: cuSOLVER's factorizations, and custom calls of XLA's compiler for TPUs.
CALLS: dict[str, frozenset[str]] = {
    "cuda": frozenset(
        [
            *("cu_lu_pivots_to_permutation", "cusolver_geqrf_ffi", "cusolver_gesvdj_ffi", "cusolver_getrf_ffi", "cusolver_orgqr_ffi"),
            *("cusolver_ormqr_ffi", "cusolver_potrf_ffi", "cusolver_syevd_ffi"),
        ]
    ),
    "tpu": frozenset(["Eigh", "LuDecomposition", "ProductOfElementaryHouseholderReflectors", "Qr"]),
}

_BY_VALUES = "the shape of its result depends on values: it runs between programs"
_ASKS = "the sample asks for a value: TorchDynamo ends the graph there"
_SPARSE = "sparse tensors are no operands of a program"
_JITERATOR = "torch compiles it for GPUs alone, and does not even make it here"
_EIG = "XLA has no eigenvalues of a matrix that is not symmetric on other platforms than the CPU: torch's kernel computes them"
_LDL = "XLA has no LDL factorization: torch's kernel makes it"
_CHUNKED = "an op of torch.nn's own without a lowering: torch's kernel computes it"
_SVD = "it needs an SVD with vectors, at which XLA's compiler for TPUs would end the process"

# The reasons of cases that cannot be lowered on any platform in any dtype, by name in the database.
CANNOT: dict[str, str] = {
    "allclose": _ASKS,
    "argwhere": _BY_VALUES,
    "chalf": "JAX has no complex numbers of two float16",
    "combinations": _BY_VALUES,
    "corrcoef": _ASKS,
    "cov": _ASKS,
    "equal": _ASKS,
    "item": _ASKS,
    "jiterator_2inputs_2outputs": _JITERATOR,
    "jiterator_4inputs_with_extra_args": _JITERATOR,
    "jiterator_binary": _JITERATOR,
    "jiterator_binary_return_by_ref": _JITERATOR,
    "jiterator_unary": _JITERATOR,
    "linalg.eig": _EIG,
    "linalg.eigvals": _EIG,
    "linalg.ldl_factor": _LDL,
    "linalg.ldl_factor_ex": _LDL,
    "linalg.ldl_solve": _LDL,
    "linalg.lstsq": _BY_VALUES,
    "linalg.lstsq.grad_oriented": _BY_VALUES,
    "masked_select": _BY_VALUES,
    "nn.functional.ctc_loss": _BY_VALUES,
    "nn.functional.gaussian_nll_loss": _ASKS,
    "nn.functional.linear_cross_entropy.chunked": _CHUNKED,
    "nn.functional.linear_cross_entropy.chunked_none": _CHUNKED,
    "nonzero": _BY_VALUES,
    "resize_as_": "what a tensor has behind its elements is no operand of a program: torch resizes it",
    "sparse.mm.reduce": _SPARSE,
    "sparse.sampled_addmm": _SPARSE,
    "tensor_split": _ASKS,
    "to_sparse": _SPARSE,
    "unique": _BY_VALUES,
    "unique_consecutive": _BY_VALUES,
}


# The same for one platform: ops that dynaxla refuses there (is_uncompilable).
CANNOT_ON: dict[str, dict[str, str]] = {
    "tpu": {
        "cdouble": "complex128: XLA's compiler for TPUs would end the process",
        "linalg.pinv": _SVD,
        "linalg.pinv.singular": _SVD,
        "linalg.svd": _SVD,
        "pca_lowrank": _SVD,
        "pinverse": _SVD,
        "svd": _SVD,
        "svd_lowrank": _SVD,
    }
}

# The reasons of ops that XLA's compiler for TPUs refuses, and of ops for which it ends the process, by name or as in "sin/bfloat16".
NOT_COMPILED: dict[str, dict[str, str]] = {"tpu": {}}
ENDS: dict[str, dict[str, str]] = {"tpu": {}}


def expectation(case: Case, platform: str) -> tuple[str, str]:
    """Returns the kind and the reason of the expected failure of a case; ("", "") if it is expected to pass."""
    if case.kind == "op":
        lists = (
            (LOWERING, CANNOT | CANNOT_ON.get(platform, {})),
            (COMPILING, NOT_COMPILED.get(platform, {})),
            (ABORTS, ENDS.get(platform, {})),
        )
        for kind, reasons in lists:
            for key in (case.name, f"{case.name}/{case.dtype}"):
                if key in reasons:
                    return kind, reasons[key]
    return "", ""
