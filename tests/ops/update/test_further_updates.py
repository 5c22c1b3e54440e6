"""Tests of Nesterov's momentum, AdamW, accumulated gradients and averages of weights: against loops over single numbers written from the formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest

from nbcnn.check.one_op import run_op
from nbcnn.gpu.device import Host
from nbcnn.modes import named
from nbcnn.ops.update import accumulate, ema, optimizers
from nbcnn.ops.update.advance import STEP

EPS = float(np.finfo(np.float32).eps)
RATES = [0.1, 0.05, 0.2]


def state_at(step):
    state = np.zeros(8, np.int64)
    state[STEP] = step
    return state


def weights(rng, count=11, steps=4):
    return rng.standard_normal(count), [rng.standard_normal(count) for _ in range(steps)]


def rate(step):
    return float(np.float32(RATES[min(step, len(RATES) - 1)]))


def test_nesterov_follows_the_scalar_loop(rng):
    w, gradients = weights(rng)
    want = []
    for index, weight in enumerate(w.tolist()):
        m = 0.0
        for step, gradient in enumerate(gradients):
            g = float(gradient[index]) + (0.1 * weight if index < 6 else 0)
            m = 0.9 * m + g
            weight -= rate(step) * (g + 0.9 * m)
        want.append(weight)
    m = np.zeros_like(w)
    for step, g in enumerate(gradients):
        state = state_at(step)
        optimizers.SGD.reference(w, g, m, np.array(RATES, np.float32), state, w, m, state, momentum=0.9, nesterov=True, weight_decay=0.1, decayed=6)
    np.testing.assert_allclose(w, want, rtol=1e-12)


def test_adamw_follows_the_scalar_loop_and_leaves_the_moments_alone(rng):
    w, gradients = weights(rng)
    want = []
    for index, weight in enumerate(w.tolist()):
        m = v = 0.0
        for step, gradient in enumerate(gradients):
            g, t = float(gradient[index]), step + 1
            weight -= rate(step) * 0.1 * weight if index < 6 else 0
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
            weight -= rate(step) * (m / (1 - 0.9**t)) / (math.sqrt(v / (1 - 0.999**t)) + 1e-8)
        want.append((weight, m, v))
    arrays = [w, np.zeros_like(w), np.zeros_like(w)]
    for step, g in enumerate(gradients):
        state = state_at(step)
        lr = np.array(RATES, np.float32)
        optimizers.ADAM.reference(arrays[0], g, *arrays[1:], lr, state, *arrays, state, decoupled=True, weight_decay=0.1, decayed=6)
    # The rate times the decay is a product of two float32.
    np.testing.assert_allclose(np.transpose(arrays), want, rtol=4 * EPS, atol=1e-14)


@pytest.mark.parametrize("op", ["sgd", "adam"])
def test_the_kernels_of_the_new_forms_match_the_references(device, rng, op):
    moments, attrs = (1, {"momentum": 0.9, "nesterov": True}) if op == "sgd" else (2, {"decoupled": True})
    w, gradients = weights(rng, steps=1 + moments)
    ins = [w, gradients[0], *(np.abs(each) for each in gradients[1:]), np.array(RATES), state_at(1)]
    ins = [each.astype(np.float32) if each.dtype == np.float64 else each for each in ins]
    attrs |= {"weight_decay": 0.1, "decayed": 6, "clip_value": 0.5}
    outs = [0, *range(2, 2 + moments), 3 + moments]
    got = run_op(optimizers.OPS[named(op)], op, ins, outs, device=device, attrs=attrs)
    want = run_op(optimizers.HOST[named(op)], op, ins, outs, device=Host(), attrs=attrs)
    for one, other in zip(got, want, strict=True):
        # At most ten roundings, each of a number below 8.
        np.testing.assert_allclose(one, other, rtol=10 * EPS, atol=40 * EPS)


@pytest.mark.parametrize("count", [1, 11, 1025])
def test_parts_of_a_batch_add_up(device, rng, count):
    parts, total = [rng.standard_normal(count).astype(np.float32) for _ in range(3)], np.full(count, np.nan, np.float32)
    counts, counted, scalar = (4, 4, 2), np.full(4, np.nan), ((), "float64")
    losses = rng.uniform(1, 2, 3)
    for number, (g, examples) in enumerate(zip(parts, counts, strict=True)):
        first, last = number == 0, number == 2
        attrs = {"images": examples, "examples": examples, "first": first, "share": 1.0, "root": False}
        ins = [np.array(losses[number]), counted]
        counted, loss, counts_of = run_op(accumulate.OPS[named("weigh_part")], "weigh_part", ins, [1, scalar, scalar], device=device, attrs=attrs)
        attrs = {"first": first, "last": last}
        (made,) = run_op(accumulate.OPS[named("accumulate")], "accumulate", [g, total, counted], [0 if last else 1], device=device, attrs=attrs)
        total = total if last else made
    # A product and one sum per part and a product at the end, of numbers below 4 · 8 · 3, a tenth of them at last.
    np.testing.assert_allclose(made, np.average(np.float64(parts), axis=0, weights=counts), atol=7 * 10 * EPS)
    assert (float(loss), float(counts_of)) == (pytest.approx(np.average(losses, weights=counts), rel=1e-15), 10)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("case", ["examples", "labels", "nothing", "root", "root of 0", "nan"])
def test_the_kernel_that_weighs_parts_matches_the_reference(device, case, first):
    own, whole = (0.0, 0.0) if case == "nothing" else (1.5, 2.5)
    given = [] if case in ("examples", "root", "root of 0") else [np.array(own), np.array([whole], np.float32)]
    before = np.zeros(4) if case in ("nothing", "root of 0") else np.array([3.0, 8.0, 3.0, 0.125])
    ins = [np.array({"nan": np.nan, "root of 0": 0.0}.get(case, 0.7)), before, *given]
    attrs = {"images": 3, "examples": 6, "first": first, "share": 1.0 if "root" in case else 0.5, "root": "root" in case}
    scalar = ((), "float64")
    got = run_op(accumulate.OPS[named("weigh_part")], "weigh_part", ins, [1, scalar, scalar], device=device, attrs=attrs)
    want = run_op(accumulate.HOST[named("weigh_part")], "weigh_part", ins, [1, scalar, scalar], device=Host(), attrs=attrs)
    for one, other in zip(got, want, strict=True):
        # A handful of roundings of float64.
        np.testing.assert_allclose(one, other, rtol=8 * 2**-53)
    assert np.isnan(float(want[1])) == (case == "nan")
    if case in ("nothing", "root of 0"):
        assert want[0][3] == 0
        assert float(want[1]) == 0


@pytest.mark.parametrize("decay", [0.5, 0.999])
def test_the_average_follows_its_recurrence(device, rng, decay):
    average, want = np.ones(7, np.float32), np.ones(7)
    for step in range(4):
        w = rng.standard_normal(7).astype(np.float32)
        (average,) = run_op(ema.OPS[named("ema")], "ema", [average, w, state_at(step)], [0], device=device, attrs={"decay": decay})
        share = 1 - min(decay, (2 + step) / (11 + step))
        want += share * (w - want)
    # Three roundings per step of numbers below 8.
    np.testing.assert_allclose(average, want, atol=4 * 3 * 8 * EPS / 2)
