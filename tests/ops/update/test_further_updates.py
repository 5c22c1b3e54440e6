"""Tests of Nesterov's momentum, AdamW, accumulated gradients and averages of weights: against loops over single numbers written from the formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest

from nbcnn.check.one_op import run_op
from nbcnn.gpu.device import Host
from nbcnn.ops.kernel.call import host
from nbcnn.ops.update import accumulate, adam, ema, sgd
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
        sgd.sgd(w, g, m, np.array(RATES, np.float32), state, w, m, state, momentum=0.9, nesterov=True, weight_decay=0.1, decayed=6)
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
        adam.adam(arrays[0], g, *arrays[1:], np.array(RATES, np.float32), state, *arrays, state, decoupled=True, weight_decay=0.1, decayed=6)
    # The rate times the decay is a product of two float32.
    np.testing.assert_allclose(np.transpose(arrays), want, rtol=4 * EPS, atol=1e-14)


@pytest.mark.parametrize("op", ["sgd", "adam"])
def test_the_kernels_of_the_new_forms_match_the_references(device, rng, op):
    module, moments, attrs = (sgd, 1, {"momentum": 0.9, "nesterov": True}) if op == "sgd" else (adam, 2, {"decoupled": True})
    w, gradients = weights(rng, steps=1 + moments)
    ins = [w, gradients[0], *(np.abs(each) for each in gradients[1:]), np.array(RATES), state_at(1)]
    ins = [each.astype(np.float32) if each.dtype == np.float64 else each for each in ins]
    attrs |= {"weight_decay": 0.1, "decayed": 6, "clip_value": 0.5}
    outs = [0, *range(2, 2 + moments), 3 + moments]
    got = run_op(module.OPS[op], op, ins, outs, device=device, attrs=attrs)
    want = run_op(host(getattr(module, op)), op, ins, outs, device=Host(), attrs=attrs)
    for one, other in zip(got, want, strict=True):
        # At most ten roundings, each of a number below 8.
        np.testing.assert_allclose(one, other, rtol=10 * EPS, atol=40 * EPS)


@pytest.mark.parametrize("count", [1, 11, 1025])
def test_parts_of_a_batch_add_up(device, rng, count):
    parts, total = [rng.standard_normal(count).astype(np.float32) for _ in range(3)], np.full(count, np.nan, np.float32)
    shares = (0.4, 0.4, 0.2)
    want = np.zeros(count, np.float32)
    for number, (g, share) in enumerate(zip(parts, shares, strict=True)):
        out, attrs = (0 if number == 2 else 1), {"weight": share, "first": number == 0}
        (made,) = run_op(accumulate.OPS["accumulate"], "accumulate", [g, total], [out], device=device, attrs=attrs)
        total = made if out else total
        want = np.float32(share) * g + want
    # A product and a sum a part, which a GPU may round once: at most six roundings of numbers below 8.
    np.testing.assert_allclose(made, want, atol=6 * 8 * EPS / 2)


@pytest.mark.parametrize("decay", [0.5, 0.999])
def test_the_average_follows_its_recurrence(device, rng, decay):
    average, want = np.ones(7, np.float32), np.ones(7)
    for step in range(4):
        w = rng.standard_normal(7).astype(np.float32)
        (average,) = run_op(ema.OPS["ema"], "ema", [average, w, state_at(step)], [0], device=device, attrs={"decay": decay})
        share = 1 - min(decay, (2 + step) / (11 + step))
        want += share * (w - want)
    # Three roundings a step of numbers below 8.
    np.testing.assert_allclose(average, want, atol=4 * 3 * 8 * EPS / 2)
