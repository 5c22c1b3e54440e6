"""Tests of batch normalisation: references against formulas and differences, how blocks share a batch, kernels compiled for real GPUs."""

from __future__ import annotations

import numpy as np
import pytest
from compiled import assert_lean, full

from nbcnn.gpu import device
from nbcnn.modes import named
from nbcnn.ops.kernel.call import Call
from nbcnn.ops.kernel.share import extent_of, share_of
from nbcnn.ops.norms import batch
from nbcnn.plan.shapes import numel
from nbcnn.plan.storage import numpy_dtype

SHAPES = [(2, 4, 3, 5), (4, 3, 2, 2)]
REFERENCES = batch.REFERENCES | {named("batchnorm_fprop"): batch.batchnorm_fprop, named("batchnorm_grads"): batch.batchnorm_grads}
ATTRS = {"eps": 1e-5, "momentum": 0.1}


def operands(rng, shape):
    c = shape[1]
    return rng.standard_normal(shape) + 2, 1 + 0.3 * rng.standard_normal(c), rng.standard_normal(c), rng.standard_normal(shape)


def forward(form, x, weight, bias, other):
    """y, mean, rstd and the running statistics, which were 0 and 1."""
    c = x.shape[1]
    made = [np.full_like(x, np.nan), *np.full((4, c), np.nan)]
    plus = (other,) if form == "_add_relu" else ()
    REFERENCES[named(f"batchnorm{form}_fprop")](x, weight, bias, np.zeros(c), np.ones(c), *plus, *made, **ATTRS)
    return made


