"""Elementwise steps."""

from __future__ import annotations

import torch

from .builder import (
    Builder,
    has_elements,
    is_bool,
    is_float,
    is_inexact,
    is_integer,
    is_integral,
    is_number,
    is_real,
    is_real_number,
)
from .program import Step
from .registry import draws, unary

NO_ZEROS = "$0.ne(0).all()"
SIGN_KNOWN = "$0.ne(0).all() and not $0.isnan().any()"


def is_anything(_: torch.Tensor) -> bool:
    return True


for _name in ("abs", "neg", "sign", "square", "positive"):
    unary("unary", _name, f"torch.{_name}($0)", is_real_number)
for _name in ("floor", "ceil", "round", "trunc", "frac"):
    unary("unary", _name, f"torch.{_name}($0)", is_float if _name == "frac" else is_real_number)
for _name in ("exp", "expm1", "sin", "cos", "tanh", "sigmoid", "erf", "atan", "asinh", "sinc", "exp2"):
    unary("unary", _name, f"torch.{_name}($0)", is_real)
# Eager mode's gelu of infinity is NaN.
unary("unary", "gelu", "F.gelu($0)", is_float, "$0.isfinite().all()")
for _name in ("relu", "silu", "softplus", "leaky_relu", "elu", "hardswish", "logsigmoid", "mish", "softsign"):
    unary("unary", _name, f"F.{_name}($0)", is_float)
# Their gradients at NaNs differ between PyTorch's vectorized code and its code for the remaining elements.
for _name in ("relu6", "hardtanh"):
    unary("unary", _name, f"F.{_name}($0)", is_float, "not $0.isnan().any()")
for _name in ("isnan", "isinf", "isfinite", "logical_not"):
    unary("unary", _name, f"torch.{_name}($0)", is_anything)
unary("unary", "log", "($0.abs() + 1).log()", is_real_number)
unary("unary", "log1p", "$0.abs().log1p()", is_real_number)
unary("unary", "log2", "($0.abs() + 1).log2()", is_real_number)
unary("unary", "sqrt", "$0.abs().sqrt()", is_real_number)
unary("unary", "rsqrt", "($0.abs() + 1).rsqrt()", is_real_number)
unary("unary", "reciprocal", "$0.reciprocal()", is_number, NO_ZEROS)
unary("unary", "bitwise_not", "~$0", is_integral)
unary("unary", "signbit", "$0.signbit()", is_real, SIGN_KNOWN)
unary("unary", "nan_to_num", "torch.nan_to_num($0, 0.5, 7, -7)", is_float)
unary("unary", "complex_conj_physical", "torch.conj_physical($0)", is_inexact)
unary("unary", "complex_mul", "$0 * 1j", lambda t: is_inexact(t) and t.element_size() >= 4)
unary("unary", "negated", "-$0", is_number)
unary("unary", "clamp_one_side", "$0.clamp(min=0)", is_real_number)


@draws("unary")
def clamp(b: Builder) -> Step:
    x = b.value(is_real_number)
    low = b.pick(["0", "1", "0.5", "None"] if is_integer(b.tensors[x]) else ["0", "-0.5", "1", "None"])
    return Step("clamp", f"torch.clamp($0, {low}, {b.pick(['2', '1.5', '3'])})", (x,))


@draws("unary")
def pow_scalar(b: Builder) -> Step:
    x = b.value(is_number)
    exponent = b.pick(["2", "3", "1", "0", "2.0"])
    return Step("pow", f"$0 ** {exponent}", (x,))


@draws("unary")
def scalar_base(b: Builder) -> Step:
    x = b.value(is_real)
    return Step("pow", f"{b.pick(['2', '0.5', '1.5'])} ** $0", (x,))


@draws("unary")
def shift(b: Builder) -> Step:
    x = b.value(is_integer)
    return Step("shift", f"$0 {b.pick(['<<', '>>'])} {b.integer(0, 5)}", (x,))


@draws("unary")
def to_dtype(b: Builder) -> Step:
    x = b.value()
    wide = ["torch.float32", "torch.float64", "torch.int32", "torch.int64", "torch.bfloat16", "torch.bool"]
    dtype = b.pick([*wide, "torch.float16", "torch.int8", "torch.int16", "torch.uint8", "torch.complex64"])
    if b.tensors[x].is_complex() and "complex" not in dtype and dtype != "torch.bool":
        dtype = "torch.complex128"
    narrow = is_inexact(b.tensors[x]) and "int" in dtype
    # The conversion of a float that is out of the integer's range is undefined, also of negative numbers to uint8.
    least = "0" if "uint8" in dtype else "-100"
    requires = f"$0.isfinite().all() and $0.ge({least}).all() and $0.le(100).all()" if narrow else ""
    return Step("to", b.pick([f"$0.to({dtype})", f"$0.type({dtype})"]), (x,), requires=requires)


