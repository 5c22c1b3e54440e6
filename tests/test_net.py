"""Whole nets: every mode lands together, images are overfit, sessions repeat and resume bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from nbcnn import cuda
from nbcnn.datasets import shapes
from nbcnn.graph import Plan
from nbcnn.layers import (
    MSE,
    AvgPool2d,
    Conv2d,
    Flatten,
    LeakyReLU,
    Linear,
    MaxPool2d,
    ReLU,
    Residual,
    Sigmoid,
    SoftmaxCrossEntropy,
    Swish,
    Upsample2d,
)
from nbcnn.models import autoencoder, encoder
from nbcnn.net import MemoryPlanError, Net, UsageError, choose_mode
from nbcnn.ops import MODES
from nbcnn.ops.advance import POSITION
from nbcnn.optim import SGD, Adam, learning_rates
from nbcnn.params import ParameterError
from nbcnn.session import TrainingSession, epoch_order

MODE_NAMES = [mode for mode, _ in MODES]


def small_autoencoder():
    return [Conv2d(3, 8, 3, pad=1), ReLU(), MaxPool2d(2), Conv2d(8, 4, 3, pad=1), ReLU(), Upsample2d(2), Conv2d(4, 3, 3, pad=1), MSE()]


def every_layer():
    return [
        Conv2d(3, 6, (5, 3), stride=2, pad=2, bias=False),
        LeakyReLU(0.1),
        Residual(Conv2d(6, 6, 3, pad=1), Swish()),
        AvgPool2d(3, 2),
        Conv2d(6, 5, 1),
        Sigmoid(),
        MaxPool2d(2, 1),
        Flatten(),
        Linear(30, 7),
        ReLU(),
        Linear(7, 4, bias=False),
        SoftmaxCrossEntropy(),
    ]


def net_or_skip(layers, shape, mode, simulated=False, **options):
    """A net in `mode`; skips without a GPU, and in the simulator unless the case is small enough (`simulated`)."""
    reason = cuda.gpu_missing()
    if mode != "cpu" and reason:
        pytest.skip(f"{reason}; NUMBA_ENABLE_CUDASIM=1 trains a tiny net in the simulator")
    if mode != "cpu" and cuda.SIMULATOR and not simulated:
        pytest.skip("takes minutes in the simulator")
    return Net(layers, shape, mode=mode, **options)


def images_of(count, size, seed=1):
    return shapes.generate(count, seed, size=8)[0][:, :, :size, :size] if size < 8 else shapes.generate(count, seed, size=size)[0]


def session_of(net, count=10, size=8, batch=4, **options):
    images = images_of(count, size)
    options = {"optimizer": SGD(momentum=0.9), "learning_rates": learning_rates("cosine", 0.1, 30), **options}
    return TrainingSession(net, images, batch=batch, test_images=images[:5], **options)


@pytest.mark.parametrize("mode", MODE_NAMES)
def test_gradients_of_every_layer_agree_with_the_numpy_path(mode):
    rng = np.random.default_rng(3)
    x, labels = rng.standard_normal((2, 3, 14, 18)).astype(np.float32), np.array([3, 0], np.int32)
    net = net_or_skip(every_layer(), (3, 14, 18), mode)
    loss, grads = net.gradients(x, labels)
    expected_loss, expected = Net(every_layer(), (3, 14, 18), mode="cpu").gradients(x, labels)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    for name, grad in expected.items():
        # Twelve layers, each with the parity bound 4·eps·sqrt(terms) and at most 150 terms, add up to 7e-5.
        assert np.linalg.norm(grads[name] - grad) <= 12 * 4 * np.finfo(np.float32).eps * 150**0.5 * np.linalg.norm(grad), name


@pytest.mark.parametrize("mode", MODE_NAMES)
def test_three_training_steps_land_together(mode):
    size, batch, steps = (4, 2, 1) if cuda.SIMULATOR else (8, 4, 3)
    nets = [net_or_skip(small_autoencoder(), (3, size, size), m, simulated=True) for m in ("cpu", mode)]
    sessions = [session_of(net, size=size, batch=batch) for net in nets]
    for session in sessions:
        for _ in range(steps):
            session.step()
    expected, got = (s.state() for s in sessions)
    for name, tensor in expected.items():
        np.testing.assert_allclose(got[name], tensor, rtol=1e-3, atol=1e-5, err_msg=name)
    assert sessions[1].status().step == steps


@pytest.mark.parametrize("mode", MODE_NAMES)
def test_eight_images_are_overfit(mode):
    net = net_or_skip(small_autoencoder(), (3, 8, 8), mode)
    session = session_of(net, count=8, batch=8, optimizer=Adam(), learning_rates=learning_rates("constant", 0.01, 300))
    before = session.evaluate()
    for epoch in range(300):
        session.begin_epoch(epoch)
        session.step()
    assert session.evaluate() < 0.1 * before


@pytest.mark.parametrize("mode", MODE_NAMES)
def test_predictions_agree_with_the_numpy_path(mode):
    net = net_or_skip(encoder(small_autoencoder()), (3, 8, 8), mode)
    images = images_of(5, 8)
    got = net.predict(images, batch=2)
    assert got.shape == (5, 8, 4, 4)
    expected = Net(encoder(small_autoencoder()), (3, 8, 8), mode="cpu").predict(images)
    assert np.linalg.norm(got - expected) <= 4 * np.finfo(np.float32).eps * 27**0.5 * np.linalg.norm(expected)


def test_every_image_is_used_every_epoch_and_the_last_batch_is_smaller():
    session = session_of(Net(small_autoencoder(), (3, 8, 8), mode="cpu"))
    assert session.steps_per_epoch == 3
    assert sorted(n for split, n in session.plans if split == "train") == [2, 4]
    for _ in range(3):
        session.step()
    status = session.status()
    assert (status.step, status.position) == (3, 10)
    with pytest.raises(UsageError, match="begin_epoch"):
        session.step()


def test_epoch_orders_are_permutations_that_depend_on_seed_and_epoch():
    orders = [epoch_order(*key, 100) for key in ((0, 0), (0, 1), (1, 0), (0, 0))]
    assert all(sorted(o) == list(range(100)) for o in orders)
    assert (orders[0] == orders[3]).all()
    assert not (orders[0] == orders[1]).all()
    assert not (orders[0] == orders[2]).all()


@pytest.mark.parametrize("mode", MODE_NAMES)
def test_two_runs_with_one_seed_are_equal_bit_for_bit(mode):
    states = []
    for _ in range(2):
        session = session_of(net_or_skip(small_autoencoder(), (3, 8, 8), mode, seed=5), flip=True, seed=5)
        for _ in range(3):
            session.step()
        states.append(session.state())
    for name in states[0]:
        np.testing.assert_array_equal(states[0][name], states[1][name], err_msg=name)


@pytest.mark.parametrize("mode", MODE_NAMES)
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(mode):
    def fresh(tiles=None):
        return session_of(net_or_skip(small_autoencoder(), (3, 8, 8), mode, tiles=tiles), optimizer=Adam(), flip=True)

    whole = fresh()
    for _ in range(2):
        whole.step()
    middle, tiles = whole.state(), whole.tiles()
    whole.evaluate()
    whole.step()
    resumed = fresh(tiles)
    resumed.load_state(middle)
    assert resumed.status().position == 8
    resumed.step()
    for name, tensor in whole.state().items():
        np.testing.assert_array_equal(resumed.state()[name], tensor, err_msg=name)


def test_evaluation_does_not_disturb_training():
    session = session_of(Net(small_autoencoder(), (3, 8, 8), mode="cpu"))
    session.step()
    before = session.state()
    assert session.evaluate() == session.evaluate() > 0
    for name, tensor in session.state().items():
        np.testing.assert_array_equal(tensor, before[name])


def test_nan_weights_raise_the_flag_and_are_traced_to_a_layer():
    net = Net(small_autoencoder(), (3, 8, 8), mode="cpu")
    session = session_of(net)
    weights = net.params.as_dict()
    weights["conv2.weight"][0, 0, 0, 0] = np.nan
    net.params.load_dict(weights)
    session.step()
    assert session.status().nonfinite
    assert session.first_nonfinite().startswith("conv2.conv_fprop") or session.first_nonfinite().startswith("conv1")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s.pop("param.conv2.weight"), "conv2.weight' is missing"),
        (lambda s: s.update({"param.conv1.bias": np.zeros(9, np.float32)}), r"conv1.bias' is float32 \(9,\)"),
        (lambda s: s.update({"optim.m.conv9.weight": np.zeros(1, np.float32)}), "unknown parameter 'conv9.weight'"),
        (lambda s: s["step_state"].__setitem__(POSITION, 11), "position 11"),
        (lambda s: s.pop("sums"), "'sums' is missing"),
    ],
)
def test_a_state_that_does_not_fit_names_the_tensor_and_changes_nothing(change, words):
    session = session_of(Net(small_autoencoder(), (3, 8, 8), mode="cpu"))
    session.step()
    before, bad = session.state(), session.state()
    change(bad)
    with pytest.raises(ParameterError, match=words):
        session.load_state(bad)
    for name, tensor in session.state().items():
        np.testing.assert_array_equal(tensor, before[name])


def test_a_batch_that_does_not_fit_says_which_would(monkeypatch):
    net = Net(small_autoencoder(), (3, 8, 8), mode="cpu")
    monkeypatch.setattr(net.place, "free_bytes", lambda: 200_000, raising=False)
    with pytest.raises(MemoryPlanError, match=r"batch 64 needs .* free; the largest batch that fits is \d+") as error:
        session_of(net, count=64, batch=64)
    fits = int(str(error.value).split()[-1])
    session_of(net, count=64, batch=fits)
    with pytest.raises(MemoryPlanError):
        session_of(net, count=64, batch=fits + 1)


def test_a_batch_to_predict_that_does_not_fit_says_which_would(monkeypatch):
    net = Net(small_autoencoder(), (3, 8, 8), mode="cpu")
    monkeypatch.setattr(net.place, "free_bytes", lambda: 50_000, raising=False)
    images = np.zeros((64, 3, 8, 8), np.uint8)
    with pytest.raises(MemoryPlanError, match=r"a batch of 64 needs .* free; the largest batch that fits is \d+") as error:
        net.predict(images, batch=64)
    fits = int(str(error.value).split()[-1])
    assert net.predict(images, batch=fits).shape == (64, 3, 8, 8)
    with pytest.raises(MemoryPlanError):
        net.predict(images, batch=fits + 1)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Net(small_autoencoder(), (3, 8, 8), mode="im2cool"), "did you mean im2col?"),
        (lambda: Net(small_autoencoder(), (3, 8, 8), mode="cpu", precision="bf16"), "no precision 'bf16'"),
        (lambda: session_of(Net(small_autoencoder(), (3, 8, 8), mode="cpu"), batch=11), "batch 11 is not between 1 and the 10 images"),
        (lambda: session_of(Net(small_autoencoder(), (3, 8, 8), mode="cpu"), size=16), "images must be uint8"),
        (lambda: session_of(Net(encoder(small_autoencoder()), (3, 8, 8), mode="cpu")), "no loss"),
        (lambda: Net(small_autoencoder(), (3, 8, 8), mode="cpu").predict(np.zeros((1, 3, 9, 8), np.uint8)), "images must be uint8"),
        (lambda: session_of(Net([Flatten(), Linear(192, 3), SoftmaxCrossEntropy()], (3, 8, 8), mode="cpu")), "needs one label"),
    ],
)
def test_what_cannot_be_done_is_said_in_words(make, words):
    with pytest.raises(UsageError, match=words):
        make()


def test_auto_takes_what_this_machine_has():
    row, why = choose_mode("auto", None)
    assert row.mode == ("cpu" if cuda.gpu_missing() else "im2col")
    assert why


def test_a_classifier_trains_on_labels():
    images, labels = shapes.generate(40, 2, size=8)
    layers = [Conv2d(3, 8, 3, pad=1), ReLU(), MaxPool2d(2), Flatten(), Linear(128, 10), SoftmaxCrossEntropy()]
    session = TrainingSession(
        Net(layers, (3, 8, 8), mode="cpu"),
        images,
        optimizer=Adam(),
        learning_rates=learning_rates("constant", 0.01, 200),
        batch=20,
        labels=labels,
        test_images=images,
        test_labels=labels,
    )
    before = session.evaluate()
    for epoch in range(60):
        session.begin_epoch(epoch)
        session.step()
        session.step()
    assert session.evaluate() < 0.3 * before


def test_a_step_that_runs_elsewhere_is_named_and_refused_when_strict():
    layers = [Conv2d(3, 4, 9, pad=4), MSE()]
    net = net_or_skip([Conv2d(3, 3, 9, pad=4), MSE()], (3, 8, 8), "tiled")
    plan: Plan = net.lower(net.record_gradients(1))
    assert [line.split(" ")[0] for line in net.fallbacks(plan)] == ["conv1.conv_fprop", "conv1.conv_wgrad", "conv1.conv_dgrad"]
    with pytest.raises(UsageError, match="--strict"):
        Net(layers[:1], (3, 8, 8), mode="tiled", strict=True)


def test_the_autoencoder_has_751875_parameters_in_one_buffer():
    net = Net(autoencoder(), (3, 32, 32), mode="cpu")
    assert net.params.count == 751_875
    assert net.params.names[0] == "conv1.weight"
    assert all(offset % 64 == 0 for offset in net.params.layout.offsets.values())
