"""Tests of losses against their definitions in float64, their gradients against finite differences, kernels against both."""

from __future__ import annotations

import numpy as np
import pytest
from compiled import assert_lean, on_every_arch

from nbcnn.check.one_op import Bound, run_op
from nbcnn.gpu.device import Host
from nbcnn.modes import named
from nbcnn.ops.kernel.call import Impl, host
from nbcnn.ops.losses import pairs, xent

EPS = float(np.finfo(np.float32).eps)
MSE = pairs.LOSSES["mse"]

IMPLS = {
    "mse_fprop": (host(MSE.fprop), pairs.OPS[named("mse_fprop")]),
    "mse_dgrad": (host(MSE.dgrad), pairs.OPS[named("mse_dgrad")]),
    "softmax_xent_fprop": (host(xent.softmax_xent_fprop), xent.OPS[named("softmax_xent_fprop")]),
    "softmax_xent_dgrad": (host(xent.softmax_xent_dgrad), xent.OPS[named("softmax_xent_dgrad")]),
}


@pytest.fixture(params=["reference", pytest.param("kernel", marks=pytest.mark.gpu)])
def run(request):
    """run(op, ins, outs): the outputs of the float32 reference or of the kernels."""

    def with_impl(op, ins, outs, **options):
        reference, kernels = IMPLS[op]
        if request.param == "reference":
            return run_op(reference, op, ins, outs, device=Host(), **options)
        return run_op(kernels, op, ins, outs, device=request.getfixturevalue("device"), **options)

    return with_impl


def one_loss() -> tuple[tuple[int, ...], str]:
    return ((), "float64")


def pair(rng, shape):
    return rng.standard_normal(shape).astype(np.float32), rng.standard_normal(shape).astype(np.float32)


# The last shape is more than one block's work, with a tail of one: two launches.
@pytest.mark.parametrize("shape", [(1,), (3, 5), (2, 3, 5, 7), (4097,)])
def test_mse_is_within_one_eps_of_the_exact_mean(run, rng, shape):
    y, target = pair(rng, shape)
    (loss,) = run("mse_fprop", [y, target], [one_loss()])
    exact = np.mean((y.astype(np.float64) - target) ** 2)
    # Differences rounded by 2^-24 have squares off by 2^-23 = eps; the float64 sum adds nothing visible.
    assert abs(loss - exact) <= EPS * exact
    assert (loss.shape, loss.dtype) == ((), np.float64)


@pytest.mark.parametrize("shape", [(1,), (3, 5), (2, 3, 5, 7), (1031,)])
def test_mse_gradient_elements_are_within_three_roundings(run, rng, shape):
    y, target = pair(rng, shape)
    (dy,) = run("mse_dgrad", [y, target], [(shape, "float32")])
    exact = 2 * (y.astype(np.float64) - target) / y.size
    # The difference, the scale and their product are rounded once each: 3 · eps / 2.
    assert np.all(np.abs(dy - exact) <= 1.5001 * EPS * np.abs(exact))


def test_mse_serves_channels_last_images(run, rng):
    y, target = pair(rng, (2, 3, 4, 5))
    (dy,) = run("mse_dgrad", [y, target], [(y.shape, "float32")], layout="NHWC")
    (other,) = run("mse_dgrad", [y, target], [(y.shape, "float32")])
    np.testing.assert_array_equal(dy, other)


def slope(loss, at, along, h=1e-5):
    """Central difference of the float64 function `loss` at `at` in direction `along`."""
    return (loss(at + h * along) - loss(at - h * along)) / (2 * h)


def test_mse_gradient_is_the_slope_of_the_loss(rng):
    y, target, along = rng.standard_normal((3, 4, 5))

    def loss(at):
        value = np.empty(())
        MSE.fprop(at, target, value)
        return float(value)

    dy = np.empty_like(y)
    MSE.dgrad(y, target, dy)
    # A quadratic: the central difference is exact up to float64 rounding, 2^-52 / h.
    assert np.sum(dy * along) == pytest.approx(slope(loss, y, along), abs=1e-9)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_mse_of_a_value_that_is_not_finite_is_not_finite(run, rng, bad):
    y, target = pair(rng, (4, 6))
    y[2, 3] = bad
    (loss,) = run("mse_fprop", [y, target], [one_loss()])
    assert not np.isfinite(loss)


def test_mse_of_one_small_image_is_one_launch():
    image = np.zeros((1, 3, 32, 32), np.float32)
    assert len(Bound(pairs.OPS[named("mse_fprop")], "mse_fprop", [image, image], [one_loss()], device=Host()).launches) == 1


