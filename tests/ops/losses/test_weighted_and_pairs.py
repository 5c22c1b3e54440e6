"""Tests of the cross-entropy with weights, smoothing and ignored labels, and of L1, Huber and BCE: against loops over single numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from nbcnn.check.one_op import run_op
from nbcnn.gpu.device import Host
from nbcnn.modes import named
from nbcnn.ops.kernel.call import host
from nbcnn.ops.losses import pairs, xent
from nbcnn.ops.losses.xent import NOTHING

EPS = float(np.finfo(np.float32).eps)
FORMULAS = {
    "l1": lambda y, t: abs(y - t),
    "huber": lambda y, t, delta=0.7: (y - t) ** 2 / 2 if abs(y - t) <= delta else delta * (abs(y - t) - delta / 2),
    "bce": lambda y, t: -t * math.log(1 / (1 + math.exp(-y))) - (1 - t) * math.log(1 / (1 + math.exp(y))),
    "mse": lambda y, t: (y - t) ** 2,
    "rmsle": lambda y, t, unit=3.0: (math.log(1 + max(unit * y, 0) + 1e-6) - math.log(1 + t + 1e-6)) ** 2,
}


def operands(rng, name, shape):
    y, target = 2 * rng.standard_normal(shape), rng.uniform(0, 1, shape)
    return y, target


def mean_of(name, y, target):
    value = np.empty(())
    pairs.LOSSES[name].fprop(y, target, value, **pairs.LOSSES[name].parameters)
    return float(value)


def gradient_of(name, y, target):
    saved, dy = [np.array(mean_of(name, y, target))] if pairs.LOSSES[name].root else [], np.empty_like(y)
    pairs.LOSSES[name].dgrad(y, target, *saved, dy, **pairs.LOSSES[name].parameters)
    return dy


def test_every_loss_has_a_formula():
    assert {str(op).rsplit("_", 1)[0] for op in pairs.OPS} == set(FORMULAS)


@pytest.mark.parametrize("name", FORMULAS)
def test_the_reference_follows_the_formula(rng, name):
    y, target = operands(rng, name, (3, 4, 5))
    wanted = np.mean([FORMULAS[name](float(a), float(b)) for a, b in zip(y.flat, target.flat, strict=True)])
    assert mean_of(name, y, target) == pytest.approx(math.sqrt(wanted) if pairs.LOSSES[name].root else wanted, rel=1e-12)


@pytest.mark.parametrize("name", FORMULAS)
def test_the_gradient_is_the_slope(rng, name):
    y, target = operands(rng, name, (3, 4, 5))
    along, h, dy = rng.standard_normal(y.shape), 1e-6, gradient_of(name, y, target)
    # Truncation h² and rounding 2^-52 / h; no element of y is within h of a kink.
    assert np.sum(dy * along) == pytest.approx((mean_of(name, y + h * along, target) - mean_of(name, y - h * along, target)) / (2 * h), abs=1e-8)


@pytest.mark.parametrize("name", FORMULAS)
def test_large_logits_and_nan(name):
    y, target = np.array([[200.0, -200.0]]), np.array([[1.0, 0.0]])
    with np.errstate(over="raise", invalid="raise"):
        assert np.isfinite(mean_of(name, y, target))
    if name == "bce":
        assert mean_of(name, y, target) == pytest.approx(0, abs=1e-80)
    y[0, 1] = np.nan
    assert np.isnan(mean_of(name, y, target))
    assert name == "rmsle" or np.isnan(gradient_of(name, y, target)[0, 1])


# 4,099 elements are more than one block's work, with a tail of three: two launches.
@pytest.mark.parametrize("shape", [(1,), (3, 5), (4099,)])
@pytest.mark.parametrize("name", FORMULAS)
def test_kernels_match_the_reference(device, rng, name, shape):
    y, target = (each.astype(np.float32) for each in operands(rng, name, shape))
    attrs = pairs.LOSSES[name].parameters
    (loss,) = run_op(pairs.OPS[named(f"{name}_fprop")], f"{name}_fprop", [y, target], [((), "float64")], device=device, attrs=attrs)
    exact = mean_of(name, y.astype(np.float64), target.astype(np.float64))
    # A handful of roundings for each positive term; the largest part of a term of the cross-entropy is below 10 and the term above 1e-3 of it.
    assert abs(loss - exact) <= 8 * EPS * exact + EPS
    if pairs.LOSSES[name].root:
        return  # tests/ops/test_parity.py has the bound of a gradient that reads the loss
    (dy,) = run_op(pairs.OPS[named(f"{name}_dgrad")], f"{name}_dgrad", [y, target], [(shape, "float32")], device=device, attrs=attrs)
    wanted = gradient_of(name, y.astype(np.float64), target.astype(np.float64))
    assert np.all(np.abs(dy - wanted) <= 6 * EPS * np.maximum(1 / y.size, np.abs(wanted)))


# -- cross-entropy


def looped(logits, labels, weights, smoothing, ignore):
    """(loss, what counts) of rows, one number at a time, from the definition."""
    lost = counted = 0.0
    for row, label in zip(logits, labels, strict=True):
        if label == ignore:
            continue
        whole = math.fsum(math.exp(each) for each in row)
        z = [math.log(whole) - each for each in row]
        lost += (1 - smoothing) * weights[label] * z[label] + smoothing / len(row) * sum(w * each for w, each in zip(weights, z, strict=True))
        counted += weights[label]
    return lost / counted, counted


def rows(rng, count=7, classes=5):
    return rng.standard_normal((count, classes)), rng.integers(0, classes, count).astype(np.int32), rng.uniform(0.5, 2, classes)


def run_host(logits, labels, weights, smoothing, ignore, share=1.0):
    """total, p, loss, count and dlogits, by the references in float64."""
    with_sum, options = np.append(weights, weights.sum()), {"smoothing": smoothing, "ignore": ignore, "share": share}
    total, p, loss, count, dlogits = np.empty(1), np.empty_like(logits), np.empty(()), np.empty(()), np.empty_like(logits)
    xent.xent_total(labels, with_sum, total, ignore=ignore)
    xent.weighted_xent_fprop(logits, labels, with_sum, total, p, loss, count, **options)
    xent.weighted_xent_dgrad(p, labels, with_sum, total, dlogits, **options)
    return total, p, float(loss), float(count), dlogits


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("ignore", [NOTHING, 2, -100])
def test_cross_entropy_follows_the_definition(rng, smoothing, ignore):
    logits, labels, weights = rows(rng)
    if ignore < 0:
        labels[[1, 4]] = max(ignore, -100)
    keep = ignore if ignore != NOTHING else -100
    _, p, loss, count, dlogits = run_host(logits, labels, weights, smoothing, keep)
    wanted, counted = looped(logits, labels, weights, smoothing, keep)
    assert (loss, count) == pytest.approx((wanted, counted), rel=1e-12)
    np.testing.assert_allclose(p.sum(1), 1, rtol=1e-12)
    assert not dlogits[labels == keep].any()
    along, h = rng.standard_normal(logits.shape), 1e-5
    slope = (looped(logits + h * along, labels, weights, smoothing, keep)[0] - looped(logits - h * along, labels, weights, smoothing, keep)[0]) / (
        2 * h
    )
    assert np.sum(dlogits * along) == pytest.approx(slope, abs=1e-8)


def test_shares_of_a_batch_add_up_to_it(rng):
    logits, labels, weights = rows(rng, 8)
    labels[2] = -100
    whole = run_host(logits, labels, weights, 0.1, -100)
    losses, gradients, counts = [], [], []
    for part in (slice(0, 6), slice(6, 8)):
        share = (part.stop - part.start) / 8
        with_sum, options = np.append(weights, weights.sum()), {"smoothing": 0.1, "ignore": -100, "share": share}
        p, loss, count, dlogits = np.empty_like(logits[part]), np.empty(()), np.empty(()), np.empty_like(logits[part])
        xent.weighted_xent_fprop(logits[part], labels[part], with_sum, whole[0], p, loss, count, **options)
        xent.weighted_xent_dgrad(p, labels[part], with_sum, whole[0], dlogits, **options)
        losses.append(share * float(loss))
        gradients.append(share * dlogits)
        counts.append(float(count))
    assert (sum(losses), sum(counts)) == pytest.approx((whole[2], whole[3]), rel=1e-12)
    np.testing.assert_allclose(np.concatenate(gradients), whole[4], rtol=1e-12, atol=1e-15)


def test_nothing_that_counts_loses_nothing_and_a_label_beyond_the_classes_is_nan(rng):
    logits, labels, weights = rows(rng)
    _, _, loss, count, dlogits = run_host(logits, np.full_like(labels, -1), weights, 0.1, -1)
    assert (loss, count, dlogits.any()) == (0, 0, False)
    labels[3] = 5
    assert np.isnan(run_host(logits, labels, weights, 0.1, -1)[2])


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_pixels_are_rows(device, rng, layout):
    shape = (2, 3, 4, 5)
    logits, labels = rng.standard_normal(shape).astype(np.float32), rng.integers(0, 3, (2, 4, 5)).astype(np.int32)
    labels[0, 1] = 255
    weights = np.array([1, 2, 0.5, 3.5], np.float32)
    ins = [logits, labels, weights]
    (total,) = run_op(xent.OPS[named("xent_total")], "xent_total", ins[1:], [((1,), "float32")], device=device, attrs={"ignore": 255})
    attrs, outs = {"smoothing": 0.1, "ignore": 255, "share": 0.5}, [(shape, "float32"), ((), "float64"), ((), "float64")]
    options = {"attrs": attrs, "device": device, "layout": layout}
    p, loss, count = run_op(xent.OPS[named("weighted_xent_fprop")], "weighted_xent_fprop", [*ins, total], outs, **options)
    reference = host(xent.weighted_xent_fprop)
    wide = [each.astype(np.float64) if each.dtype == np.float32 else each for each in (*ins, total)]
    want = run_op(reference, "weighted_xent_fprop", wide, [(shape, "float64"), *outs[1:]], attrs=attrs, device=Host())
    # Sums of three exponentials, and 40 terms below 10.
    for got, exact in zip((p, loss, count), want, strict=True):
        np.testing.assert_allclose(got, exact, rtol=20 * EPS)
