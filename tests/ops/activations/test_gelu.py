"""Tests of the form in which the kernels compute GELU."""

from __future__ import annotations

import math

import numpy as np

from nbcnn.ops.activations.gelu import COEFFICIENTS, SLOPE


def test_the_polynomial_is_the_tail_of_the_normal_distribution():
    """To half an ulp of float32, up to where Φ(−a) is no normal number any more."""
    a = np.linspace(0, 13.5, 20001)
    t = 1 / (1 + SLOPE * a)
    got = t * np.polynomial.polynomial.polyval(t, COEFFICIENTS)
    wanted = np.array([0.5 * math.erfc(each * math.sqrt(0.5)) * math.exp(each * each / 2) for each in a])
    assert np.abs(got / wanted - 1).max() < 2.0**-24
