"""Tests of the layers that are there for training: what they do there, what they leave alone, and that their numbers repeat."""

from __future__ import annotations

import numpy as np
import pytest
from teams import together

import nbcnn
from nbcnn import Conv2d, KSparse, MaskSquares, MaxPool2d, Noise, ReLU, Upsample2d, Whiten
from nbcnn.files.errors import UsageError
from nbcnn.nn import description, models
from nbcnn.nn.optim import SGD
from nbcnn.ops.images import corrupt
from nbcnn.ops.update.advance import EPOCH, POSITION, example_state
from nbcnn.plan.bounds import parity_bound
from nbcnn.ranks.team import ALONE
from nbcnn.run.net import Net
from nbcnn.run.session import TrainingSession
from nbcnn.train.checkpoint import load


def images(rng, count=12):
    return rng.integers(0, 256, (count, 3, 8, 8)).astype(np.uint8)


def recorded(net, batch=4):
    """The steps of a training step."""
    session = TrainingSession(
        net, np.zeros((batch, *net.input_shape), np.uint8), optimizer=SGD(), learning_rates=np.zeros(1, np.float32), batch=batch
    )
    return [item.step for item in session.plans["train", batch].steps], session


def test_noise_is_the_images_own_in_every_batch_and_new_in_every_epoch(rng):
    x, order, state = rng.standard_normal((6, 3, 4, 4)).astype(np.float32), np.array([5, 2, 0, 1, 4, 3], np.int32), example_state()
    state[POSITION] = 0
    attrs = {"sigma": 0.5, "stream": 3}
    whole, part, later = (np.empty_like(x) for _ in range(3))
    corrupt.noise(x, order, state, whole, **attrs)
    # The images 0, 1 and 4 as another batch, as a rank might have them.
    corrupt.noise(x[2:5], order[2:5], state, part[:3], **attrs)
    np.testing.assert_array_equal(part[:3], whole[2:5])
    state[EPOCH] += 1
    corrupt.noise(x, order, state, later, **attrs)
    assert not np.isclose(later, whole).any(axis=(1, 2, 3)).all()


def test_noise_is_normal_and_masks_have_their_share():
    x, order, state = np.zeros((100, 3, 16, 16), np.float32), np.arange(100, dtype=np.int32), np.zeros(8, np.int64)
    y = np.empty_like(x)
    corrupt.noise(x, order, state, y, sigma=2.0, stream=1)
    # 76,800 values: means stray by 2/277, a deviation by 0.36 % of itself, a kurtosis by √(24/76,800) = 0.018; four times that at most.
    assert abs(y.mean()) < 4 * 2 / 277
    assert abs(y.std() / 2 - 1) < 4 * 0.0026
    assert abs((y**4).mean() / y.var() ** 2 - 3) < 4 * 0.018
    corrupt.mask_squares(x + 1, order, state, y, share=0.25, size=4, stream=2)
    squares = y.reshape(100, 3, 4, 4, 4, 4)
    assert set(np.unique(y)) == {0, np.float32(1 / 0.75)}
    assert (squares == squares[:, :1, :, :1, :, :1]).all(), "squares, and all channels of each, are masked together"
    # 1,600 squares: a share strays by √(0.25·0.75/1600) = 0.011.
    assert abs((y == 0).mean() - 0.25) < 4 * 0.011


def test_the_clean_input_stays_the_target(rng):
    net = Net([Noise(0.5), MaskSquares(0.5, 4), Conv2d(3, 3, padding=1), nbcnn.MSE()], (3, 8, 8), mode="cpu")
    steps, session = recorded(net)
    session.close()
    gathered = next(step for step in steps if str(step.op) == "gather").outs[0]
    assert next(step for step in steps if str(step.op) == "mse_fprop").ins[1] is gathered
    assert [str(step.op) for step in steps][1:4] == ["noise", "mask_squares", "conv_fprop"]
    assert next(step for step in steps if str(step.op) == "noise").ins[0] is gathered


def test_the_target_of_a_whitened_image_is_the_whitened_image():
    net = Net([Whiten(3), Noise(0.5), Conv2d(3, 3, padding=1), nbcnn.MSE()], (3, 8, 8), mode="cpu")
    steps, session = recorded(net)
    session.close()
    whitened = next(step for step in steps if str(step.op) == "whiten").outs[0]
    assert next(step for step in steps if str(step.op) == "mse_fprop").ins[1] is whitened
    with pytest.raises(nbcnn.ShapeError, match=r"whiten1 is not trained and passes no gradient on, which conv1\.weight before it would need"):
        recorded(Net([Conv2d(3, 1), Whiten(3), Conv2d(3, 1), nbcnn.MSE()], (3, 8, 8), mode="cpu"))


def test_prediction_and_gradients_of_own_floats_draw_nothing(rng):
    x = images(rng)
    plain, spoiled = (Net([*front, Conv2d(2, 3), nbcnn.MSE()], (3, 8, 8), mode="cpu") for front in ([], [Noise(9.0), MaskSquares(0.9)]))
    np.testing.assert_array_equal(plain.predict(x), spoiled.predict(x))
    targets = rng.standard_normal((2, 2, 6, 6)).astype(np.float32)
    floats = rng.standard_normal((2, 3, 8, 8)).astype(np.float32)
    assert plain.gradients(floats, targets)[0] == spoiled.gradients(floats, targets)[0]