@pytest.mark.parametrize("shape", SHAPES)
def test_the_norm_is_its_formula_and_running_statistics_are_pytorchs(shape, rng):
    x, weight, bias, other = operands(rng, shape)
    y, mean, rstd, running_mean, running_var = forward("", x, weight, bias, other)
    for c in range(shape[1]):
        values = x[:, c]
        wanted = weight[c] * (values - values.mean()) / np.sqrt(values.var() + 1e-5) + bias[c]
        np.testing.assert_allclose(y[:, c], wanted, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(mean, x.mean((0, 2, 3)), rtol=1e-12)
    np.testing.assert_allclose(rstd, 1 / np.sqrt(x.var((0, 2, 3)) + 1e-5), rtol=1e-12)
    np.testing.assert_allclose(running_mean, 0.1 * x.mean((0, 2, 3)), rtol=1e-12)
    np.testing.assert_allclose(running_var, 0.9 + 0.1 * x.var((0, 2, 3), ddof=1), rtol=1e-12)
    np.testing.assert_allclose(forward("_relu", x, weight, bias, other)[0], np.maximum(y, 0), rtol=1e-12)
    np.testing.assert_allclose(forward("_add_relu", x, weight, bias, other)[0], np.maximum(y + other, 0), rtol=1e-12)
    inferred = np.full_like(x, np.nan)
    batch.batchnorm_infer(x, weight, bias, mean, x.var((0, 2, 3)), inferred, eps=1e-5)
    np.testing.assert_allclose(inferred, y, rtol=1e-9)


@pytest.mark.parametrize("size", [4, 32], ids=["small images", "large images"])
def test_float32_statistics_of_channels_far_from_zero(size, rng):
    """One channel is constant, the mean of the other is 4,096 deviations: what a mean that is rounded is off must not be in the variance."""
    x = np.stack([np.full((16, size, size), 0.1), 4096 + rng.standard_normal((16, size, size))], 1).astype(np.float32)
    made = [np.full_like(x, np.nan), *np.full((4, 2), np.nan, np.float32)]
    batch.batchnorm_fprop(x, *np.ones((2, 2), np.float32), np.zeros(2, np.float32), np.ones(2, np.float32), *made, **ATTRS)
    y, mean, rstd, *_ = made
    exact = x.astype(np.float64)
    wanted, eps = 1 / np.sqrt(exact.var((0, 2, 3)) + 1e-5), np.finfo(np.float32).eps
    np.testing.assert_allclose(mean, exact.mean((0, 2, 3)), rtol=2 * eps)
    # The squares' sum is rounded as often as it has parts, and a constant that is half an ulp off the mean is 3e-9 away.
    np.testing.assert_allclose(rstd, wanted, rtol=16 * eps)
    again = np.empty_like(y)
    batch.batchnorm_apply(x, *np.ones((2, 2), np.float32), mean, rstd, again)
    np.testing.assert_array_equal(again, y)


def test_one_pixel_is_finite():
    y, _, _, _, running_var = forward("", np.full((1, 2, 1, 1), 7.0), np.ones(2), np.array([3.0, 4.0]), np.zeros((1, 2, 1, 1)))
    np.testing.assert_array_equal(y.reshape(-1), [3, 4])
    np.testing.assert_allclose(running_var, 0.9)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", ["", "_relu", "_gelu", "_hard_swish", "_swish", "_add_relu"])
def test_every_gradient_is_the_derivative(form, shape, rng):
    points = list(operands(rng, shape))
    dy, step = rng.standard_normal(shape), 1e-6
    y, mean, rstd, *_ = forward(form, *points)
    x, weight, bias, _ = points
    c = shape[1]
    if form == "_add_relu":
        dx, dother, dweight, dbias = np.full_like(x, np.nan), np.full_like(x, np.nan), np.full(c, np.nan), np.full(c, np.nan)
        batch.batchnorm_add_relu_grads(dy, x, y, weight, mean, rstd, dx, dother, dweight, dbias)
        got = [dx, dweight, dbias, dother]
    else:
        got = [np.full_like(x, np.nan), np.full(c, np.nan), np.full(c, np.nan)]
        REFERENCES[named(f"batchnorm{form}_grads")](dy, x, weight, bias, mean, rstd, *got)
    for position, gradient in enumerate(got):
        u = rng.standard_normal(points[position].shape)
        ends = [forward(form, *(p + sign * step * u if i == position else p for i, p in enumerate(points)))[0] for sign in (1, -1)]
        wanted = float(np.vdot(dy, (ends[0] - ends[1]) / (2 * step)))
        # Central differences of a float64 function: ε64/step of its size, and step² times a third derivative, which 1/σ³ near 1 leaves small.
        assert np.vdot(gradient, u) == pytest.approx(wanted, abs=1e-7 * np.linalg.norm(dy) * np.linalg.norm(u)), position


def test_statistics_of_several_ranks_are_those_of_the_whole_batch(rng):
    """Each rank's gradients are those of its own mean loss, so `dy` and what comes of it count n/n_r times; one rank has no images of the batch."""
    counts, shape = (3, 1, 0, 2), (6, 4, 3, 5)
    x, weight, bias, _ = operands(rng, shape)
    dy = rng.standard_normal(shape)
    wanted = forward("", x, weight, bias, x)
    wanted_dx, wanted_sums = np.full_like(x, np.nan), np.full((2, 4), np.nan)
    batch.batchnorm_grads(dy, x, weight, bias, *wanted[1:3], wanted_dx, wanted_sums[1], wanted_sums[0])
    ends = np.cumsum((0, *counts))
    own = [x[end - n : end] if n else x[:1] for n, end in zip(counts, ends[1:], strict=True)]
    cotangents = [(6 / n) * dy[end - n : end] if n else dy[:1] for n, end in zip(counts, ends[1:], strict=True)]
    parts = np.zeros(4 * 3 * 4)
    for rank, (images, part) in enumerate(zip(counts, own, strict=True)):
        row = np.full(4 * 3 * 4, np.nan)
        batch.batchnorm_statistics(part, row, ranks=4, rank=rank, images=images)
        parts += row
    total = np.zeros(8)
    for images, part, cotangent in zip(counts, own, cotangents, strict=True):
        made = [np.full_like(part, np.nan), *np.full((4, 4), np.nan)]
        batch.batchnorm_together(part, weight, bias, np.zeros(4), np.ones(4), parts, *made, **ATTRS, ranks=4)
        for got, each in zip(made[1:], wanted[1:], strict=True):
            np.testing.assert_allclose(got, each, rtol=1e-11)
        sums = np.full(8, np.nan)
        batch.batchnorm_sums(cotangent, part, weight, bias, *wanted[1:3], sums, *np.empty((2, 4)))
        total += images / 6 * sums
    np.testing.assert_allclose(total, wanted_sums.reshape(-1), rtol=1e-9, atol=1e-9)
    for images, end, part, cotangent in zip(counts, ends[1:], own, cotangents, strict=True):
        dx = np.full_like(part, np.nan)
        batch.batchnorm_dgrad(cotangent, part, weight, bias, *wanted[1:3], total, dx)
        if images:
            np.testing.assert_allclose(images / 6 * dx, wanted_dx[end - images : end], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(512, 64, 32, 32), (1, 1, 1, 1), (3, 17, 5, 7), (2, 2056, 3, 3), (512, 512, 4, 4)])
