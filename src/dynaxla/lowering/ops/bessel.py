"""Bessel functions of orders 0 and 1 (J, Y, I, K and spherical j0), and Airy's function Ai.

Source: S. L. Moshier, Cephes Mathematical Library (j0.c, j1.c, k0.c, k1.c, airy.c): rational functions and Chebyshev series on intervals,
asymptotic expansions for larger arguments. ATen evaluates the same formulas (native/Math.h), so both round alike. Coefficients are listed
with the highest order first.

JAX's functions compute I. JAX's bessel_jn is not accurate enough for J: in float32 its result is nan for x from -3 to 0, in float64
its error is 1e-9 at x = 9, and at x = 1e4 every digit is wrong. JAX has no Y, no K and no Airy function. Torch's own kernels (see
fallback.py) cannot be fused with neighbouring ops, and programs for a TPU cannot call them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
from jax import Array, lax

from ...torch_ops import aten
from ..promotion import Promotion, full_like, number, plus, times
from ..registry import lower_table

Series = Sequence[float]

# J and Y for |x| > 5, by order: J = sqrt(2 / (pi x)) (P cos t - (5 / x) Q sin t), where t = x - pi / 4 (order 0) or x - 3 pi / 4
# (order 1), and P = _PP / _PQ and Q = _QP / _QQ are rational functions of 25 / x**2. Y has P sin t + (5 / x) Q cos t in the parentheses.
_PP = (
    (
        7.96936729297347051624e-4,
        8.28352392107440799803e-2,
        1.23953371646414299388e0,
        5.44725003058768775090e0,
        8.74716500199817011941e0,
        5.30324038235394892183e0,
        9.99999999999999997821e-1,
    ),
    (
        7.62125616208173112003e-4,
        7.31397056940917570436e-2,
        1.12719608129684925192e0,
        5.11207951146807644818e0,
        8.42404590141772420927e0,
        5.21451598682361504063e0,
        1.00000000000000000254e0,
    ),
)
_PQ = (
    (
        9.24408810558863637013e-4,
        8.56288474354474431428e-2,
        1.25352743901058953537e0,
        5.47097740330417105182e0,
        8.76190883237069594232e0,
        5.30605288235394617618e0,
        1.00000000000000000218e0,
    ),
    (
        5.71323128072548699714e-4,
        6.88455908754495404082e-2,
        1.10514232634061696926e0,
        5.07386386128601488557e0,
        8.39985554327604159757e0,
        5.20982848682361821619e0,
        9.99999999999999997461e-1,
    ),
)
_QP = (
    (
        -1.13663838898469149931e-2,
        -1.28252718670509318512e0,
        -1.95539544257735972385e1,
        -9.32060152123768231369e1,
        -1.77681167980488050595e2,
        -1.47077505154951170175e2,
        -5.14105326766599330220e1,
        -6.05014350600728481186e0,
    ),
    (
        5.10862594750176621635e-2,
        4.98213872951233449420e0,
        7.58238284132545283818e1,
        3.66779609360150777800e2,
        7.10856304998926107277e2,
        5.97489612400613639965e2,
        2.11688757100572135698e2,
        2.52070205858023719784e1,
    ),
)
_QQ = (
    (
        6.43178256118178023184e1,
        8.56430025976980587198e2,
        3.88240183605401609683e3,
        7.24046774195652478189e3,
        5.93072701187316984827e3,
        2.06209331660327847417e3,
        2.42005740240291393179e2,
    ),
    (
        7.42373277035675149943e1,
        1.05644886038262816351e3,
        4.98641058337653607651e3,
        9.56231892404756170795e3,
        7.99704160447350683650e3,
        2.82619278517639096600e3,
        3.36093607810698293419e2,
    ),
)
# J for |x| <= 5, by order: a rational function of x**2, times x**2 - r for both numbers r in _J_SQUARED_ROOTS, the squares of the first two
# roots. For order 1, times x.
_J_NUMERATOR = (
    (-4.79443220978201773821e9, 1.95617491946556577543e12, -2.49248344360967716204e14, 9.70862251047306323952e15),
    (-8.99971225705559398224e8, 4.52228297998194034323e11, -7.27494245221818276015e13, 3.68295732863852883286e15),
)
_J_DENOMINATOR = (
    (
        4.99563147152651017219e2,
        1.73785401676374683123e5,
        4.84409658339962045305e7,
        1.11855537045356834862e10,
        2.11277520115489217587e12,
        3.10518229857422583814e14,
        3.18121955943204943306e16,
        1.71086294081043136091e18,
    ),
    (
        6.20836478118054335476e2,
        2.56987256757748830383e5,
        8.35146791431949253037e7,
        2.21511595479792499675e10,
        4.74914122079991414898e12,
        7.84369607876235854894e14,
        8.95222336184627338078e16,
        5.32278620332680085395e18,
    ),
)
_J_SQUARED_ROOTS = ((5.78318596294678452118e0, 3.04712623436620863991e1), (1.46819706421238932572e1, 4.92184563216946036703e1))
# Y for x <= 5, by order, with a rational function R: R(x**2) + 2 / pi J(x) log(x), and x R(x**2) + 2 / pi (J(x) log(x) - 1 / x).
_Y_NUMERATOR = (
    (
        1.55924367855235737965e4,
        -1.46639295903971606143e7,
        5.43526477051876500413e9,
        -9.82136065717911466409e11,
        8.75906394395366999549e13,
        -3.46628303384729719441e15,
        4.42733268572569800351e16,
        -1.84950800436986690637e16,
    ),
    (
        1.26320474790178026440e9,
        -6.47355876379160291031e11,
        1.14509511541823727583e14,
        -8.12770255501325109621e15,
        2.02439475713594898196e17,
        -7.78877196265950026825e17,
    ),
)
_Y_DENOMINATOR = (
    (
        1.04128353664259848412e3,
        6.26107330137134956842e5,
        2.68919633393814121987e8,
        8.64002487103935000337e10,
        2.02979612750105546709e13,
        3.17157752842975028269e15,
        2.50596256172653059228e17,
    ),
    (
        5.94301592346128195359e2,
        2.35564092943068577943e5,
        7.34811944459721705660e7,
        1.87601316108706159478e10,
        3.88231277496238566008e12,
        6.20557727146953693363e14,
        6.87141087355300489866e16,
        3.97270608116560655612e18,
    ),
)
# K by order, with Chebyshev series S and L. For x <= 2: S(x**2 - 2) - I(x) log(x / 2), and S(x**2 - 2) / x + I(x) log(x / 2). For x > 2:
# exp(-x) / sqrt(x) L(8 / x - 2).
_K_SMALL = (
    (
        1.37446543561352307156e-16,
        4.25981614279661018399e-14,
        1.03496952576338420167e-11,
        1.90451637722020886025e-9,
        2.53479107902614945675e-7,
        2.28621210311945178607e-5,
        1.26461541144692592338e-3,
        3.59799365153615016266e-2,
        3.44289899924628486886e-1,
        -5.35327393233902768720e-1,
    ),
    (
        -7.02386347938628759343e-18,
        -2.42744985051936593393e-15,
        -6.66690169419932900609e-13,
        -1.41148839263352776110e-10,
        -2.21338763073472585583e-8,
        -2.43340614156596823496e-6,
        -1.73028895751305206302e-4,
        -6.97572385963986435018e-3,
        -1.22611180822657148235e-1,
        -3.53155960776544875667e-1,
        1.52530022733894777053e0,
    ),
)
_K_LARGE = (
    (
        5.30043377268626276149e-18,
        -1.64758043015242134646e-17,
        5.21039150503902756861e-17,
        -1.67823109680541210385e-16,
        5.51205597852431940784e-16,
        -1.84859337734377901440e-15,
        6.34007647740507060557e-15,
        -2.22751332699166985548e-14,
        8.03289077536357521100e-14,
        -2.98009692317273043925e-13,
        1.14034058820847496303e-12,
        -4.51459788337394416547e-12,
        1.85594911495471785253e-11,
        -7.95748924447710747776e-11,
        3.57739728140030116597e-10,
        -1.69753450938905987466e-9,
        8.57403401741422608519e-9,
        -4.66048989768794782956e-8,
        2.76681363944501510342e-7,
        -1.83175552271911948767e-6,
        1.39498137188764993662e-5,
        -1.28495495816278026384e-4,
        1.56988388573005337491e-3,
        -3.14481013119645005427e-2,
        2.44030308206595545468e0,
    ),
    (
        -5.75674448366501715755e-18,
        1.79405087314755922667e-17,
        -5.68946255844285935196e-17,
        1.83809354436663880070e-16,
        -6.05704724837331885336e-16,
        2.03870316562433424052e-15,
        -7.01983709041831346144e-15,
        2.47715442448130437068e-14,
        -8.97670518232499435011e-14,
        3.34841966607842919884e-13,
        -1.28917396095102890680e-12,
        5.13963967348173025100e-12,
        -2.12996783842756842877e-11,
        9.21831518760500529508e-11,
        -4.19035475934189648750e-10,
        2.01504975519703286596e-9,
        -1.03457624656780970260e-8,
        5.74108412545004946722e-8,
        -3.50196060308781257119e-7,
        2.40648494783721712015e-6,
        -1.93619797416608296024e-5,
        1.95215518471351631108e-4,
        -2.85781685962277938680e-3,
        1.03923736576817238437e-1,
        2.72062619048444266945e0,
    ),
)
# Airy's Ai for x >= 2.09: a rational function of 1 / zeta, where zeta = 2 / 3 |x|**1.5.
_AIRY_NUMERATOR = (
    3.46538101525629032477e-1,
    1.20075952739645805542e1,
    7.62796053615234516538e1,
    1.68089224934630576269e2,
    1.59756391350164413639e2,
    7.05360906840444183113e1,
    1.40264691163389668864e1,
    9.99999999999999995305e-1,
)
_AIRY_DENOMINATOR = (
    5.67594532638770212846e-1,
    1.47562562584847203173e1,
    8.45138970141474626562e1,
    1.77318088145400459522e2,
    1.64234692871529701831e2,
    7.14778400825575695274e1,
    1.40959135607834029598e1,
    1.00000000000000000470e0,
)
# Airy's Ai for x < -2.09: the factors of the sine and of the cosine, as rational functions of 1 / zeta**2.
_AIRY_SINE_NUMERATOR = (
    -1.31696323418331795333e-1,
    -6.26456544431912369773e-1,
    -6.93158036036933542233e-1,
    -2.79779981545119124951e-1,
    -4.91900132609500318020e-2,
    -4.06265923594885404393e-3,
    -1.59276496239262096340e-4,
    -2.77649108155232920844e-6,
    -1.67787698489114633780e-8,
)
_AIRY_SINE_DENOMINATOR = (
    1.33560420706553243746e1,
    3.26825032795224613948e1,
    2.67367040941499554804e1,
    9.18707402907259625840e0,
    1.47529146771666414581e0,
    1.15687173795188044134e-1,
    4.40291641615211203805e-3,
    7.54720348287414296618e-5,
    4.51850092970580378464e-7,
)
_AIRY_COSINE_NUMERATOR = (
    1.97339932091685679179e-2,
    3.91103029615688277255e-1,
    1.06579897599595591108e0,
    9.39169229816650230044e-1,
    3.51465656105547619242e-1,
    6.33888919628925490927e-2,
    5.85804113048388458567e-3,
    2.82851600836737019778e-4,
    6.98793669997260967291e-6,
    8.11789239554389293311e-8,
    3.41551784765923618484e-10,
)
_AIRY_COSINE_DENOMINATOR = (
    9.30892908077441974853e0,
    1.98352928718312140417e1,
    1.55646628932864612953e1,
    5.47686069422975497931e0,
    9.54293611618961883998e-1,
    8.64580826352392193095e-2,
    4.12656523824222607191e-3,
    1.01259085116509135510e-4,
    1.17166733214413521882e-6,
    4.91834570062930015649e-9,
)


def polynomial(x: Array, coefficients: Series) -> Array:
    """Returns the value of a polynomial at x, by Horner's rule.

    Args:
        x: the point.
        coefficients: highest order first.
    """
    total = full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        total = lax.add(lax.mul(total, x), number(coefficient, x.dtype))
    return total


def chebyshev_series(x: Array, coefficients: Series) -> Array:
    """Returns the value of a Chebyshev series at x / 2, by Clenshaw's recurrence. The series has half of the constant coefficient.

    Args:
        x: twice the point.
        coefficients: highest order first.
    """
    before, last, total = full_like(x, 0), full_like(x, 0), full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        before, last = last, total
        total = lax.add(lax.sub(lax.mul(x, last), before), number(coefficient, x.dtype))
    return lax.mul(number(0.5, x.dtype), lax.sub(total, before))


def _rational(x: Array, numerator: Series, denominator: Series) -> Array:
    return lax.div(polynomial(x, numerator), polynomial(x, denominator))


def _inverse(x: Array, factor: float = 1) -> Array:
    return lax.div(full_like(x, factor), x)


def _value_where(condition: Array, value: float, x: Array) -> Array:
    return lax.select(condition, full_like(x, value), x)


def _asymptotic_terms(order: int, x: Array) -> tuple[Array, Array, Array, Array, Array]:
    """Returns the terms of the asymptotic expansions of J and Y for x > 5: P, (5 / x) Q, cos t, sin t, and sqrt(2 / (pi x)).

    The symbols are those of the comment on `_PP`.
    """
    square = lax.mul(_inverse(x, 5), _inverse(x, 5)) if order else _inverse(lax.mul(x, x), 25)
    angle = plus(x, -math.pi * (0.75 if order else 0.25))
    first = _rational(square, _PP[order], _PQ[order])
    second = lax.mul(_inverse(x, 5), _rational(square, _QP[order], _QQ[order]))
    return first, second, lax.cos(angle), lax.sin(angle), lax.div(full_like(x, math.sqrt(2 / math.pi)), lax.sqrt(x))


def bessel_j(order: int, x: Array) -> Array:
    """The Bessel function of the first kind of order 0 or 1."""
    magnitude = lax.abs(x)
    square = lax.mul(magnitude, magnitude)
    small = lax.mul(plus(square, -_J_SQUARED_ROOTS[order][0]), plus(square, -_J_SQUARED_ROOTS[order][1]))
    small = lax.mul(small, _rational(square, _J_NUMERATOR[order], _J_DENOMINATOR[order]))
    if order:
        small = lax.mul(small, magnitude)
    first, second, cosine, sine, amplitude = _asymptotic_terms(order, magnitude)
    large = lax.mul(lax.sub(lax.mul(first, cosine), lax.mul(second, sine)), amplitude)
    out = lax.select(lax.le(magnitude, number(5, x.dtype)), small, large)
    return lax.select(lax.lt(x, number(0, x.dtype)), lax.neg(out), out) if order else out


def bessel_y(order: int, x: Array) -> Array:
    """The Bessel function of the second kind of order 0 or 1: -inf at zero, nan for negative x."""
    square = lax.mul(x, x)
    small = _rational(square, _Y_NUMERATOR[order], _Y_DENOMINATOR[order])
    logarithm = lax.mul(bessel_j(order, x), lax.log(x))
    if order:
        small, logarithm = lax.mul(x, small), lax.sub(logarithm, _inverse(x))
    small = lax.add(small, times(logarithm, 2 / math.pi))
    first, second, cosine, sine, amplitude = _asymptotic_terms(order, x)
    large = lax.mul(lax.add(lax.mul(first, sine), lax.mul(second, cosine)), amplitude)
    out = lax.select(lax.le(x, number(5, x.dtype)), small, large)
    return _value_where(lax.eq(x, number(0, x.dtype)), -math.inf, _value_where(lax.lt(x, number(0, x.dtype)), math.nan, out))


# The modified Bessel functions of the first kind, by order. They are nan at the infinities, as in ATen.
_MODIFIED_BESSEL_I = (jax.scipy.special.i0, jax.scipy.special.i1)


def _modified_bessel_k(order: int, scaled: bool, x: Array) -> Array:
    """The modified Bessel function of the second kind of order 0 or 1, times exp(x) if `scaled`: inf at zero, nan for negative x."""
    series = chebyshev_series(plus(lax.mul(x, x), -2), _K_SMALL[order])
    logarithm = lax.mul(lax.log(times(x, 0.5)), _MODIFIED_BESSEL_I[order](x))
    small = lax.add(logarithm, lax.div(series, x)) if order else lax.sub(series, logarithm)
    large = lax.div(chebyshev_series(plus(_inverse(x, 8), -2), _K_LARGE[order]), lax.sqrt(x))
    if scaled:
        small = lax.mul(small, lax.exp(x))
    else:
        large = lax.mul(lax.exp(lax.neg(x)), large)
    out = lax.select(lax.le(x, number(2, x.dtype)), small, large)
    return _value_where(lax.eq(x, number(0, x.dtype)), math.inf, _value_where(lax.lt(x, number(0, x.dtype)), math.nan, out))


def _spherical_bessel_j0(x: Array) -> Array:
    """sin(x) / x; by its Taylor series near 0, and 0 at the infinities."""
    series = polynomial(lax.mul(x, x), [(-1) ** k / math.factorial(2 * k + 1) for k in range(6, -1, -1)])
    out = lax.select(lax.lt(lax.abs(x), number(0.5, x.dtype)), series, lax.div(lax.sin(x), x))
    return _value_where(lax.eq(lax.abs(x), number(math.inf, x.dtype)), 0, out)


# Near 0, Ai(x) is Ai(0) f(x) + Ai'(0) x g(x), where f and g are power series in x**3. The second number is -Ai'(0).
_AIRY_AT_ZERO, _AIRY_SLOPE_AT_ZERO = 0.355028053887817239260, 0.258819403792806798405
_AIRY_VALUE_SERIES, _AIRY_SLOPE_SERIES = (
    [1 / math.prod((3 * k - 1 + shift) * (3 * k + shift) for k in range(1, terms + 1)) for terms in range(13, -1, -1)] for shift in (0, 1)
)


def _airy_ai(x: Array) -> Array:
    """Airy's function Ai; nan at the infinities, as in ATen."""
    root = lax.sqrt(lax.abs(x))
    # The order of these operations decides the rounding of zeta, and with it the angle far from zero.
    zeta = lax.div(lax.mul(times(lax.abs(x), 2), root), full_like(x, 3))
    inverse = _inverse(zeta)
    square = lax.mul(inverse, inverse)
    amplitude = _inverse(lax.sqrt(root), 1 / math.sqrt(math.pi))

    positive = lax.div(_rational(inverse, _AIRY_NUMERATOR, _AIRY_DENOMINATOR), lax.mul(full_like(x, 2), lax.exp(zeta)))
    angle = plus(zeta, math.pi / 4)
    sine = plus(lax.mul(square, _rational(square, _AIRY_SINE_NUMERATOR, _AIRY_SINE_DENOMINATOR)), 1)
    cosine = lax.mul(inverse, _rational(square, _AIRY_COSINE_NUMERATOR, _AIRY_COSINE_DENOMINATOR))
    negative = lax.sub(lax.mul(lax.sin(angle), sine), lax.mul(lax.cos(angle), cosine))
    cube = lax.mul(lax.mul(x, x), x)
    near_zero = lax.sub(
        times(polynomial(cube, _AIRY_VALUE_SERIES), _AIRY_AT_ZERO),
        times(lax.mul(x, polynomial(cube, _AIRY_SLOPE_SERIES)), _AIRY_SLOPE_AT_ZERO),
    )
    out = lax.select(lax.ge(x, number(2.09, x.dtype)), lax.mul(amplitude, positive), near_zero)
    out = lax.select(lax.lt(x, number(-2.09, x.dtype)), lax.mul(amplitude, negative), out)
    out = _value_where(lax.gt(x, number(103.892, x.dtype)), 0, out)
    return _value_where(lax.eq(lax.abs(x), number(math.inf, x.dtype)), math.nan, out)


