"""Tests of the EvoNorm layers in nets: gradients, running statistics in training, inference and checkpoints, and every mode like the reference."""

from __future__ import annotations

import numpy as np
import pytest
from test_net import depth_bound

import nbcnn
from nbcnn.gpu import device as gpu_device
from nbcnn.modes import MODES
from nbcnn.nn.layers import Conv2d, Residual
from nbcnn.nn.losses import MSE
from nbcnn.nn.norms import EvoNormB0, EvoNormS0
from nbcnn.nn.optim import SGD
from nbcnn.nn.params import ParameterError
from nbcnn.ops.norms import reference
from nbcnn.plan.graph import ShapeError
from nbcnn.run.net import Net
from nbcnn.run.session import TrainingSession

SHAPE = (2, 4, 4)


def layers():
    return [
        Conv2d(4, 3, padding=1, in_channels=2),
        EvoNormS0(groups=2, channels=4),
        Residual(Conv2d(4, 1, in_channels=4), EvoNormB0(channels=4)),
        Conv2d(2, 1, in_channels=4),
        MSE(),
    ]


def images(count=6):
    return np.random.default_rng(1).integers(0, 256, (count, *SHAPE)).astype(np.uint8)


def session(net, steps=4, batch=3):
    return TrainingSession(net, images(), optimizer=SGD(momentum=0.9), learning_rates=np.full(steps, 0.05), batch=batch, test_images=images()[:4])


def test_first_values_and_names():
    net = Net(layers(), SHAPE, mode="cpu", init="he")
    values = net.params.as_dict()
    assert net.params.names[-1] == "residual1.evonorm1.running"
    assert [set(values[f"evonorm1.{name}"]) for name in ("gamma", "beta", "v")] == [{1.0}, {0.0}, {1.0}]
    assert set(values["residual1.evonorm1.running"]) == {1.0}
    decayed = net.params.layout.decayed
    assert all(net.params.layout.offsets[f"evonorm1.{name}"] >= decayed for name in ("gamma", "beta", "v"))
    assert net.params.count == 2 * 4 * 9 + 4 + 12 + 16 + 4 + 12 + 8 + 2


def test_gradients_are_those_of_the_loss(rng):
    net = Net(layers(), SHAPE, mode="cpu")
    x = rng.standard_normal((3, *SHAPE)).astype(np.float32)
    _, grads = net.gradients(x)
    weights = net.params.as_dict()
    for name, gradient in grads.items():
        u = rng.standard_normal(gradient.shape).astype(np.float32)
        step = np.float32(1e-2)
        losses = []
        for sign in (1, -1):
            net.params.load_dict(weights | {name: weights[name] + sign * step * u})
            losses.append(net.gradients(x)[0])
        # float32 losses near 1 over a step of 0.02: 6e-6; the third derivative times step²: below 1e-3 of the gradient.
        wanted = (losses[0] - losses[1]) / (2 * float(step))
        assert np.vdot(gradient, u) == pytest.approx(wanted, abs=1e-4 + 5e-3 * float(np.linalg.norm(gradient) * np.linalg.norm(u))), name


def test_training_moves_the_running_variance_and_inference_reads_it():
    net = Net(layers(), SHAPE, mode="cpu")
    running = "residual1.evonorm1.running"
    trained = session(net)
    assert set(net.params.read(running)) == {1.0}, "preparing a session must leave no trace"
    trained.step()
    moved = net.params.read(running)
    assert (moved != 1).all()
    trained.evaluate()
    np.testing.assert_array_equal(net.params.read(running), moved)
    before = net.predict(images())
    np.testing.assert_array_equal(net.predict(images()), before)
    net.params.load_dict(net.params.as_dict() | {running: moved * 100})
    assert not np.allclose(net.predict(images()), before)


def test_inference_does_not_depend_on_the_batch():
    net = Net(layers(), SHAPE, mode="cpu")
    together, alone = net.predict(images()), np.concatenate([net.predict(images()[i : i + 1]) for i in range(6)])
    # The same sums image by image, but for the matrix products, which BLAS may add in another order.
    np.testing.assert_allclose(alone, together, rtol=1e-5, atol=1e-6)


def test_a_resumed_session_repeats_every_bit():
    first = session(Net(layers(), SHAPE, mode="cpu"))
    first.step()
    saved = first.state()
    assert saved["param.residual1.evonorm1.running"].shape == (4,)
    first.step()
    second = session(Net(layers(), SHAPE, mode="cpu", seed=5))
    second.load_state(saved)
    second.step()
    for name, tensor in first.state().items():
        np.testing.assert_array_equal(second.state()[name], tensor, err_msg=name)