def test_blocks_cover_the_batch_once(shape, kind, layout):
    share = share_of(shape, layout, kind)
    extent = extent_of(shape, share)
    assert share.threads <= 256
    assert shape[1] % share.width == 0
    assert extent.tiles * share.columns * share.width >= shape[1] > (extent.tiles - 1) * share.columns * share.width
    assert extent.chunks * extent.chunk >= extent.pixels > (extent.chunks - 1) * extent.chunk
    assert extent.chunks < 2**16, "the grid's second axis"
    if not device.SIMULATOR and extent.pixels * shape[1] > 2**20:
        partials = 8 * extent.chunks * shape[1]
        assert partials <= 4 * numel(shape) / 16, "partials are small beside what they are made of"


SIZE = (64, 64, 32, 32)


def bound(op, kind, layout="NHWC", more=False):
    """The launches of an op on images of SIZE; `more`: with a second gradient."""
    image, channel = (SIZE, kind), ((64,), "float32")
    form, name = str(op).removeprefix("batchnorm").rpartition("_")[::2]
    plus = [image] if form == "_add_relu" else []
    ins, outs = {
        "fprop": ([image, *[channel] * 4, *plus], [image, *[channel] * 4]),
        "grads": ([image, image, *(plus or [channel]), *[channel] * 3, *[image] * more], [image, *plus, channel, channel]),
    }[name]
    arrays = [tuple(np.zeros(numel(shape), numpy_dtype(dtype)) for shape, dtype in side) for side in (ins, outs)]
    shapes = [tuple(shape for shape, _ in side) for side in (ins, outs)]
    kinds = [tuple(dtype for _, dtype in side) for side in (ins, outs)]
    call = Call(named(op), *arrays, *shapes, ATTRS, layout, in_dtypes=kinds[0], out_dtypes=kinds[1])
    scratch = np.zeros(batch.OPS[named(op)].scratch(call), np.uint8)
    return batch.OPS[named(op)].bind(Call(named(op), *arrays, *shapes, ATTRS, layout, scratch=scratch, in_dtypes=kinds[0], out_dtypes=kinds[1]))


FIRST = ("batchnorm_add_relu_grads", "bfloat16")
"""What pytest alone compiles, the kernels that read most tensors: one architecture, three kernels."""
REST = sorted((str(op), kind) for op in batch.OPS if str(op).endswith(("_fprop", "_grads")) for kind in ("bfloat16", "float32", "tfloat32"))


@pytest.mark.skipif(device.SIMULATOR, reason="the simulator compiles nothing")
@pytest.mark.parametrize(("op", "kind"), [FIRST, *full(*(each for each in REST if each != FIRST))])
def test_kernels_keep_everything_in_registers(op, kind):
    """At most 128 registers: two blocks of 256 threads then have 64 KB of loads in flight, twice what memory's latency asks for."""
    for more in (False, True) if op.endswith("_grads") else (False,):
        for launch in bound(op, kind, more=more):
            assert_lean(launch, "90a", 128)