def test_mse_of_a_large_batch_repeats_bit_for_bit(gpu, rng):
    y, target = pair(rng, (1024, 3, 32, 32))
    bound = Bound(pairs.OPS[named("mse_fprop")], "mse_fprop", [y, target], [one_loss()], device=gpu)
    values = []
    for _ in range(3):
        bound.run()
        values.append(float(bound.results()[0]))
    assert values[0] == values[1] == values[2]
    exact = np.mean((y.astype(np.float64) - target) ** 2)
    assert abs(values[0] - exact) <= EPS * exact


def exact_softmax(logits, labels):
    """(p, loss, spread of the widest row) in float64, by the textbook formula."""
    x = logits.astype(np.float64)
    p = np.exp(x) / np.exp(x).sum(axis=1, keepdims=True)
    loss = -np.log(p[np.arange(len(x)), labels]).mean()
    return p, loss, np.ptp(x, axis=1).max()


def batch(rng, rows, classes):
    logits = (2 * rng.standard_normal((rows, classes))).astype(np.float32)
    return logits, rng.integers(0, classes, rows).astype(np.int32)


# One row to a block; the usual ten classes; more rows than one block takes (two launches); a single class.
@pytest.mark.parametrize(("rows", "classes"), [(1, 300), (5, 10), (65, 3), (2, 1)])
def test_softmax_cross_entropy_agrees_with_the_textbook(run, rng, rows, classes):
    logits, labels = batch(rng, rows, classes)
    p, loss = run("softmax_xent_fprop", [logits, labels], [((rows, classes), "float32"), one_loss()])
    exact_p, exact_loss, spread = exact_softmax(logits, labels)
    # Numerator and denominator each: the exponent is rounded by spread · eps/2, exp is good to 2.5 eps; the sum has at
    # most 10 additions of eps/2, the quotient one. Together (spread + 2·2.5 + 5 + 0.5) eps.
    bound = (spread + 11) * EPS
    assert np.all(np.abs(p - exact_p) <= bound * exact_p)
    # log Σ moves by the relative error of Σ, the label's exponent by spread · eps/2: less than the same bound.
    assert abs(loss - exact_loss) <= bound


@pytest.mark.parametrize(("rows", "classes"), [(1, 300), (5, 10), (65, 3), (2, 1)])
def test_softmax_gradient_elements_are_within_three_roundings(run, rng, rows, classes):
    logits, labels = batch(rng, rows, classes)
    p = exact_softmax(logits, labels)[0].astype(np.float32)
    (dlogits,) = run("softmax_xent_dgrad", [p, labels], [((rows, classes), "float32")])
    exact = (p.astype(np.float64) - np.eye(classes)[labels]) / rows
    assert np.all(np.abs(dlogits - exact) <= 1.5001 * EPS * np.abs(exact))


# Fewer pixels than a block has threads; more (two launches).
@pytest.mark.parametrize("shape", [(2, 3, 3, 5), (1, 5, 17, 19)])
def test_pixels_have_the_loss_and_the_gradient_of_as_many_rows(request, run, rng, shape):
    rows, classes = shape[0] * shape[2] * shape[3], shape[1]
    logits, labels = batch(rng, rows, classes)

    def pixels(of_rows):
        return np.ascontiguousarray(np.moveaxis(of_rows.reshape(shape[0], *shape[2:], classes), -1, 1))

    places = labels.reshape(shape[0], *shape[2:])
    exact_p, exact_loss, spread = exact_softmax(logits, labels)
    probable = pixels(exact_p).astype(np.float32)
    exact = (probable.astype(np.float64) - np.eye(classes)[labels].reshape(shape[0], *shape[2:], -1).transpose(0, 3, 1, 2)) / rows
    # The host has one layout.
    for layout in ("NCHW", "NHWC")[: 2 if request.node.callspec.params["run"] == "kernel" else 1]:
        p, loss = run("softmax_xent_fprop", [pixels(logits), places], [(shape, "float32"), one_loss()], layout=layout)
        # The bound of rows, above: fewer classes than there.
        assert np.all(np.abs(p - pixels(exact_p)) <= (spread + 11) * EPS * pixels(exact_p)), layout
        assert abs(loss - exact_loss) <= (spread + 11) * EPS, layout
        (dlogits,) = run("softmax_xent_dgrad", [probable, places], [(shape, "float32")], layout=layout)
        assert np.all(np.abs(dlogits - exact) <= 1.5001 * EPS * np.abs(exact)), layout


