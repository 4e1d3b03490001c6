"""Products and other linear algebra."""

from lowering.table.rows import NUMERIC, Op, aten, products

ROWS: list[Op] = [
    Op(aten.mm.default, products((-1, 3), (3, 4)), NUMERIC),
    Op(aten.bmm.default, products((-1, 2, 3), (-1, 3, 4)), NUMERIC),
    Op(aten.mv.default, products((-1, 3), (3,)), NUMERIC),
    Op(aten.dot.default, products((-1,), (-1,)), NUMERIC),
    Op(aten.addmm.default, products((4,), (-1, 3), (3, 4)), NUMERIC),
    Op(aten.baddbmm.default, products((2, 4), (-1, 2, 3), (-1, 3, 4)), NUMERIC),
]  # fmt: skip

# By test file: the ops without a row, and why.
ELSEWHERE: dict[str, str] = {}