@draws("unary")
def type_as(b: Builder) -> Step:
    x = b.value(is_integral)
    return Step("to", "$0.to($1.dtype)", (x, b.value()))


# Two operands

ARITHMETIC = ["+", "*", "-"]
COMPARISONS = ["==", "<", ">=", "!=", ">", "<="]


@draws("binary")
def arithmetic(b: Builder) -> Step:
    x = b.value(is_number)
    y = b.partner(x, is_number)
    sign = b.pick(ARITHMETIC)
    return Step({"+": "add", "*": "mul", "-": "sub"}[sign], f"$0 {sign} $1", (x, y))


@draws("binary")
def arithmetic_of_bools(b: Builder) -> Step:
    x = b.value(is_bool)
    y = b.partner(x)
    sign = b.pick(ARITHMETIC[:2])
    return Step({"+": "add", "*": "mul"}[sign], f"$0 {sign} $1", (x, y))


@draws("binary")
def arithmetic_with_number(b: Builder) -> Step:
    x = b.value()
    sign, number = b.pick(ARITHMETIC), b.scalar(b.tensors[x])
    return Step({"+": "add", "*": "mul", "-": "sub"}[sign], b.pick([f"$0 {sign} {number}", f"{number} {sign} $0"]), (x,))


@draws("binary")
def scaled(b: Builder) -> Step:
    x = b.value(is_number)
    y = b.partner(x, is_number)
    return Step(b.pick(["add_alpha", "sub_alpha"]), f"torch.{b.pick(['add', 'sub'])}($0, $1, alpha={b.pick(['2', '3', '1'])})", (x, y))


@draws("binary")
def divide(b: Builder) -> Step:
    x = b.value()
    y = b.partner(x)
    return Step("div", "$0 / $1", (x, y), requires="$1.ne(0).all()")


@draws("binary")
def divide_by_number(b: Builder) -> Step:
    x = b.value()
    return Step("div", b.pick(["$0 / 2", "$0 / 3", "$0 / 0.25", "$0 / True"]), (x,))


@draws("binary")
def number_divided(b: Builder) -> Step:
    return Step("div", f"{b.pick(['1', '1.5', '-3'])} / $0", (b.value(is_number),), requires=NO_ZEROS)


@draws("binary")
def rounded_division(b: Builder) -> Step:
    x = b.value(is_real_number)
    y = b.partner(x, is_real_number)
    divisor = b.pick(["$1", "($1.abs() + 1)"])
    name, code = b.pick(
        [
            ("floor_divide", f"$0 // {divisor}"),
            ("remainder", f"$0 % {divisor}"),
            ("fmod", f"torch.fmod($0, {divisor})"),
            ("div_trunc", f'torch.div($0, {divisor}, rounding_mode="trunc")'),
            ("div_floor", f'torch.div($0, {divisor}, rounding_mode="floor")'),
        ]
    )
    # The lowest integer overflows if it is divided by -1, or if its absolute value is taken.
    requires = f"{divisor}.ne(0).all() and $1.isfinite().all() and $0.isfinite().all()"
    if is_integral(b.tensors[x]) and is_integral(b.tensors[y]):
        requires += " and $1.ne(-1).all()"
    return Step(name, code, (x, y), requires=requires)


@draws("binary")
def rounded_division_by_number(b: Builder) -> Step:
    x = b.value(is_real_number)
    number = b.pick(["2", "3", "-2", "0.5", "-1.5"])
    if b.tensors[x].dtype.itemsize == 1 and "-" in number:
        number = "4"
    name, code = b.pick(
        [
            ("floor_divide", f"$0 // {number}"),
            ("remainder", f"$0 % {number}"),
            ("fmod", f"torch.fmod($0, {number})"),
            ("div_trunc", f'torch.div($0, {number}, rounding_mode="trunc")'),
        ]
    )
    return Step(name, code, (x,), requires="$0.isfinite().all()")


@draws("binary")
def compare(b: Builder) -> Step:
    x = b.value(is_real)
    if b.chance(30):
        return Step("compare", f"$0 {b.pick(COMPARISONS)} {b.pick(['0', '1', '0.5', 'True'])}", (x,))
    return Step("compare", f"$0 {b.pick(COMPARISONS)} $1", (x, b.partner(x, is_real)))


@draws("binary")
def logical(b: Builder) -> Step:
    x = b.value()
    name = b.pick(["logical_and", "logical_or", "logical_xor"])
    return Step(name, f"torch.{name}($0, $1)", (x, b.partner(x)))