def test_softmax_gradient_is_the_slope_of_the_loss(rng):
    logits, along = rng.standard_normal((2, 6, 4))
    labels = rng.integers(0, 4, 6).astype(np.int32)
    p, dlogits, value = np.empty_like(logits), np.empty_like(logits), np.empty(())

    def loss(at):
        xent.softmax_xent_fprop(at, labels, p, value)
        return float(value)

    numeric = slope(loss, logits, along)
    loss(logits)
    xent.softmax_xent_dgrad(p, labels, dlogits)
    # Truncation h² · third derivative ≈ 1e-10, rounding 2^-52 / h ≈ 2e-11.
    assert np.sum(dlogits * along) == pytest.approx(numeric, abs=1e-9)


def test_softmax_of_huge_logits_does_not_overflow(run):
    logits = np.array([[1e4, 0.0, -1e4], [-3e38, 3e37, 0.0]], np.float32)
    p, loss = run("softmax_xent_fprop", [logits, np.array([0, 1], np.int32)], [((2, 3), "float32"), one_loss()])
    np.testing.assert_array_equal(p, [[1, 0, 0], [0, 1, 0]])
    assert loss == 0


@pytest.mark.parametrize("label", [-1, 10])
def test_label_outside_the_classes_makes_the_loss_nan(run, rng, label):
    logits, labels = batch(rng, 5, 10)
    labels[3] = label
    p, loss = run("softmax_xent_fprop", [logits, labels], [((5, 10), "float32"), one_loss()])
    assert np.isnan(loss)
    assert np.isfinite(p).all()
    (dlogits,) = run("softmax_xent_dgrad", [p, labels], [((5, 10), "float32")])
    np.testing.assert_array_equal(dlogits[3], p[3] * np.float32(1 / 5))


# inf - inf, on purpose.
@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logit_that_is_not_finite_makes_the_loss_nan(run, rng, bad):
    logits, labels = batch(rng, 5, 10)
    logits[2, 7] = bad
    _, loss = run("softmax_xent_fprop", [logits, labels], [((5, 10), "float32"), one_loss()])
    assert np.isnan(loss)


def test_softmax_of_a_large_batch_repeats_bit_for_bit(gpu, rng):
    logits, labels = batch(rng, 1024, 1000)
    bound = Bound(xent.OPS[named("softmax_xent_fprop")], "softmax_xent_fprop", [logits, labels], [(logits.shape, "float32"), one_loss()], device=gpu)
    bound.run()
    p, loss = bound.results()
    bound.run()
    again_p, again_loss = bound.results()
    np.testing.assert_array_equal(p, again_p)
    assert loss == again_loss
    assert loss == pytest.approx(exact_softmax(logits, labels)[1], rel=20 * EPS)


def launches_of(impl: Impl, op: str, ins, outs):
    return Bound(impl, op, ins, outs, device=Host()).launches


@pytest.mark.sampled
@on_every_arch
def test_loss_kernels_compile_without_a_stack_frame(arch):
    image, labels = np.zeros((9, 1000), np.float32), np.zeros(9, np.int32)
    ten, ten_labels = np.zeros((90, 10), np.float32), np.zeros(90, np.int32)
    pixels, classes = np.zeros((2, 5, 9, 9), np.float32), np.zeros((2, 9, 9), np.int32)
    launches = (
        launches_of(pairs.OPS[named("mse_fprop")], "mse_fprop", [image, image], [one_loss()])
        + launches_of(pairs.OPS[named("mse_dgrad")], "mse_dgrad", [image, image], [(image.shape, "float32")])
        + launches_of(xent.OPS[named("softmax_xent_fprop")], "softmax_xent_fprop", [image, labels], [(image.shape, "float32"), one_loss()])
        + launches_of(xent.OPS[named("softmax_xent_fprop")], "softmax_xent_fprop", [ten, ten_labels], [(ten.shape, "float32"), one_loss()])
        + launches_of(xent.OPS[named("softmax_xent_dgrad")], "softmax_xent_dgrad", [ten, ten_labels], [(ten.shape, "float32")])
        + launches_of(xent.OPS[named("softmax_xent_fprop")], "softmax_xent_fprop", [pixels, classes], [(pixels.shape, "float32"), one_loss()])
        + launches_of(xent.OPS[named("softmax_xent_dgrad")], "softmax_xent_dgrad", [pixels, classes], [(pixels.shape, "float32")])
    )
    for launch in launches:
        assert_lean(launch, arch)