def test_a_masked_gradient_reaches_only_what_was_kept(rng):
    """Filters whose channel wins at no pixel get no gradient."""
    net = Net([Conv2d(4, 1), ReLU(), KSparse(1), Conv2d(3, 1), nbcnn.MSE()], (3, 2, 2), mode="cpu")
    x = rng.standard_normal((2, 3, 2, 2)).astype(np.float32)
    _, grads = net.gradients(x)
    w = net.params.as_dict()
    h = np.maximum(np.einsum("kc,nchw->nkhw", w["conv1.weight"][:, :, 0, 0], x) + w["conv1.bias"][:, None, None], 0)
    winners = (h == h.max(1, keepdims=True)) & (h > 0)
    unused = ~winners.any((0, 2, 3))
    assert (grads["conv1.weight"][unused] == 0).all()
    assert (grads["conv1.weight"][~unused] != 0).any()


def test_an_encoder_has_no_layers_that_are_for_training():
    layers = [Whiten(), Noise(), Conv2d(4, 3, padding=1), ReLU(), KSparse(2), MaxPool2d(2), Upsample2d(2), Conv2d(3, 3, padding=1), nbcnn.MSE()]
    kinds = [type(layer) for layer in models.encoder(layers, "pool1")]
    assert kinds == [Whiten, Conv2d, ReLU, MaxPool2d]
    again = description.loads(description.dumps(layers, (3, 8, 8)), "here")["layers"]
    assert again == layers


def test_a_model_with_all_of_them_trains_saves_and_evaluates(rng, tmp_path):
    x = images(rng, 16)
    layers = [
        Whiten(3),
        Noise(0.2),
        MaskSquares(0.2, 2),
        Conv2d(8, 3, padding=1),
        ReLU(),
        MaxPool2d(2),
        KSparse(4),
        Upsample2d(2),
        Conv2d(3, 3, padding=1),
    ]
    with nbcnn.Model(layers, "mse", mode="cpu") as model:
        history = model.fit(x, epochs=3, batch_size=8, optimizer=nbcnn.Adam(0.01), run=tmp_path / "run", validation_data=x, verbose=0)
        assert history.history["loss"][-1] < history.history["loss"][0]
        assert model.evaluate(x)["loss"] == pytest.approx(history.history["val_loss"][-1], rel=1e-5)
        tensors, _ = load(tmp_path / "run" / "checkpoint-last.safetensors")
        assert tensors["param.whiten1.fitted"] == [16]
        again = nbcnn.load(tmp_path / "run", mode="cpu")
        np.testing.assert_array_equal(again.predict(x), model.predict(x))
        np.testing.assert_array_equal(again.features(x, at="pool1"), model.features(x, at="pool1"))
        # The code is dense, its decoder's input is not.
        assert (model.features(x, at="pool1") > 0).sum(1).max() > 4
    with nbcnn.Model(layers, "mse", mode="cpu") as twin:
        twin.fit(x, epochs=3, batch_size=8, optimizer=nbcnn.Adam(0.01), verbose=0)
        np.testing.assert_array_equal(twin.predict(x), again.predict(x))


@pytest.mark.parametrize("make", [lambda: Noise(-1), lambda: MaskSquares(1.0), lambda: MaskSquares(0.5, 0), lambda: KSparse(0), lambda: Whiten(4)])
def test_numbers_out_of_range_are_refused(make):
    with pytest.raises(UsageError):
        make()


SPOILED = [Noise(0.3), MaskSquares(0.3, 2), Conv2d(4, 3, padding=1), ReLU(), KSparse(2), Conv2d(3, 3, padding=1), nbcnn.MSE()]


def session_on(x, team=ALONE, **options):
    net = Net(SPOILED, x.shape[1:], mode="cpu", seed=2)
    return TrainingSession(net, x, optimizer=SGD(), learning_rates=np.full(9, 0.1, np.float32), batch=6, seed=5, team=team, **options)


def weights_after(session, epochs=1):
    for epoch in range(epochs):
        session.begin_epoch(epoch)
        for _ in range(session.steps_per_epoch):
            session.step()
    found = session.net.params.as_dict()
    session.close()
    return found


def test_what_is_drawn_repeats_after_a_resume_and_in_a_stream(rng):
    x = images(rng, 18)
    wanted = weights_after(session_on(x))
    session = session_on(x)
    session.step()
    state = session.state()
    session.close()
    again = session_on(x)
    again.load_state(state)
    again.step()
    again.step()
    resumed = again.net.params.as_dict()
    again.close()
    streamed = weights_after(session_on(x, resident=False))
    for name, tensor in wanted.items():
        np.testing.assert_array_equal(resumed[name], tensor)
        np.testing.assert_array_equal(streamed[name], tensor)


def test_ranks_draw_what_one_process_draws(rng):
    x = images(rng, 18)
    wanted = weights_after(session_on(x))
    for got in together(2, lambda team: weights_after(session_on(x, team))):
        for name, tensor in wanted.items():
            # Two halves of a batch are added in another order: three updates, each of sums over 6 images of 8×8 pixels.
            assert np.linalg.norm(got[name] - tensor) <= 3 * parity_bound(6 * 64, "fp32") * np.linalg.norm(tensor), name
