"""Orthogonal polynomials of a point and a degree, for which torch has no derivatives."""

import torch

from lowering.table.rows import Make, Op, aten, number_and, of

KINDS = [
    *(f"{kind}chebyshev_polynomial_{letter}" for kind in ("", "shifted_") for letter in "tuvw"),
    *("hermite_polynomial_h", "hermite_polynomial_he", "laguerre_polynomial_l", "legendre_polynomial_p"),
]


def degrees(make: Make, n: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    x = make(n, 3)
    return [(x, torch.tensor([0, 3, 9] if x.dim() else 3, dtype=x.dtype))]


ROWS: list[Op] = [
    row
    for kind in KINDS
    for op in [getattr(aten, f"special_{kind}")]
    for row in (
        Op(op.default, degrees, (torch.float32,), low=0.1, high=0.9, gradient=False),
        Op(op.x_scalar, number_and(0.3), (torch.float32,), low=0, gradient=False),
        Op(op.n_scalar, of(3), (torch.float32,), low=0.1, high=0.9, gradient=False),
    )
]

# The ops without a row, by the file that tests them.
ELSEWHERE: dict[str, str] = {}
