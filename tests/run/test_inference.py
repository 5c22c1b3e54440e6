"""Tests of a net on the caller's arrays: a query leaves no trace in the net, inputs may be vectors, and a net needs no parameters."""

from __future__ import annotations

import weakref
from dataclasses import replace

import numpy as np
import pytest
from test_net import ROWS, net_or_skip

from nbcnn.files.errors import UsageError
from nbcnn.gpu import device
from nbcnn.nn.activations import ReLU
from nbcnn.nn.layers import Conv2d, Linear
from nbcnn.nn.losses import MSE, SoftmaxCrossEntropy
from nbcnn.nn.norms import EvoNormB0
from nbcnn.nn.optim import SGD
from nbcnn.plan.bounds import parity_bound
from nbcnn.run import inference
from nbcnn.run.allocation import MemoryPlanError
from nbcnn.run.net import Net
from nbcnn.run.session import TrainingSession

SHAPE = (2, 3, 3)
IMAGES = np.random.default_rng(7).integers(0, 256, (4, *SHAPE)).astype(np.uint8)
VECTORS = np.random.default_rng(8).integers(0, 256, (6, 5)).astype(np.uint8)
CLASSES = np.array([0, 1, 2, 0, 1, 2], np.int32)


def normed():
    """Parameters of fewer than 64 elements, so that there is padding between them, and a layer with state."""
    return [Conv2d(3, 3, padding=1, in_channels=2), EvoNormB0(channels=3), Conv2d(2, 3, padding=1, in_channels=3), MSE()]


def trained(net, images, steps=2, **options):
    """The state of `net` after so many steps of two images."""
    session = TrainingSession(net, images, learning_rates=np.full(steps, 0.05, np.float32), batch=2, **{"optimizer": SGD()} | options)
    for _ in range(steps):
        session.step()
    assert not session.status().nonfinite
    return session.state()


@ROWS
@pytest.mark.parametrize("clip_norm", [0.0, 1.0])
def test_training_after_a_gradient_query_is_training_without_it(row, clip_norm):
    states = []
    for query in (True, False):
        net = net_or_skip(normed(), SHAPE, row, simulated=row[0] == "naive" and clip_norm > 0)
        if query:
            net.gradients(IMAGES[:1].astype(np.float32) / 255)
        states.append(trained(net, IMAGES[:2], steps=1, optimizer=SGD(clip_norm=clip_norm)))
    for name, tensor in states[0].items():
        np.testing.assert_array_equal(tensor, states[1][name], err_msg=name)


@ROWS
def test_a_gradient_query_changes_nothing_of_the_net(row):
    net = net_or_skip(normed(), SHAPE, row)
    before, grads = net.params.as_dict(), net.device.download(net.params.grads)
    net.gradients(IMAGES.astype(np.float32) / 255)
    for name, tensor in net.params.as_dict().items():
        np.testing.assert_array_equal(tensor, before[name], err_msg=name)
    np.testing.assert_array_equal(net.device.download(net.params.grads), grads)


def test_a_gradient_that_is_not_written_is_nan():
    net = Net(normed(), SHAPE, mode="cpu")
    with net.params.kept():
        net.params.poison_grads()
        flat, named = net.params.grads.copy(), net.params.grads_dict()
    assert all(np.isnan(grad).all() for grad in named.values())
    assert np.isnan(flat).sum() == net.params.count, "the padding stays zero"
    assert not flat[~np.isnan(flat)].any()


@ROWS
def test_vectors_are_predicted_and_trained_on(row):
    net = net_or_skip([Linear(3, in_features=5), SoftmaxCrossEntropy()], (5,), row, simulated=row[0] in ("naive", "im2col", "cudacore"))
    weights = net.params.as_dict()
    expected = VECTORS / 255 @ weights["linear1.weight"].T + weights["linear1.bias"]
    got = net.predict(VECTORS, batch=4)
    assert got.shape == (6, 3)
    # The rounding of the input, and the layer's.
    assert np.linalg.norm(got - expected) <= 2 * parity_bound(6, row[1]) * np.linalg.norm(expected)
    session = TrainingSession(net, VECTORS, optimizer=SGD(momentum=0.0), learning_rates=np.full(9, 0.5, np.float32), batch=6, labels=CLASSES, seed=3)
    losses = []
    for epoch in range(2 if device.SIMULATOR else 9):
        session.begin_epoch(epoch)
        session.step()
        losses.append(session.status().last_loss)
    assert losses[-1] < losses[0]


@ROWS
def test_mirrored_vectors_are_refused_in_words(row):
    net = net_or_skip([Linear(3, in_features=5), SoftmaxCrossEntropy()], (5,), row)
    with pytest.raises(UsageError, match="--flip mirrors images; these are vectors of 5 values"):
        trained(net, VECTORS, labels=CLASSES, flip=True)


@ROWS
def test_a_net_may_have_no_parameters(row):
    net = net_or_skip([ReLU(), MSE()], SHAPE, row, simulated=row[0] == "naive")
    assert (net.params.count, net.params.as_dict()) == (0, {})
    # bf16 keeps eight bits of an input.
    np.testing.assert_allclose(net.predict(IMAGES), IMAGES / 255, rtol=2**-8)
    loss, grads = net.gradients(IMAGES / 255)
    assert (loss, grads) == (0.0, {})
    session = TrainingSession(net, IMAGES, optimizer=SGD(clip_norm=1.0), learning_rates=np.full(2, 0.1, np.float32), batch=2, test_images=IMAGES)
    session.step()
    assert session.evaluate() == 0.0
    assert session.status().step == 1


def test_predictions_that_would_not_fit_keep_less(monkeypatch):
    net, lower, asked = Net(normed(), SHAPE, mode="cpu"), Net.lower, []

    def sized(self, recorded, beside=None, lean=False):
        asked.append(lean)
        plan = lower(self, recorded, beside, lean)
        return plan if lean else replace(plan, arena_bytes=plan.arena_bytes + (1 << 20))

    expected = Net(normed(), SHAPE, mode="cpu").predict(IMAGES)
    monkeypatch.setattr(Net, "lower", sized)
    monkeypatch.setattr(type(net.device), "free_bytes", lambda self: 1 << 20)
    np.testing.assert_array_equal(net.predict(IMAGES), expected)
    assert asked == [False, True]
    monkeypatch.setattr(type(net.device), "free_bytes", lambda self: 1)
    with pytest.raises(MemoryPlanError, match="a batch of 2 needs"):
        net.predict(IMAGES[:2])


def test_a_net_with_prepared_batches_is_freed_with_its_last_name():
    net = Net(normed(), SHAPE, mode="cpu")
    net.predict(IMAGES)
    assert sum(inference.planned_bytes(net, 4).values()) > IMAGES.nbytes
    gone = weakref.ref(net)
    del net
    assert gone() is None, "arrays of a GPU should not wait for the garbage collector"
