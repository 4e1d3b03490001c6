"""The reasons why entries of PyTorch's operator database (`op_db`) have no row in the table of ops."""

from __future__ import annotations

import re

from dynaxla.runtime import private

# The first pattern that matches a whole name gives the reason.
_REASONS = {
    "random numbers": r"bernoulli|cauchy|exponential|geometric|log_normal|multinomial|normal|rand.*|uniform|.*dropout.*"
    r"|nn.functional.rrelu|nn.functional.fractional_max_pool.*|pca_lowrank|svd_lowrank",
    "the size of the result depends on values": r"argwhere|masked_select|nonzero.*|unique.*|to_sparse|sparse.*|masked_scatter",
    "reads of values, at which graphs break": r"allclose|cov|corrcoef|item|linalg.cond|linalg.matrix_rank|linalg.lstsq|hash_tensor"
    r"|nn.functional.gaussian_nll_loss|nn.functional.ctc_loss|_segment_reduce|histogram.*",
    "views of the same memory, and copies of them": r"H|T|mH|mT|t|atleast.*|as_strided|broadcast.*|chunk|diagonal|linalg.diagonal"
    r"|[dhv]split|expand_as|flatten|imag|real|movedim|narrow|ravel|reshape_as|resolve.*|select|split.*|squeeze"
    r"|sum_to_size|tensor_split|transpose|unbind|unflatten|unsafe_.*|unsqueeze|view.*|conj|isreal|resize.*|.*_copy",
    "numbers written to memory, as in arange, eye, full and linspace": r"empty.*|fill|full_like|logspace|new_.*|ones.*|zero.*|scalar_tensor"
    r"|signal.windows.*|tri[lu]_indices|linalg.vander|complex|to",
    "kernels of GPUs, or parts of other ops": r"jiterator.*|torch\..*|_unsafe_masked.*|_chunk_cat|_native_batch_norm_legit"
    r"|_softmax_backward_data"
    r"|_batch_norm_with_update|native_.*|max_pool2d_with_indices_backward|grid_sampler.*|as_strided_scatter",
    "another name or form of an op that has a row": r"__r.*|bool|byte|c?double|cfloat|chalf|char|float|half|int|short|clamp_.*"
    r"|column_stack|[dhv]stack|flip[lu][rd]|trapz|inner|linalg.cross|pinverse|qr|svd|lu.*|cholesky.*|logdet|triangular_solve"
    r"|linalg.*_ex|linalg.lu.*|linalg.eig.*|bitwise_right_shift"
    r"|fft.*|istft|diag.*|combinations|angle|conj_physical|igammac|index_reduce|unravel_index|nn.functional.upsample.*"
    r"|nn.functional.conv_transpose3d",
    "compositions of ops that have rows": r"masked.*|nn.functional.*|_upsample_bilinear2d_aa",
    "functions and factorizations that are rare": r"special.*|linalg.*|geqrf|ormqr",
}


def left_out(known: set[str]) -> dict[str, list[str]]:
    """Returns the entries of op_db that are not in `known`, by reason."""
    found: dict[str, list[str]] = {}
    for name in sorted(private.names_in_op_db() - known):
        reason = next((reason for reason, pattern in _REASONS.items() if re.fullmatch(pattern, name)), "no reason")
        found.setdefault(reason, []).append(name)
    return found