lower_table(
    {
        aten.special_bessel_j0.default: lambda x: bessel_j(0, x),
        aten.special_bessel_j1.default: lambda x: bessel_j(1, x),
        aten.special_bessel_y0.default: lambda x: bessel_y(0, x),
        aten.special_bessel_y1.default: lambda x: bessel_y(1, x),
        aten.i0.default: _MODIFIED_BESSEL_I[0],
        aten.special_i0e.default: lax.bessel_i0e,
        aten.special_i1.default: _MODIFIED_BESSEL_I[1],
        aten.special_i1e.default: lax.bessel_i1e,
        aten.special_modified_bessel_i0.default: _MODIFIED_BESSEL_I[0],
        aten.special_modified_bessel_i1.default: _MODIFIED_BESSEL_I[1],
        aten.special_modified_bessel_k0.default: lambda x: _modified_bessel_k(0, False, x),
        aten.special_modified_bessel_k1.default: lambda x: _modified_bessel_k(1, False, x),
        aten.special_scaled_modified_bessel_k0.default: lambda x: _modified_bessel_k(0, True, x),
        aten.special_scaled_modified_bessel_k1.default: lambda x: _modified_bessel_k(1, True, x),
        aten.special_spherical_bessel_j0.default: _spherical_bessel_j0,
        aten.special_airy_ai.default: _airy_ai,
    },
    promote=Promotion.INT_TO_FLOAT,
)
