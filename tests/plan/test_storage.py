"""Tests of how values are stored: rounding to tf32 and bfloat16, and that it loses nothing it should keep."""

from __future__ import annotations

import numpy as np
import pytest

from nbcnn.plan.storage import ITEMSIZE, UNIT_ROUNDOFF, decode, encode, numpy_dtype

VALUES = np.concatenate([np.random.default_rng(1).standard_normal(10_000) * 10.0 ** np.arange(-20, 20).repeat(250), [0.0, -0.0, 1.0, 256.0]]).astype(
    "f4"
)


@pytest.mark.parametrize("dtype", UNIT_ROUNDOFF)
def test_one_rounding_errs_by_at_most_the_unit_roundoff(dtype):
    got = decode(encode(VALUES, dtype), dtype)
    # A float16 is infinite from 65,520 on, and a multiple of 2^-24 below 2^-14.
    inside = np.abs(VALUES) < 65520 if dtype == "float16" else np.isfinite(VALUES)
    least = 2.0**-25 if dtype == "float16" else 0.0
    assert np.all(np.abs(got - VALUES)[inside] <= np.maximum(UNIT_ROUNDOFF[dtype] * np.abs(VALUES), least)[inside])
    assert np.isinf(got[~inside]).all()
    assert np.array_equal(decode(encode(got, dtype), dtype), got)


@pytest.mark.parametrize("dtype", UNIT_ROUNDOFF)
def test_what_is_not_finite_stays_so(dtype):
    special = np.array([np.nan, np.inf, -np.inf], np.float32)
    special = np.concatenate([special, np.array([0x7F800001], np.uint32).view(np.float32)])
    np.testing.assert_array_equal(decode(encode(special, dtype), dtype), special)


def test_bfloat16_ties_go_to_even_and_tf32_ties_away_from_zero():
    ties = np.array([0x3F808000, 0x3F818000, 0xBF818000], np.uint32).view(np.float32)
    assert [hex(v) for v in encode(ties, "bfloat16")] == ["0x3f80", "0x3f82", "0xbf82"]
    ties = np.array([0x3F801000, 0x3F803000, 0xBF801000], np.uint32).view(np.float32)
    assert [hex(v) for v in encode(ties, "tfloat32").view(np.uint32)] == ["0x3f802000", "0x3f804000", "0xbf802000"]


def test_sizes_are_those_of_the_arrays():
    assert all(numpy_dtype(dtype).itemsize == size for dtype, size in ITEMSIZE.items())
    assert encode(VALUES, "float32") is VALUES
