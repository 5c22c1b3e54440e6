"""Tests of SGD, Adam, gradient norm, packing and StepState: against loops over single numbers written from the formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest
from compiled import assert_lean, on_every_arch

from nbcnn.check.one_op import Bound, run_op
from nbcnn.gpu.device import Host
from nbcnn.modes import named
from nbcnn.ops.kernel.call import host
from nbcnn.ops.update import advance, grad_norm, optimizers, pack_weights, rule
from nbcnn.ops.update.advance import COUNT, LAST_LOSS, LOSS_SUM, NONFINITE, POSITION, STEP

EPS = float(np.finfo(np.float32).eps)

IMPLS = {
    "sgd": (host(optimizers.SGD.reference), optimizers.OPS[named("sgd")]),
    "adam": (host(optimizers.ADAM.reference), optimizers.OPS[named("adam")]),
    "grad_norm": (host(grad_norm.grad_norm), grad_norm.OPS[named("grad_norm")]),
    "pack_weights": (host(pack_weights.pack_weights), pack_weights.OPS[named("pack_weights")]),
    "advance": (host(advance.advance), advance.OPS[named("advance")]),
}
MOMENTS = {"sgd": 1, "adam": 2}


@pytest.fixture(params=["reference", pytest.param("kernel", marks=pytest.mark.gpu)])
def bind(request):
    """bind(op, ins, outs): the op bound to the float32 reference or to the kernels."""

    def bound(op, ins, outs, **options):
        reference, kernels = IMPLS[op]
        if request.param == "reference":
            return Bound(reference, op, ins, outs, device=Host(), **options)
        return Bound(kernels, op, ins, outs, device=request.getfixturevalue("device"), **options)

    return bound


def step_state(step=0):
    state = np.zeros(8, np.int64)
    state[STEP] = step
    return state


def update(bind, op, w, gradients, rates, *, first_step=0, norms=None, moments=None, **attrs):
    """(w, moments …, state) after one update for each of `gradients`, with what `advance` would do in between."""
    moments = moments or [np.zeros_like(w) for _ in range(MOMENTS[op])]
    n = 1 + len(moments)
    ins = [w, gradients[0], *moments, np.array(rates, np.float32), step_state(first_step)]
    if norms is not None:
        ins.append(np.array(norms[0]))
    bound = bind(op, ins, [0, *range(2, 1 + n), 2 + n], attrs=attrs)
    for i, gradient in enumerate(gradients):
        bound.device.upload(bound.call.ins[1], gradient)
        state = bound.results()[-1]
        state[STEP] = first_step + i
        bound.device.upload(bound.call.ins[2 + n], state)
        if norms is not None:
            bound.device.upload(bound.call.ins[3 + n], np.array([norms[i]]))
        bound.run()
    return bound.results()


def scalar_gradient(g, w, index, norm=None, weight_decay=0.0, clip_value=0.0, clip_norm=0.0, decayed=0):
    """What clipping and decay make of one gradient, in Python floats."""
    if clip_norm:
        g *= min(1.0, clip_norm / (norm + 1e-6))
    if clip_value:
        g = max(-clip_value, min(clip_value, g))
    return g + weight_decay * w if index < decayed else g


def scalar_sgd(w, gradients, rates, *, norms=None, momentum=0.0, **attrs):
    """(weights, momenta, Σ of the magnitudes of everything added to a weight), one element and one step at a time."""
    result = []
    for index, weight in enumerate(w.tolist()):
        m = size = 0.0
        for step, gradient in enumerate(gradients):
            g = scalar_gradient(float(gradient[index]), weight, index, norms and norms[step], **attrs)
            m = momentum * m + g
            rate = float(np.float32(rates[min(step, len(rates) - 1)]))
            size += abs(weight) + rate * (abs(momentum * m) + abs(gradient[index]) + attrs.get("weight_decay", 0) * abs(weight))
            weight -= rate * m
        result.append((weight, m, size))
    return np.array(result).T


def scalar_adam(w, gradients, rates, *, first_step=0, norms=None, beta1=0.9, beta2=0.999, eps=1e-8, **attrs):
    """(weights, first moments, second moments), one element and one step at a time."""
    result = []
    for index, weight in enumerate(w.tolist()):
        m = v = 0.0
        for i, gradient in enumerate(gradients):
            g = scalar_gradient(float(gradient[index]), weight, index, norms and norms[i], **attrs)
            t = first_step + i + 1
            m = beta1 * m + (1 - beta1) * g
            v = beta2 * v + (1 - beta2) * g * g
            rate = float(np.float32(rates[min(first_step + i, len(rates) - 1)]))
            weight -= rate * (m / (1 - beta1**t)) / (math.sqrt(v / (1 - beta2**t)) + eps)
        result.append((weight, m, v))
    return np.array(result).T


def parameters(rng, count=11, steps=4):
    """Weights and gradients of `count` elements: quads and a tail of three, the last two of them padding zeros."""
    w = rng.standard_normal(count).astype(np.float32)
    gradients = [rng.standard_normal(count).astype(np.float32) for _ in range(steps)]
    for array in (w, *gradients):
        array[-2:] = 0
    return w, gradients


RATES = [0.1, 0.05, 0.2]
NORMS = [2.0, 0.3, 5.0, 1.0]
SGD_CASES = [
    {},
    {"momentum": 0.9},
    {"momentum": 0.9, "weight_decay": 0.01, "decayed": 6},
    {"momentum": 0.5, "clip_value": 0.4},
    {"momentum": 0.9, "clip_norm": 1.0, "norms": NORMS},
    {"momentum": 0.9, "clip_norm": 1.0, "norms": NORMS, "clip_value": 0.4, "weight_decay": 0.1, "decayed": 9},
]


@pytest.mark.parametrize("case", SGD_CASES)
def test_sgd_follows_the_scalar_loop(bind, rng, case):
    w, gradients = parameters(rng)
    got_w, got_m, state = update(bind, "sgd", w, gradients, RATES, **case)
    want_w, want_m, size = scalar_sgd(w, gradients, RATES, **case)
    # `size` adds up, step by step, the magnitudes that make a weight. A gradient takes at most six roundings of eps/2
    # (norm factor 3, product 1, decay 2), m and w two more each: 5 eps of the step's magnitudes. An error in m is
    # carried into each of the later steps: at most four times.
    assert np.all(np.abs(got_w - want_w) <= 4 * 5 * EPS * size)
    assert np.all(np.abs(got_m - want_m) <= 4 * 5 * EPS * size / min(RATES))
    assert state[NONFINITE] == 0
    np.testing.assert_array_equal(got_w[-2:], 0)


def test_first_momentum_is_the_gradient(bind, rng):
    w, gradients = parameters(rng, steps=1)
    _, m, _ = update(bind, "sgd", w, gradients, RATES, momentum=0.9)
    np.testing.assert_array_equal(m, gradients[0])


def test_rates_are_looked_up_by_step_and_the_last_one_stays(bind, rng):
    w, gradients = parameters(rng, steps=1)
    constant, _, _ = update(bind, "sgd", w, gradients, [0.25])
    for first_step in (1, 2, 100):
        got, _, _ = update(bind, "sgd", w, gradients, [9.0, 0.25], first_step=first_step)
        np.testing.assert_array_equal(got, constant)


ADAM_CASES = [
    {},
    {"beta1": 0.8, "beta2": 0.99, "eps": 1e-3},
    {"weight_decay": 0.01, "decayed": 6},
    {"clip_value": 0.4},
    {"clip_norm": 1.0, "norms": NORMS, "clip_value": 0.4, "weight_decay": 0.1, "decayed": 9},
]


@pytest.mark.parametrize("case", ADAM_CASES)
@pytest.mark.parametrize("first_step", [0, 1000])
def test_adam_follows_the_scalar_loop(bind, rng, case, first_step):
    w, gradients = parameters(rng)
    got_w, got_m, got_v, state = update(bind, "adam", w, gradients, RATES, first_step=first_step, **case)
    want_w, want_m, want_v = scalar_adam(w, gradients, RATES, first_step=first_step, **case)
    # A moment is a mean of gradients (below 4 here) or of their squares and takes at most 10 roundings of eps/2 in each
    # of the four steps, as does the update. |update| ≤ rate · |m| / √v · corrections, and |m| / √v < 10 for these betas.
    step_error = 4 * 10 * EPS / 2
    assert np.all(np.abs(got_m - want_m) <= step_error * 4)
    assert np.all(np.abs(got_v - want_v) <= step_error * 16)
    assert np.all(np.abs(got_w - want_w) <= step_error * (np.abs(w) + max(RATES) * 10))
    assert state[NONFINITE] == 0
    np.testing.assert_array_equal(got_w[-2:], 0)


def test_first_adam_step_has_the_length_of_the_rate(bind, rng):
    w, gradients = parameters(rng, steps=1)
    got, *_ = update(bind, "adam", w, gradients, [0.125])
    # m̂ = g and v̂ = g², so each weight moves by rate · sign(g), up to roundings of w and of the quotient.
    np.testing.assert_allclose(got, w - 0.125 * np.sign(gradients[0]), rtol=0, atol=4 * EPS * (1 + np.abs(w).max()))


def test_decay_ends_inside_a_group_of_four(bind):
    w, zero = np.ones(8, np.float32), np.zeros(8, np.float32)
    got, _, _ = update(bind, "sgd", w, [zero], [1.0], weight_decay=0.5, decayed=6)
    np.testing.assert_array_equal(got, [0.5] * 6 + [1.0] * 2)


def test_clipping_by_value_comes_after_clipping_by_norm_and_before_decay(bind):
    w, g = np.full(4, 2, np.float32), np.array([100, -100, 1, -1], np.float32)
    _, m, _ = update(bind, "sgd", w, [g], [0.0], clip_norm=2.0, norms=[100 - 1e-6], clip_value=0.5, weight_decay=1.0, decayed=4)
    np.testing.assert_allclose(m, [2.5, 1.5, 2.02, 1.98], rtol=2 * EPS)


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("op", ["sgd", "adam"])
@pytest.mark.parametrize(
    ("element", "bad", "attrs"),
    [
        (2, np.nan, {}),
        (2, np.nan, {"clip_value": 1.0}),
        (9, np.nan, {"clip_value": 1.0}),
        (5, np.nan, {"clip_norm": 1.0, "norms": [np.nan]}),
        (0, 1.0, {"clip_norm": 1.0, "norms": [np.nan]}),
    ],
)
def test_weight_that_is_not_finite_raises_the_flag(bind, rng, op, element, bad, attrs):
    w, gradients = parameters(rng, steps=1)
    gradients[0][element] = bad
    got_w, *_, state = update(bind, op, w, gradients, RATES, **attrs)
    assert np.isnan(got_w[element])
    assert state[NONFINITE] == 1


@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_overflow_raises_the_flag_and_clipping_prevents_it(bind):
    w, g = np.full(5, -3e38, np.float32), np.full(5, 3e38, np.float32)
    *_, state = update(bind, "sgd", w, [g], [1.0])
    assert state[NONFINITE] == 1
    *_, state = update(bind, "sgd", w, [g], [1.0], clip_value=5.0)
    assert state[NONFINITE] == 0


@pytest.mark.parametrize("op", ["sgd", "adam"])
def test_clip_norm_without_a_norm_is_refused(bind, rng, op):
    w, gradients = parameters(rng, steps=1)
    with pytest.raises(ValueError, match="norm"):
        update(bind, op, w, gradients, RATES, clip_norm=1.0)


# 5,003 elements are two blocks' work with a tail of three.
@pytest.mark.parametrize("count", [1, 30, 5003])
def test_grad_norm_is_the_euclidean_norm(bind, rng, count):
    g = rng.standard_normal(count).astype(np.float32)
    bound = bind("grad_norm", [g], [((), "float64")])
    bound.run()
    # Squares are exact in float64; fewer than 2^13 additions of 2^-53 each.
    np.testing.assert_allclose(bound.results()[0], math.sqrt(math.fsum(x * x for x in g.tolist())), rtol=2**-40)


def test_grad_norm_of_a_nan_is_nan(bind):
    bound = bind("grad_norm", [np.array([1, np.nan, 2], np.float32)], [((), "float64")])
    bound.run()
    assert np.isnan(bound.results()[0])


def test_grad_norm_repeats_bit_for_bit(gpu, rng):
    bound = Bound(grad_norm.OPS[named("grad_norm")], "grad_norm", [rng.standard_normal(751_875).astype(np.float32)], [((), "float64")], device=gpu)
    values = set()
    for _ in range(3):
        bound.run()
        values.add(float(bound.results()[0]))
    assert len(values) == 1


# One element, a whole block's 1,024, and a block and a bit.
@pytest.mark.parametrize("count", [1, 1024, 1500])
def test_packed_weights_are_the_mapped_parameters_or_zero(bind, rng, count):
    params = rng.standard_normal(77).astype(np.float32)
    index = rng.integers(-30, 77, count).astype(np.int32)
    bound = bind("pack_weights", [params, index], [((count,), "float32")])
    bound.run()
    np.testing.assert_array_equal(bound.results()[0], [params[i] if i >= 0 else 0 for i in index.tolist()])


@pytest.mark.parametrize("case", [case for case in pack_weights.cases() if len(case.ins) > 2], ids=lambda case: case.label)
def test_filter_banks_are_packed_by_tiles_as_the_table_says(bind, case):
    bound, wanted = bind("pack_weights", list(case.ins), list(case.outs), attrs=case.attrs), np.empty(case.outs[0][0], np.float32)
    bound.poison()
    bound.run()
    pack_weights.pack_weights(*case.ins, wanted, **case.attrs)  # which tests/plan/test_packing.py compares with the maps
    np.testing.assert_array_equal(bound.results()[0], wanted)


def test_advance_counts_steps_images_and_loss(bind):
    loss, state, sums = np.array(0.5), step_state(7), np.zeros(4)
    bound = bind("advance", [loss, state, sums], [1, 2], attrs={"count": 3})
    bound.run()
    bound.device.upload(bound.call.ins[0], np.array([0.25]))
    bound.run()
    state, sums = bound.results()
    assert (state[STEP], state[POSITION], state[NONFINITE]) == (9, 6, 0)
    assert (sums[LOSS_SUM], sums[COUNT], sums[LAST_LOSS]) == (2.25, 6, 0.25)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_loss_that_is_not_finite_raises_a_flag_that_stays(bind, bad):
    bound = bind("advance", [np.array(bad), step_state(), np.zeros(4)], [1, 2], attrs={"count": 3})
    bound.run()
    assert bound.results()[0][NONFINITE] == 1
    bound.device.upload(bound.call.ins[0], np.array([1.0]))
    bound.run()
    assert bound.results()[0][NONFINITE] == 1


@pytest.mark.sampled
@on_every_arch
def test_optimizer_kernels_compile_without_a_stack_frame(rng, arch):
    w, (g,) = parameters(rng, steps=1)
    lr, state, norm = np.ones(3, np.float32), step_state(), np.array(1.0)
    clip = {"clip_norm": 1.0}
    cases = [
        (optimizers.OPS[named("sgd")], "sgd", [w, g, w, lr, state], [0, 2, 4], {}),
        (optimizers.OPS[named("sgd")], "sgd", [w, g, w, lr, state, norm], [0, 2, 4], clip),
        (optimizers.OPS[named("adam")], "adam", [w, g, w, w, lr, state], [0, 2, 3, 5], {}),
        (optimizers.OPS[named("adam")], "adam", [w, g, w, w, lr, state, norm], [0, 2, 3, 5], clip),
        (grad_norm.OPS[named("grad_norm")], "grad_norm", [g], [((), "float64")], {}),
        (pack_weights.OPS[named("pack_weights")], "pack_weights", [w, np.zeros(5, np.int32)], [((5,), "float32")], {}),
        (advance.OPS[named("advance")], "advance", [norm, state, np.zeros(4)], [1, 2], {"count": 1}),
    ]
    for impl, op, ins, outs, attrs in cases:
        for launch in Bound(impl, op, ins, outs, device=Host(), attrs=attrs).launches:
            assert_lean(launch, arch)


@pytest.mark.parametrize("part", [4, rule.PART], ids=lambda part: f"{part} weights at a time")
def test_adam_in_float64_equals_the_scalar_loop(part, monkeypatch, rng):
    monkeypatch.setattr(rule, "PART", part)
    w, gradients = parameters(rng)
    want = scalar_adam(w, gradients, RATES, weight_decay=0.01, decayed=6)
    arrays = [w.astype(np.float64), np.zeros(w.size), np.zeros(w.size)]
    state = step_state()
    for step, g in enumerate(gradients):
        state[STEP] = step
        w64, m64, v64 = arrays
        rates = np.array(RATES, np.float32)
        optimizers.ADAM.reference(w64, g.astype(np.float64), m64, v64, rates, state, *arrays, state, weight_decay=0.01, decayed=6)
    np.testing.assert_allclose(arrays, want, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("part", [4, rule.PART], ids=lambda part: f"{part} weights at a time")
def test_sgd_in_float64_equals_the_scalar_loop(part, monkeypatch, rng):
    monkeypatch.setattr(rule, "PART", part)
    w, gradients = parameters(rng)
    want = scalar_sgd(w, gradients, RATES, momentum=0.9, weight_decay=0.01, decayed=6)
    w64, m64, state = w.astype(np.float64), np.zeros(w.size), step_state()
    for step, g in enumerate(gradients):
        state[STEP] = step
        rates = np.array(RATES, np.float32)
        optimizers.SGD.reference(w64, g.astype(np.float64), m64, rates, state, w64, m64, state, momentum=0.9, weight_decay=0.01, decayed=6)
    np.testing.assert_allclose([w64, m64], want[:2], rtol=1e-12, atol=1e-14)


def test_one_update_of_a_real_network_agrees_with_the_reference(gpu, rng):
    w, gradients = parameters(rng, count=751_875, steps=1)
    moments = [np.abs(rng.standard_normal(w.size)).astype(np.float32) for _ in range(2)]
    for op in ("sgd", "adam"):
        ins = [w, gradients[0], *moments[: MOMENTS[op]], np.ones(1, np.float32), step_state(9)]
        outs = [0, *range(2, 2 + MOMENTS[op]), 3 + MOMENTS[op]]
        reference, kernel = (run_op(impl, op, ins, outs, device=device) for impl, device in zip(IMPLS[op], (Host(), gpu)))
        for want, got in zip(reference, kernel, strict=True):
            # One step of the bound in the scalar tests: at most 10 roundings.
            assert np.linalg.norm((got - want).astype(np.float64)) <= 10 * EPS / 2 * np.linalg.norm(want.astype(np.float64))
