"""Tests of EvoNorm's references against the formulas in plain loops and against differences; its kernels compiled for real GPUs."""

from __future__ import annotations

import math

import numpy as np
import pytest
from compiled import assert_lean, on_every_arch

from nbcnn.modes import named
from nbcnn.ops.kernel.call import Call, Launch
from nbcnn.ops.norms import b0, b0_ranks, s0
from nbcnn.ops.norms import reference as evonorm
from nbcnn.ops.norms.plane import slab_of
from nbcnn.plan.shapes import numel

SHAPES = [(2, 4, 3, 5), (1, 6, 2, 2), (3, 2, 1, 1)]
EPS = {"S0": 1e-5, "B0": 1e-3}


@pytest.fixture(params=[4, evonorm.BLOCK], ids=["few elements at a time", "all images at once"])
def block(request, monkeypatch):
    monkeypatch.setattr(evonorm, "BLOCK", request.param)


def inputs(rng, shape):
    c = shape[1]
    return rng.standard_normal(shape), 1 + 0.3 * rng.standard_normal(c), rng.standard_normal(c), rng.uniform(0.6, 1.4, c)


def forward(kind, x, gamma, beta, v, running=None):
    """y and what is kept for the gradients."""
    n, c = x.shape[:2]
    y = np.full_like(x, np.nan)
    if kind == "S0":
        kept = [np.full(n * (c // 2), np.nan) for _ in range(2)]
        evonorm.evonorm_s0_fprop(x, gamma, beta, v, y, *kept, groups=c // 2, eps=EPS[kind])
    else:
        running = np.ones(c) if running is None else running
        kept = [np.full(n * c, np.nan) for _ in range(2)] + [np.full(c, np.nan) for _ in range(2)]
        evonorm.evonorm_b0_fprop(x, gamma, beta, v, running, y, *kept, running, eps=EPS[kind], momentum=0.1)
    return y, kept


def gradients(kind, dy, x, gamma, v, kept):
    outs = [np.full_like(x, np.nan), *(np.full(x.shape[1], np.nan) for _ in range(3))]
    if kind == "S0":
        evonorm.evonorm_s0_grads(dy, x, gamma, v, *kept, *outs, groups=x.shape[1] // 2)
    else:
        evonorm.evonorm_b0_grads(dy, x, gamma, v, *kept, *outs)
    return outs


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize("shape", SHAPES)
def test_s0_follows_its_formula(shape, rng):
    x, gamma, beta, v = inputs(rng, shape)
    y, _ = forward("S0", x, gamma, beta, v)
    for n, c, h, w in np.ndindex(shape):
        s = math.sqrt(np.var(x[n, c - c % 2 : c - c % 2 + 2]) + EPS["S0"])
        value = float(x[n, c, h, w])
        assert y[n, c, h, w] == pytest.approx(gamma[c] * value / (1 + math.exp(-v[c] * value)) / s + beta[c], rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
def test_b0_follows_its_formula_in_training_and_inference(shape, rng):
    x, gamma, beta, v = inputs(rng, shape)
    running = rng.uniform(0.5, 2, shape[1])
    before = running.copy()
    y, _ = forward("B0", x, gamma, beta, v, running)
    inferred = np.full_like(x, np.nan)
    evonorm.evonorm_b0_infer(x, gamma, beta, v, before, inferred, eps=EPS["B0"])
    for n, c, h, w in np.ndindex(shape):
        own = math.sqrt(np.var(x[n, c]) + EPS["B0"])
        for got, variance in ((y, np.var(x[:, c])), (inferred, before[c])):
            d = max(math.sqrt(variance + EPS["B0"]), v[c] * x[n, c, h, w] + own)
            assert got[n, c, h, w] == pytest.approx(gamma[c] * x[n, c, h, w] / d + beta[c], rel=1e-12, abs=1e-12)
    np.testing.assert_allclose(running, 0.9 * before + 0.1 * x.var((0, 2, 3), ddof=1), rtol=1e-12)


def test_the_running_variance_of_one_pixel_is_finite(rng):
    x, gamma, beta, v = inputs(rng, (1, 2, 1, 1))
    running = np.ones(2)
    y, _ = forward("B0", x, gamma, beta, v, running)
    np.testing.assert_allclose(running, 0.9)
    assert np.isfinite(y).all()


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize("values", ["normal", "constant", "offset"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["S0", "B0"])
def test_every_gradient_is_the_derivative(kind, shape, values, rng):
    x, gamma, beta, v = inputs(rng, shape)
    x = x[:, :, :1, :1] + np.zeros(shape) if values == "constant" else x + 7 * (values == "offset")
    dy, step = rng.standard_normal(shape), 1e-5
    got = gradients(kind, dy, x, gamma, v, forward(kind, x, gamma, beta, v)[1])
    points = [x, gamma, beta, v]
    for position, gradient in enumerate(got):
        u = rng.standard_normal(points[position].shape)
        ends = [forward(kind, *(p + sign * step * u if i == position else p for i, p in enumerate(points)))[0] for sign in (1, -1)]
        wanted = float(np.vdot(dy, (ends[0] - ends[1]) / (2 * step)))
        # Central differences: step² times a third derivative, which 1/s³ with s ≥ √eps = 0.003 (S0) and 0.03 (B0) scales.
        scale = np.linalg.norm(dy) * np.linalg.norm(u) / (EPS[kind] if values == "constant" or shape[2:] == (1, 1) else 1)
        assert np.vdot(gradient, u) == pytest.approx(wanted, abs=1e-7 * scale), position


@pytest.mark.parametrize("kind", ["S0", "B0"])
def test_statistics_and_gradients_survive_a_large_offset_in_float32(kind, rng):
    x, gamma, beta, v = (a.astype(np.float32) for a in inputs(rng, (2, 4, 9, 7)))
    x += np.float32(2000)
    dy = rng.standard_normal(x.shape).astype(np.float32)
    exact = [a.astype(np.float64) for a in (x, gamma, beta, v)]
    single, double = (forward(kind, *args)[1] for args in ((x, gamma, beta, v), exact))
    eps = np.finfo(np.float32).eps
    for got, wanted in zip(single, double, strict=True):
        assert np.linalg.norm(got - wanted) <= 4 * eps * math.sqrt(126) * np.linalg.norm(wanted)
    got = gradients(kind, dy, x, gamma, v, [s.astype(np.float32) for s in double])[0]
    wanted = gradients(kind, dy.astype(np.float64), exact[0], exact[1], exact[3], double)[0]
    # The sum of h·p over a group, of terms 2000 times larger than a deviation, is right to eps·√126 of the terms' norm.
    assert np.linalg.norm(got - wanted) <= 8 * eps * math.sqrt(126) * np.linalg.norm(wanted)


@pytest.mark.parametrize("offset", [0, 2000])
def test_b0_of_several_ranks_is_that_of_the_whole_batch(offset, rng):
    """Each rank's gradients are those of its own mean loss, so `dy` and what comes of it count n/n_r times; one rank has no images of the batch."""
    counts, shape = (3, 1, 0, 2), (6, 4, 3, 5)
    x, gamma, beta, v = inputs(rng, shape)
    x += offset
    x[0] *= 3  # an image whose own deviation decides
    dy, running = rng.standard_normal(shape), rng.uniform(0.5, 2, 4)
    wanted_running = running.copy()
    wanted_y, kept = forward("B0", x, gamma, beta, v, wanted_running)
    wanted = gradients("B0", dy, x, gamma, v, kept)
    ends = np.cumsum((0, *counts))
    own = [x[end - n : end] if n else x[:1] for n, end in zip(counts, ends[1:], strict=True)]
    cotangents = [(6 / n) * dy[end - n : end] if n else dy[:1] for n, end in zip(counts, ends[1:], strict=True)]
    made = []
    for rank, (images, part) in enumerate(zip(counts, own, strict=True)):
        planes, rows = np.full((2, 4 * len(part)), np.nan), np.full(4 * 4 * len(counts), np.nan)
        evonorm.evonorm_b0_statistics(part, *planes, rows, eps=EPS["B0"], ranks=len(counts), rank=rank, images=images)
        made.append((planes, rows))
    parts = sum(rows for _, rows in made)
    sums, results = [], []
    for part, cotangent, (planes, _) in zip(own, cotangents, made, strict=True):
        y, channels, moved = np.full_like(part, np.nan), np.full((2, 4), np.nan), running.copy()
        evonorm.evonorm_b0_together(
            part, gamma, beta, v, moved, planes[1], parts, y, *channels, moved, eps=EPS["B0"], momentum=0.1, ranks=len(counts)
        )
        np.testing.assert_allclose(moved, wanted_running, rtol=1e-11)
        found = [np.full(4 * len(part), np.nan), *np.full((4, 4), np.nan)]
        evonorm.evonorm_b0_sums(cotangent, part, gamma, v, planes[1], channels[1], *found)
        sums.append(found)
        results.append((y, channels))
    batch = sum(n / 6 * found[1] for n, found in zip(counts, sums, strict=True))
    for name, gradient, whole in zip(("gamma", "beta", "v"), zip(*(found[2:] for found in sums), strict=True), wanted[1:], strict=True):
        np.testing.assert_allclose(sum(n / 6 * g for n, g in zip(counts, gradient, strict=True)), whole, rtol=1e-9, atol=1e-9, err_msg=name)
    for images, end, part, cotangent, (planes, _), found, (y, channels) in zip(counts, ends[1:], own, cotangents, made, sums, results, strict=True):
        dx = np.full_like(part, np.nan)
        evonorm.evonorm_b0_dgrad(cotangent, part, gamma, v, *planes, *channels, found[0], batch, dx)
        if images:
            np.testing.assert_allclose(y, wanted_y[end - images : end], rtol=1e-9, atol=1e-9)
            np.testing.assert_allclose(images / 6 * dx, wanted[0][end - images : end], rtol=1e-9, atol=1e-9)


def test_b0_at_a_tie_takes_the_batch():
    x = np.zeros((2, 1, 2, 2))
    one = np.ones(1)
    dy = np.arange(8.0).reshape(x.shape)
    _, kept = forward("B0", x, one, one, one)
    dx, dgamma, dbeta, dv = gradients("B0", dy, x, one, one, kept)
    np.testing.assert_allclose(dx, dy / math.sqrt(EPS["B0"]))
    assert (dgamma.item(), dbeta.item(), dv.item()) == (0, 28, 0)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize(("channels", "group"), [(1, 1), (64, 2), (64, 1), (36, 36), (36, 2), (30, 10), (48, 24)])
def test_slabs_hold_whole_groups_and_cover_the_channels(channels, group, layout):
    slab = slab_of((2, channels, 7, 5), layout, group)
    assert slab.channels % group == 0
    assert slab.columns >= min(slab.channels, 32) or layout == "NCHW"
    assert slab.channels == group or slab.columns >= slab.channels
    assert slab.threads == slab.rows * slab.columns <= 256
    assert slab.threads & (slab.threads - 1) == 0


def stand_in(bind, scratch, op, ins, outs, layout, **attrs) -> list[Launch]:
    arrays = [tuple(np.zeros(numel(shape), np.float32) for shape in side) for side in (ins, outs)]
    call = Call(named(op), *arrays, tuple(ins), tuple(outs), attrs, layout)
    return bind(Call(named(op), *arrays, tuple(ins), tuple(outs), attrs, layout, scratch=np.zeros(scratch(call), np.uint8) if scratch else None))


def launches() -> list[Launch]:
    made = []
    for layout in ("NCHW", "NHWC"):
        x, c, g, p = (2, 64, 28, 28), (64,), (64,), (128,)
        s0_call = {"layout": layout, "groups": 32}
        made += stand_in(s0.bind_fprop, None, "evonorm_s0_fprop", [x, c, c, c], [x, g, g], eps=1e-5, **s0_call)
        made += stand_in(s0.bind_grads, s0.scratch_grads, "evonorm_s0_grads", [x, x, c, c, g, g], [x, c, c, c], **s0_call)
        made += stand_in(b0.bind_fprop, None, "evonorm_b0_fprop", [x, c, c, c, c], [x, p, p, c, c, c], layout, eps=1e-3, momentum=0.1)
        made += stand_in(b0.bind_infer, b0.scratch_infer, "evonorm_b0_infer", [x, c, c, c, c], [x], layout, eps=1e-3)
        made += stand_in(b0.bind_grads, b0.scratch_grads, "evonorm_b0_grads", [x, x, c, c, p, p, c, c], [x, c, c, c], layout)
    # The first launch of the one and the second of the other are b0's own.
    parts, ranks = (4 * 64 * 2,), {"eps": 1e-3, "ranks": 2}
    made += stand_in(b0_ranks.bind_statistics, None, "evonorm_b0_statistics", [x], [p, p, parts], "NHWC", rank=1, images=2, **ranks)[1:]
    made += stand_in(b0_ranks.bind_together, None, "evonorm_b0_together", [x, c, c, c, c, p, parts], [x, c, c, c], "NHWC", momentum=0.1, **ranks)[:1]
    return made


@pytest.mark.sampled
@on_every_arch
@pytest.mark.parametrize("launch", launches(), ids=lambda launch: launch.name)
def test_kernels_compile_without_spills(launch, arch):
    assert_lean(launch, arch)
