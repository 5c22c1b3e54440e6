"""Inputs on which the EvoNorm ops are compared with their references: planes of one pixel, of one value, and far from zero.

An offset of 2000 leaves σ(v·x) no slope in either precision; there the statistics must keep what x has left of its digits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from nbcnn.check.cases import Case
from nbcnn.ops.norms import reference as evonorm
from nbcnn.plan.shapes import ConvShape

NORMS = (
    ((1, 1, 5, 7), 1, "normal"),
    ((2, 4, 3, 4), 2, "normal"),
    ((1, 6, 3, 3), 3, "normal"),
    ((3, 3, 1, 1), 3, "normal"),
    ((1, 34, 2, 1), 1, "normal"),
    ((1, 34, 1, 2), 17, "normal"),
    ((2, 2, 3, 5), 1, "constant planes"),
    ((2, 2, 3, 5), 2, "offset 2000"),
)
"""(N,C,H,W), groups, values: one pixel; a group wider than a warp; more channels than a warp; a variance of zero; one far from the mean."""

QUADS = (((3, 8, 3, 4), 4, "normal"), ((2, 8, 4, 9), 1, "offset 2000"), ((2, 4, 2, 2), 4, "constant planes"), ((16, 64, 28, 28), 32, "normal"))
"""Images that kernels can hold in registers (`evonorm.held`), too many threads for the simulator."""


def _normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def norm_cases(norms: Sequence[tuple[tuple[int, ...], int, str]] = NORMS) -> Iterator[Case]:
    """The EvoNorm ops on images of such shapes, groups and values."""
    for shape, groups, values in norms:
        n, c, h, w = shape
        x, dy = _normal(40, *shape), _normal(41, *shape)
        if values == "constant planes":
            x[...] = x[:, :, :1, :1]
        if values == "offset 2000":
            x += 2000
        gamma, beta, v = 1 + 0.3 * _normal(42, c), _normal(43, c), np.random.default_rng(44).uniform(0.6, 1.4, c).astype(np.float32)
        running, label = _normal(45, c) ** 2, f"{'×'.join(map(str, shape))} {groups} groups, {values}"
        y, channel = np.empty_like(x), ((c,), "float32")
        kept = np.empty((2, n * groups), np.float32)
        terms, image = max(n * h * w, h * w * (c // groups)), (shape, "float32")
        evonorm.evonorm_s0_fprop(x, gamma, beta, v, y, *kept, groups=groups, eps=1e-5)
        outs = (image, *(((n * groups,), "float32"),) * 2)
        yield Case("evonorm_s0_fprop", label, (x, gamma, beta, v), outs, {"groups": groups, "eps": 1e-5}, terms)
        yield Case("evonorm_s0_grads", label, (dy, x, gamma, v, *kept), (image, *(channel,) * 3), {"groups": groups}, terms)
        label, terms = f"{'×'.join(map(str, shape))} {values}", n * h * w
        planes, channels = np.empty((2, n * c), np.float32), np.empty((3, c), np.float32)
        evonorm.evonorm_b0_fprop(x, gamma, beta, v, running, y, *planes, *channels, eps=1e-3, momentum=0.1)
        b0_outs = (image, *(((n * c,), "float32"),) * 2, *(channel,) * 2, 4)
        yield Case("evonorm_b0_fprop", label, (x, gamma, beta, v, running), b0_outs, {"eps": 1e-3, "momentum": 0.1}, terms)
        yield Case("evonorm_b0_infer", label, (x, gamma, beta, v, running), (image,), {"eps": 1e-3}, h * w)
        yield Case("evonorm_b0_grads", label, (dy, x, gamma, v, *planes, *channels[:2]), (image, *(channel,) * 3), {}, terms)
        yield from _ranks_cases(label, (dy, x, gamma, beta, v, running), planes, channels[:2], terms)


def _ranks_cases(label: str, ins: Sequence[np.ndarray], planes: np.ndarray, channels: np.ndarray, terms: int) -> Iterator[Case]:
    """The ops that share EvoNorm-B0's statistics, as rank 1 of 3; the others have 2 and no images."""
    dy, x, gamma, beta, v, running = ins
    n, c, *_ = x.shape
    image, plane, channel, parts = ((s, "float32") for s in (x.shape, (n * c,), (c,), (12 * c,)))
    yield Case("evonorm_b0_statistics", label, (x,), (plane, plane, parts), {"eps": 1e-3, "ranks": 3, "rank": 1, "images": n}, terms)
    rows = np.zeros((3, 4, c), np.float32)
    rows[:, 0] = [[2], [n], [0]]
    rows[:, 1], rows[:, 2], rows[:, 3] = x[0, :, 0, 0] + _normal(46, 3, c), _normal(47, 3, c), _normal(48, 3, c) ** 2
    kept = {"eps": 1e-3, "momentum": 0.1, "ranks": 3}
    yield Case("evonorm_b0_together", label, (x, gamma, beta, v, running, planes[1], rows.reshape(-1)), (image, channel, channel, 4), kept, terms)
    yield Case("evonorm_b0_sums", label, (dy, x, gamma, v, planes[1], channels[1]), (plane, *(channel,) * 4), {}, terms)
    own, batch, *grads = np.empty(n * c, np.float32), *np.empty((4, c), np.float32)
    evonorm.evonorm_b0_sums(dy, x, gamma, v, planes[1], channels[1], own, batch, *grads)
    yield Case("evonorm_b0_dgrad", label, (dy, x, gamma, v, *planes, *channels, own, batch), (image,), {}, terms)


