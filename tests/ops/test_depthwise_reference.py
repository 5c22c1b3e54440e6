"""The NumPy paths of depthwise convolution against the definition, one product at a time, in both of their forms."""

from __future__ import annotations

import numpy as np
import pytest

from nbcnn.ops.conv import depthwise_reference
from nbcnn.ops.conv.grouped import gconv_dgrad, gconv_fprop, gconv_wgrad


def defined(x, w, out, stride, dilation, pad):
    """y, and for each output the elements that each tap sees: (n, c, p, q), of x bordered with zeros."""
    y = np.zeros((*x.shape[:2], *out))
    seen = {}
    for r in range(w.shape[2]):
        for s in range(w.shape[3]):
            taps = np.zeros_like(y)
            for p in range(out[0]):
                for q in range(out[1]):
                    h, v = p * stride[0] + r * dilation[0] - pad[0], q * stride[1] + s * dilation[1] - pad[1]
                    if 0 <= h < x.shape[2] and 0 <= v < x.shape[3]:
                        taps[:, :, p, q] = x[:, :, h, v]
            seen[r, s] = taps
            y += w[None, :, 0, r, s, None, None] * taps
    return y, seen


SHAPES = [
    ((3, 5, 4, 4), (3, 3), (1, 1), (1, 1), (1, 1), (4, 4)),
    ((2, 3, 4, 4), (3, 3), (2, 2), (1, 1), (1, 1), (2, 2)),
    ((2, 3, 13, 11), (3, 3), (1, 1), (1, 1), (1, 1), (13, 11)),
    ((2, 3, 14, 12), (3, 3), (2, 2), (1, 1), (1, 1), (7, 6)),
    ((2, 3, 15, 12), (4, 3), (2, 1), (1, 2), (1, 0), (7, 8)),
    ((2, 2, 16, 17), (3, 2), (3, 2), (2, 3), (0, 2), (4, 9)),
    ((2, 300, 12, 12), (5, 5), (1, 1), (1, 1), (0, 0), (8, 8)),
    ((1, 2, 20, 20), (1, 1), (3, 3), (1, 1), (0, 0), (7, 7)),
]


@pytest.mark.parametrize("part", [depthwise_reference.PART, 500])
@pytest.mark.parametrize(("x_shape", "window", "stride", "dilation", "pad", "out"), SHAPES)
def test_the_three_passes_are_those_of_the_definition(x_shape, window, stride, dilation, pad, out, part, monkeypatch):
    monkeypatch.setattr(depthwise_reference, "PART", part)
    rng = np.random.default_rng(1)
    channels = x_shape[1]
    x, w, dy = rng.normal(size=x_shape), rng.normal(size=(channels, 1, *window)), rng.normal(size=(*x_shape[:2], *out))
    how = {"groups": channels, "stride": stride, "dilation": dilation, "pad": pad}
    wanted, seen = defined(x, w, out, stride, dilation, pad)
    y, dx, dw, db = np.full(dy.shape, np.nan), np.full(x_shape, np.nan), np.full(w.shape, np.nan), np.full(channels, np.nan)
    gconv_fprop(x, w, y, **how)
    gconv_dgrad(dy, w, dx, **how)
    gconv_wgrad(x, dy, dw, db, **how)
    # float64 sums of at most 300 terms of size 1.
    np.testing.assert_allclose(y, wanted, rtol=0, atol=1e-12)
    for (r, s), taps in seen.items():
        np.testing.assert_allclose(dw[:, 0, r, s], (taps * dy).sum((0, 2, 3)), rtol=0, atol=1e-11)
    np.testing.assert_allclose(db, dy.sum((0, 2, 3)), rtol=0, atol=1e-12)
    # ⟨dy, conv(z)⟩ = ⟨dgrad(dy), z⟩ for every z.
    z = rng.normal(size=x_shape)
    np.testing.assert_allclose((dx * z).sum(), (dy * defined(z, w, out, stride, dilation, pad)[0]).sum(), rtol=0, atol=1e-9)
    assert np.isfinite(dx).all()
