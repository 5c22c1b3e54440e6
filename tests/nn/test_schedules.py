"""Tests of schedules of the learning rate and of what optimizers refuse."""

from __future__ import annotations

import math

import numpy as np
import pytest

import nbcnn
from nbcnn.files.errors import UsageError
from nbcnn.nn.optim import points_of


def test_steps_fall_at_the_ends_of_epochs():
    rates = nbcnn.StepDecay(0.8, every=2, gamma=0.5).rates(steps=15, steps_per_epoch=3)
    np.testing.assert_allclose(rates, [0.8] * 6 + [0.4] * 6 + [0.2] * 3, rtol=1e-6)
    ramp = nbcnn.StepDecay(0.8, warmup=1, every=2, gamma=0.5).rates(steps=15, steps_per_epoch=3)
    np.testing.assert_allclose(ramp[:4], [0.8 / 3, 1.6 / 3, 0.8, 0.8], rtol=1e-6)


def test_decays_come_at_the_step_that_fractions_say():
    """every = 1.1 of 10 steps per epoch is 11 steps; 1.1 · 10 is a little more in float64. Against exact fractions of what is written."""
    for tenths in range(1, 60):
        for per_epoch in (1, 3, 7, 10, 20, 25, 30):
            rates = nbcnn.StepDecay(1.0, every=tenths / 10, gamma=0.5).rates(steps=70, steps_per_epoch=per_epoch)
            exact = [0.5 ** (10 * at // (tenths * per_epoch)) for at in range(70)]
            np.testing.assert_array_equal(rates, np.float32(exact), err_msg=f"{tenths} {per_epoch}")


def test_one_cycle_is_two_half_cosines():
    steps, rise, top = 40, 0.25, 0.25 * 40 - 1
    rates = nbcnn.OneCycle(0.5, rise=rise, div=10, final_div=100).rates(steps, 8)
    for at, rate in enumerate(rates.tolist()):
        begin, end, part = (0.05, 0.5, at / top) if at <= top else (0.5, 0.0005, (at - top) / (steps - 1 - top))
        assert rate == pytest.approx(end + (begin - end) / 2 * (1 + math.cos(math.pi * part)), rel=1e-6), at
    assert rates.argmax() == top
    assert np.isfinite(nbcnn.OneCycle(0.5).rates(1, 1)).all()


def test_piecewise_goes_through_its_points():
    rates = nbcnn.Piecewise(2.0, points=((1, 0.5), (2, 1), (4, 0))).rates(steps=20, steps_per_epoch=4)
    np.testing.assert_allclose(rates[[0, 4, 6, 8, 12, 16, 19]], [1, 1, 1.5, 2, 1, 0, 0])
    held = nbcnn.Piecewise(2.0, points=((1, 0.5), (2, 1), (4, 0)), linear=False).rates(steps=20, steps_per_epoch=4)
    np.testing.assert_allclose(held[[0, 4, 7, 8, 15, 16, 19]], [1, 1, 1, 2, 2, 0, 0])
    assert points_of("0:0.1,2:1,10:0") == ((0, 0.1), (2, 1), (10, 0))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: nbcnn.StepDecay(0.1, every=0), "every"),
        (lambda: nbcnn.StepDecay(0.1, gamma=1.5), "gamma"),
        (lambda: nbcnn.OneCycle(0.1, rise=1), "rise"),
        (lambda: nbcnn.OneCycle(0.1, div=0.5), "div"),
        (lambda: nbcnn.Piecewise(0.1, points=((1, 1), (1, 2))), "ascending"),
        (lambda: nbcnn.Piecewise(0.1, points=((0, 0),)), "not all 0"),
        (lambda: nbcnn.Piecewise(0.1, points=(1, 2)), "pairs"),
        (lambda: points_of("1,2"), "EPOCH:FACTOR"),
        (lambda: nbcnn.SGD(momentum=0, nesterov=True), "nesterov"),
        (lambda: nbcnn.AdamW(weight_decay=-1), "weight_decay"),
        (lambda: nbcnn.Huber(0), "delta"),
        (lambda: nbcnn.SoftmaxCrossEntropy(label_smoothing=1), "label_smoothing"),
        (lambda: nbcnn.SoftmaxCrossEntropy(weight=(0, 0)), "weights"),
        (lambda: nbcnn.SoftmaxCrossEntropy(ignore_index=2**31), "ignore_index"),
        (lambda: nbcnn.ELU(0), "alpha"),
        (lambda: nbcnn.GELU(approximate="erf"), "approximate"),
        (lambda: nbcnn.PReLU(0), "num_parameters"),
        (lambda: nbcnn.MaxPool2d(3, padding=2), "half"),
        (lambda: nbcnn.Resize(3, mode="bilinear"), "scale_factor of 2"),
        (lambda: nbcnn.Resize(mode="cubic"), "nearest"),
    ],
)
def test_numbers_out_of_range_are_refused(make, says):
    with pytest.raises(UsageError, match=says):
        make()