@draws("binary")
def bitwise(b: Builder) -> Step:
    x = b.value(is_integral)
    sign = b.pick(["&", "|", "^"])
    if b.chance(30):
        return Step("bitwise", f"$0 {sign} {b.pick(['True', '3'])}", (x,))
    return Step("bitwise", f"$0 {sign} $1", (x, b.partner(x, is_integral)))


@draws("binary")
def extremum(b: Builder) -> Step:
    x = b.value(is_real)
    name = b.pick(["maximum", "minimum", "fmax", "fmin"])
    return Step(name, f"torch.{name}($0, $1)", (x, b.partner(x, is_real)))


@draws("binary")
def rare_functions(b: Builder) -> Step:
    x = b.value(is_float)
    name = b.pick(["atan2", "hypot", "logaddexp", "xlogy", "heaviside", "copysign", "ldexp"])
    y = b.partner(x, (lambda t: t.dtype == b.tensors[x].dtype) if name in ("heaviside", "hypot", "logaddexp") else is_real)
    first = "$0.abs()" if name == "hypot" else "$0"
    second = {"xlogy": "$1.abs() + 1", "ldexp": "$1.clamp(-4, 4)"}.get(name, "$1")
    requires = {"atan2": "$0.ne(0).all() and $1.ne(0).all()", "copysign": "$1.ne(0).all() and not $1.isnan().any()"}.get(name, "")
    return Step(name, f"torch.{name}({first}, {second})", (x, y), requires=requires)


@draws("binary")
def number_theory(b: Builder) -> Step:
    x = b.value(is_integer)
    name = b.pick(["gcd", "lcm"])
    small = "$0.abs().le(1000).all() and $1.abs().le(1000).all()"
    return Step(name, f"torch.{name}($0, $1)", (x, b.partner(x, is_integer)), requires=small)


@draws("binary")
def power(b: Builder) -> Step:
    x = b.value(is_real_number)
    y = b.partner(x, is_integer)
    return Step("pow", "$0 ** $1", (x, y), requires="$0.ne(0).all() and $1.ge(0).all() and $1.le(4).all()")


@draws("binary")
def closeness(b: Builder) -> Step:
    x = b.value(is_inexact)
    y = b.partner(x, lambda t: t.dtype == b.tensors[x].dtype)
    return Step("isclose", f"torch.isclose($0, $1, atol=0.3{b.pick(['', ', equal_nan=True'])})", (x, y))


# Three operands


@draws("binary")
def where(b: Builder) -> Step:
    condition = b.value(is_bool)
    x = b.partner(condition)
    way = b.pick(["tensors", "number", "numbers"])
    if way == "number":
        number = b.scalar(b.tensors[x])
        return Step("where", b.pick([f"torch.where($0, $1, {number})", f"torch.where($0, {number}, $1)"]), (condition, x))
    if way == "numbers":
        return Step("where", f"torch.where($0, {b.pick(['1', '1.5', 'True'])}, {b.pick(['0', '2.5'])})", (condition,))
    return Step("where", "torch.where($0, $1, $2)", (condition, x, b.partner(condition)))


@draws("binary")
def where_compared(b: Builder) -> Step:
    x = b.value(is_real)
    return Step("where", "torch.where($0 > 0, $0, $1)", (x, b.partner(x)))


@draws("binary")
def fused(b: Builder) -> Step:
    x = b.value(is_inexact)
    y, z = (b.partner(x, lambda t: t.dtype == b.tensors[x].dtype) for _ in range(2))
    name, code = b.pick(
        [
            ("addcmul", "torch.addcmul($0, $1, $2, value=2)"),
            ("lerp", "torch.lerp($0, $1, $2)"),
            ("lerp", "torch.lerp($0, $1, 0.25)"),
            ("addcdiv", "torch.addcdiv($0, $1, $2, value=0.5)"),
        ]
    )
    operands = (x, y) if "$2" not in code else (x, y, z)
    return Step(name, code, operands, requires="$2.ne(0).all()" if name == "addcdiv" else "")


@draws("binary")
def clamp_tensor(b: Builder) -> Step:
    x = b.value(is_real_number)
    y = b.partner(x, is_real_number)
    return Step("clamp", b.pick(["torch.clamp($0, min=$1)", "torch.clamp($0, max=$1)", "torch.clamp($0, $1, $1 + 1)"]), (x, y))


@draws("binary")
def with_itself(b: Builder) -> Step:
    x = b.value(lambda t: is_number(t) and has_elements(t))
    return Step("mul", b.pick(["$0 * $0", "$0 - $0.flip(0) if $0.dim() else $0 - 1", "$0 + $0"]), (x,))
