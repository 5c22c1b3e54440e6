"""Tests of group, instance and layer normalisation: references against plain formulas and differences, kernels without parameters."""

from __future__ import annotations

import numpy as np
import pytest

from nbcnn.check.gradcheck import relative_error
from nbcnn.check.one_op import run_op
from nbcnn.modes import MODES, named
from nbcnn.ops.norms import group, layer
from nbcnn.plan.bounds import parity_bound


def group_norm(x, weight, bias, groups):
    y, kept = np.full_like(x, np.nan), np.full((2, len(x) * groups), np.nan)
    group.groupnorm_fprop(x, *(() if weight is None else (weight, bias)), y, *kept, groups=groups, eps=1e-5)
    return y, kept


def layer_norm(x, weight, bias):
    y, kept = np.full_like(x, np.nan), np.full((2, len(x)), np.nan)
    layer.layernorm_fprop(x, weight, bias, y, *kept, eps=1e-5)
    return y, kept


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_group_norm_is_its_formula(groups, rng):
    x, weight, bias = rng.standard_normal((3, 4, 5, 2)), rng.standard_normal(4), rng.standard_normal(4)
    y, _ = group_norm(x, weight, bias, groups)
    plain, _ = group_norm(x, None, None, groups)
    for n, c in np.ndindex(3, 4):
        first = c // (4 // groups) * (4 // groups)
        values = x[n, first : first + 4 // groups]
        wanted = (x[n, c] - values.mean()) / np.sqrt(values.var() + 1e-5)
        np.testing.assert_allclose(plain[n, c], wanted, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(y[n, c], weight[c] * wanted + bias[c], rtol=1e-12, atol=1e-12)


def test_layer_norm_is_its_formula(rng):
    x, weight, bias = rng.standard_normal((3, 4, 5, 2)), rng.standard_normal(40), rng.standard_normal(40)
    y, _ = layer_norm(x, weight, bias)
    for n in range(3):
        wanted = (x[n] - x[n].mean()) / np.sqrt(x[n].var() + 1e-5) * weight.reshape(4, 5, 2) + bias.reshape(4, 5, 2)
        np.testing.assert_allclose(y[n], wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["group", "instance", "layer"])
def test_every_gradient_is_the_derivative(kind, rng):
    shape, step = (2, 4, 3, 3), 1e-6
    size = 36 if kind == "layer" else 4
    points = [rng.standard_normal(shape), rng.standard_normal(size), rng.standard_normal(size)]
    dy = rng.standard_normal(shape)

    def forward(x, weight, bias):
        if kind == "layer":
            return layer_norm(x, weight, bias)
        return group_norm(x, *((weight, bias) if kind == "group" else (None, None)), 2 if kind == "group" else 4)

    _, kept = forward(*points)
    got = [np.full_like(each, np.nan) for each in points[: 1 if kind == "instance" else 3]]
    if kind == "layer":
        layer.layernorm_grads(dy, *points[:2], *kept, *got)
    else:
        group.groupnorm_grads(dy, points[0], *([points[1]] if kind == "group" else []), *kept, *got, groups=2 if kind == "group" else 4)
    for position, gradient in enumerate(got):
        u = rng.standard_normal(points[position].shape)
        ends = [forward(*(p + sign * step * u if i == position else p for i, p in enumerate(points)))[0] for sign in (1, -1)]
        wanted = float(np.vdot(dy, (ends[0] - ends[1]) / (2 * step)))
        # Central differences of a float64 function: ε64/step of its size, and step² times a third derivative, which 1/σ³ near 1 leaves small.
        assert np.vdot(gradient, u) == pytest.approx(wanted, abs=1e-7 * np.linalg.norm(dy) * np.linalg.norm(u)), position


@pytest.mark.parametrize("key", [("naive", "fp32"), ("cudacore", "fp32")], ids="-".join)
def test_kernels_without_parameters_are_right(key, device, rng):
    row, shape = MODES[key], (2, 3, 3, 5)
    x, dy = (rng.standard_normal(shape).astype(np.float32) for _ in range(2))
    exact, kept = group_norm(x.astype(np.float64), None, None, 3)
    image, statistic = (shape, "float32"), ((6,), "float32")
    options = {"device": device, "layout": row.layout}
    made = run_op(
        group.OPS[named("groupnorm_fprop")], "groupnorm_fprop", (x,), (image, statistic, statistic), attrs={"groups": 3, "eps": 1e-5}, **options
    )
    for got, wanted in zip(made, (exact, *kept), strict=True):
        assert relative_error(got, wanted) <= parity_bound(15, "fp32")
    (dx,) = run_op(group.OPS[named("groupnorm_grads")], "groupnorm_grads", (dy, x, *made[1:]), (image,), attrs={"groups": 3}, **options)
    wanted = np.empty_like(exact)
    group.groupnorm_grads(dy.astype(np.float64), x.astype(np.float64), *kept, wanted, groups=3)
    assert relative_error(dx, wanted) <= parity_bound(15, "fp32")
