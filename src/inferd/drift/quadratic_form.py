"""The tail of a quadratic form in normal variables: of a sum of squares of independent standard normal variables, each
times a weight that is not negative.

The probability that the sum is above ``value`` is an integral of its moment generating function,

    1 / (2 pi i) * integral of exp(-value z) / (z prod sqrt(1 - 2 weight z)) dz

along any path from below to above that meets the real axis between 0 and 1 / (2 largest weight). Here the path meets it
at the saddle point, where the integrand is least on the real axis and largest on the path. So the result keeps its
digits far out in the tail (S. O. Rice, "Distribution of Quadratic Forms in Normal Random Variables", 1980). J. P. Imhof
(1961) and R. B. Davies (1980) integrate along the imaginary axis, where a small probability is a difference of large
numbers.

The path is a hyperbola around the branch cuts, z = sin(angle + i t) / (2 largest weight), on which the integrand falls
fast. In the plane of t the nearest singularities are the pole at the distance ``angle`` and the cuts at that of
``pi / 2 - angle``. Both are at least 0.7 widths of the integrand, so the trapezoidal rule errs by about
exp(-2 pi * 0.7 * STEPS).
"""

from __future__ import annotations

import cmath
import functools
import math
from collections.abc import Sequence
from typing import Final

STEPS: Final = 8.0
"""Of the trapezoidal rule, in one width of the integrand."""

NEGLIGIBLE: Final = 1e-15
"""The last term of the sum is smaller than this part of it."""

NEAREST: Final = 1.0 - 2.0**-40
"""Part of the way to the first branch point where the path meets the real axis at most."""


def tail(weights: Sequence[float], value: float) -> float:
    """The probability that the sum is ``value`` or more. Weights of 0 count nothing."""
    largest = max(weights, default=0.0)
    if value <= 0.0:
        return 1.0
    if largest <= 0.0:
        return 0.0
    doubled = [2.0 * weight / largest for weight in weights if weight > 0.0]
    value /= largest
    saddle = _saddle(doubled, value)
    at_saddle = _exponent(doubled, value, saddle).real
    curvature = 0.5 * sum([(weight / (1.0 - weight * saddle)) ** 2 for weight in doubled]) + saddle**-2
    sine = 2.0 * saddle
    cosine = math.sqrt((1.0 - sine) * (1.0 + sine))
    step = 2.0 / (STEPS * cosine * math.sqrt(curvature))
    found, node, most = 0.5 * cosine, 0, 1.0
    while most > NEGLIGIBLE * abs(found):
        node += 1
        sinh, cosh = math.sinh(node * step), math.cosh(node * step)
        integrand = cmath.exp(_exponent(doubled, value, complex(0.5 * sine * cosh, 0.5 * cosine * sinh)) - at_saddle)
        found += (integrand * complex(cosine * cosh, -sine * sinh)).real
        most = abs(integrand) * cosh
    return min(1.0, 0.5 * step / math.pi * found * math.exp(at_saddle))


def _exponent(doubled: Sequence[float], value: float, z: complex) -> complex:
    """The logarithm of the integrand."""
    return -value * z - cmath.log(z) - 0.5 * sum([cmath.log(1.0 - weight * z) for weight in doubled])


def _saddle(doubled: Sequence[float], value: float) -> float:
    """Where the integrand is least between 0 and the first branch point, 0.5; by bisection of its derivative."""
    low, high = 0.0, 0.5 * NEAREST
    for _ in range(60):
        middle = 0.5 * (low + high)
        if 0.5 * sum([weight / (1.0 - weight * middle) for weight in doubled]) - 1.0 / middle < value:
            low = middle
        else:
            high = middle
    return high


@functools.lru_cache(maxsize=256)
def quantile(weights: tuple[float, ...], probability: float) -> float:
    """What the sum is above with this probability; by bisection."""
    low = high = sum(weights)
    if high <= 0.0:
        return 0.0
    while tail(weights, high) > probability:
        high *= 2.0
    while low > 0.0 and tail(weights, low) < probability:
        low *= 0.5
    for _ in range(40):
        middle = 0.5 * (low + high)
        if tail(weights, middle) > probability:
            low = middle
        else:
            high = middle
    return high