def test_a_checkpoint_without_the_running_variance_is_refused():
    trained = session(Net(layers(), SHAPE, mode="cpu"))
    saved = trained.state()
    del saved["param.residual1.evonorm1.running"]
    with pytest.raises(ParameterError, match="running"):
        trained.load_state(saved)


def test_what_does_not_fit_is_named():
    with pytest.raises(ShapeError, match="evonorm1 takes 3 channels, got 2"):
        Net([EvoNormB0(channels=3), MSE()], SHAPE, mode="cpu")
    for wrong in (
        lambda: EvoNormS0(groups=4, channels=6),
        lambda: EvoNormS0(groups=2, eps=0, channels=4),
        lambda: EvoNormB0(eps=-1, channels=4),
        lambda: EvoNormB0(momentum=2, channels=4),
    ):
        with pytest.raises(ValueError, match="EvoNorm"):
            wrong()


@pytest.mark.parametrize("key", [key for key, row in MODES.items() if row.device == "gpu"], ids="-".join)
def test_every_mode_takes_two_steps_like_the_reference(key, device):
    if gpu_device.SIMULATOR and key[0] != "cudacore":
        pytest.skip("in the simulator only the layout differs from the other modes that run there")
    net, reference = Net(layers(), SHAPE, mode=key[0], precision=key[1]), Net(layers(), SHAPE, mode="cpu")
    assert net.fallbacks(net.lower(net.record_gradients(3))) == []
    trained, wanted = session(net, 2), session(reference, 2)
    for _ in range(2):
        trained.step()
        wanted.step()
    # Seven layers, two steps: what the first changed, the second reads. EvoNorm-B0's maximum switches like a ReLU.
    before = Net(layers(), SHAPE, mode="cpu").params.as_dict()
    for name, tensor in reference.params.as_dict().items():
        update = np.linalg.norm(tensor - before[name])
        assert np.linalg.norm(net.params.read(name) - tensor) <= 2 * depth_bound(7, key[1]) * update, name


def predictions(norm, mode, *sizes):
    """What a network of one norm makes of the same values times each size."""
    if mode != "cpu" and gpu_device.gpu_missing():
        pytest.skip("no GPU")
    x = np.random.default_rng(3).standard_normal((2, 4, 3, 3)).astype(np.float32)
    net = Net([norm], (4, 3, 3), mode=mode)
    with np.errstate(over="ignore", invalid="ignore"):
        return [net.predict(np.float32(size) * x) for size in sizes]


@pytest.mark.parametrize("norm", [nbcnn.GroupNorm(2), nbcnn.InstanceNorm2d(), nbcnn.LayerNorm()], ids=str)
@pytest.mark.parametrize("mode", ["cpu", pytest.param("tiled", marks=pytest.mark.gpu)])
def test_values_whose_squares_leave_float32_make_no_finite_number(norm, mode):
    """Around 1e19 squares are still float32, and the result is right; beyond, NaN or infinity and not the bias."""
    plain, large, beyond = predictions(norm, mode, 1, 1e16, 1e21)
    np.testing.assert_allclose(large, plain, atol=1e-4)
    assert not np.isfinite(beyond).any()


@pytest.mark.parametrize("norm", [nbcnn.EvoNormS0(groups=2), nbcnn.EvoNormB0()], ids=str)
@pytest.mark.parametrize("mode", ["cpu", pytest.param("tiled", marks=pytest.mark.gpu)])
def test_evonorms_of_values_whose_squares_leave_float32_make_no_finite_number(norm, mode):
    """Divided by an infinite deviation they became the bias."""
    large, beyond = predictions(norm, mode, 1e16, 1e21)
    assert np.isfinite(large).all()
    assert not np.isfinite(beyond).any()


def test_statistics_of_a_batch_whose_squares_leave_float32_are_no_numbers():
    x = np.float32(1e21) * np.random.default_rng(3).standard_normal((2, 4, 3, 3)).astype(np.float32)
    one = np.ones(4, np.float32)
    y, shift, std, batch_shift, batch_std, running = (np.zeros(shape, np.float32) for shape in (x.shape, 8, 8, 4, 4, 4))
    with np.errstate(over="ignore", invalid="ignore"):
        reference.evonorm_b0_fprop(x, one, one, one, one, y, shift, std, batch_shift, batch_std, running, eps=1e-5, momentum=0.1)
    assert not any(np.isfinite(each).any() for each in (y, std, batch_std, running))
