"""Tests of dropout's mask: how many elements it keeps, and what it depends on; the layer."""

from __future__ import annotations

import numpy as np
import pytest

from nbcnn.files.errors import UsageError
from nbcnn.nn.activations import ReLU
from nbcnn.nn.corruption import Dropout
from nbcnn.nn.layers import Conv2d
from nbcnn.nn.losses import MSE
from nbcnn.nn.optim import SGD
from nbcnn.ops.norms.dropout import dropout_dgrad, dropout_fprop
from nbcnn.ops.update.advance import EPOCH, POSITION, SEED, STATE_SIZE
from nbcnn.plan.graph import Buf, Tape
from nbcnn.run.net import Net
from nbcnn.run.session import TrainingSession

IMAGES = np.random.default_rng(1).integers(0, 256, (12, 3, 6, 6)).astype(np.uint8)


def state(position=0, epoch=0, seed=5):
    made = np.zeros(STATE_SIZE, np.int64)
    made[POSITION], made[EPOCH], made[SEED] = position, epoch, seed
    return made


def mask(order, at, *, p=0.5, stream=9, count=None, shape=(4, 5, 3)):
    y = np.full((count or len(order), *shape), np.nan)
    dropout_fprop(np.ones_like(y), order, at, y, p=p, stream=stream)
    return y


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_share_of_elements_that_are_kept_and_their_mean(p):
    y = mask(np.arange(400, dtype=np.int32), state(), p=p)
    assert set(np.unique(y)) == {0.0, 1 / (1 - p)}
    # 24,000 coins: the share's deviation is √(p(1−p)/24000), and five of them leave out one run in two million.
    assert abs((y == 0).mean() - p) <= 5 * (p * (1 - p) / y.size) ** 0.5


def test_the_mask_belongs_to_the_image_the_epoch_and_the_layer():
    order = np.random.default_rng(2).permutation(10).astype(np.int32)
    whole = mask(order, state())
    np.testing.assert_array_equal(np.concatenate([mask(order, state(at), count=2) for at in range(0, 10, 2)]), whole)
    np.testing.assert_array_equal(mask(order[::-1].copy(), state()), whole[::-1])
    for other in (mask(order, state(epoch=1)), mask(order, state(seed=6)), mask(order, state(), stream=10)):
        assert 0.3 < (other == whole).mean() < 0.7
    assert 0.3 < (whole[0] == whole[1]).mean() < 0.7


def test_the_backward_pass_has_the_mask_of_the_forward_pass():
    order, dx = np.arange(6, dtype=np.int32), np.full((6, 7), np.nan)
    dropout_dgrad(np.ones((6, 7)), order, state(), dx, p=0.3, stream=9)
    np.testing.assert_array_equal(dx, mask(order, state(), p=0.3, shape=(7,)))


def session(seed=3, images=IMAGES):
    net = Net([Conv2d(4, 3, padding=1), ReLU(), Dropout(0.4), Conv2d(3, 3, padding=1), MSE()], (3, 6, 6), mode="cpu", seed=2)
    return TrainingSession(net, images, optimizer=SGD(), learning_rates=np.full(8, 0.1, np.float32), batch=4, seed=seed, test_images=images[:5])


def test_training_drops_and_evaluation_and_prediction_do_not():
    trained = session()
    predicted = trained.net.predict(IMAGES)
    plain = Net([Conv2d(4, 3, padding=1), ReLU(), Conv2d(3, 3, padding=1), MSE()], (3, 6, 6), mode="cpu", seed=2)
    # The second convolution is the second parameter of both, so it has the same first values.
    np.testing.assert_array_equal(predicted, plain.predict(IMAGES))
    trained.step()
    undropped = TrainingSession(plain, IMAGES, optimizer=SGD(), learning_rates=np.full(8, 0.1, np.float32), batch=4, seed=3)
    undropped.step()
    assert trained.status().last_loss != undropped.status().last_loss
    kept = trained.state()
    assert trained.evaluate() == trained.evaluate()
    for name, tensor in trained.state().items():
        np.testing.assert_array_equal(tensor, kept[name], err_msg=name)


def test_a_resumed_session_repeats_every_bit():
    first = session()
    first.step()
    saved = first.state()
    first.step()
    first.step()
    second = session(seed=8)
    second.load_state(saved)
    second.step()
    second.step()
    for name, tensor in first.state().items():
        np.testing.assert_array_equal(second.state()[name], tensor, err_msg=name)


def test_the_layer_is_left_out_where_it_does_nothing():
    x = Buf("x", (2, 3))
    for tape in (Tape(False), Tape(True)):
        y, backward = Dropout(0.5).build(tape, x, "dropout1")
        assert (y, backward(x), tape.steps) == (x, x, [])
    tape = Tape(True)
    tape.examples = (Buf("order", (2,), "int32"), Buf("state", (8,), "int64"))
    assert Dropout(0.0).build(tape, x, "dropout1")[0] is x
    y, backward = Dropout(0.5).build(tape, x, "dropout1")
    backward(y)
    assert [str(step.op) for step in tape.steps] == ["dropout_fprop", "dropout_dgrad"]
    assert tape.steps[0].attrs == tape.steps[1].attrs
    assert Dropout(0.5).build(tape, x, "dropout2")[0] is not x
    assert tape.steps[2].attrs["stream"] != tape.steps[0].attrs["stream"]


@pytest.mark.parametrize("p", [1, -0.1, float("nan")])
def test_another_probability_is_refused(p):
    with pytest.raises(UsageError, match="Dropout needs a probability"):
        Dropout(p)