CONV_NORMS = (
    (ConvShape(1, 3, 5, 4, 8, 3, 3, 1, 1), 4),
    (ConvShape(2, 5, 4, 3, 16, 3, 3, 1, 1), 16),
    (ConvShape(1, 4, 7, 5, 8, 3, 2, 2, 1), 1),
    (ConvShape(1, 2, 3, 3, 6, 3, 3, 1, 1), 3),
    (ConvShape(2, 6, 1, 1, 8, 1, 1, 1, 0), 2),
)
"""Convolution and groups: channels that are no multiple of four, stride 2, six filters (no block of eight), one pixel."""


def conv_norm_cases(shapes: Sequence[tuple[ConvShape, int]] = CONV_NORMS) -> Iterator[Case]:
    """A convolution with its EvoNorm."""
    for shape, groups in shapes:
        k, n = shape.K, shape.N
        x, w, b = _normal(50, *shape.x_shape), _normal(51, *shape.w_shape), _normal(52, k)
        channels = 1 + 0.3 * _normal(53, k), _normal(54, k), np.random.default_rng(55).uniform(0.6, 1.4, k).astype(np.float32)
        image, kept = (shape.y_shape, "float32"), ((n * groups,), "float32")
        attrs = {"stride": shape.stride, "pad": shape.pad, "groups": groups, "eps": 1e-5}
        terms = shape.gemm("fprop")[2] + shape.P * shape.Q * (k // groups)
        label = f"{shape.C}→{k} {shape.H}×{shape.W} s{shape.stride} n{n} {groups} groups"
        ins = (x, w, b, *channels)
        yield Case("conv_evonorm_s0_fprop", label, ins, (image, image, kept, kept), attrs, terms)
        yield Case("conv_evonorm_s0_infer", label, ins, (image,), attrs, terms)
        # As large as the variances are: far smaller ones let v·z + s alone divide, which may be near zero, whatever z was rounded to.
        running = shape.C * shape.R * shape.S * np.random.default_rng(56).uniform(0.5, 1.5, k).astype(np.float32)
        planes, channel = ((n * k,), "float32"), ((k,), "float32")
        attrs, terms = {"stride": shape.stride, "pad": shape.pad, "eps": 1e-3}, terms + n * shape.P * shape.Q
        outs = (image, image, planes, planes, channel, channel, 6)
        yield Case("conv_evonorm_b0_fprop", label, (*ins, running), outs, attrs | {"momentum": 0.1}, terms)
        yield Case("conv_evonorm_b0_infer", label, (*ins, running), (image,), attrs, terms)
