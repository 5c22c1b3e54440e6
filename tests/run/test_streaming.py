"""Tests of images that stay on the host: the same bits as resident ones, in every situation in which the order is anything but simple."""

from __future__ import annotations

import numpy as np
import pytest
from teams import together

from nbcnn.datasets.augment import Augment
from nbcnn.datasets.normalisation import Normalisation
from nbcnn.nn.activations import ReLU
from nbcnn.nn.layers import Flatten, Linear
from nbcnn.nn.losses import SoftmaxCrossEntropy
from nbcnn.nn.optim import SGD
from nbcnn.ranks.team import ALONE
from nbcnn.run import streaming
from nbcnn.run.allocation import MemoryPlanError
from nbcnn.run.net import Net
from nbcnn.run.session import TrainingSession

SHAPE, COUNT, BATCH = (2, 6, 6), 53, 4
MODES = ["cpu", pytest.param("cudacore", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Two batches a chunk, so that an epoch has seven: more than the ring, and more than the page-locked memory."""
    monkeypatch.setattr(streaming, "CHUNK_BYTES", 2 * BATCH * 72)


def session(images, resident, mode="cpu", team=ALONE, augment="flip,crop:2,cutout:2", **options):
    labels = (np.arange(len(images)) % 3).astype(np.int32)
    layers = [Flatten(), Linear(8), ReLU(), Linear(3), SoftmaxCrossEntropy()]
    net = Net(layers, SHAPE, mode=mode, seed=1, normalisation=Normalisation((0.5, 0.4), (0.25, 0.5)))
    tests = min(19, len(images) // 2)
    test_set = {"test_images": images[:tests], "test_labels": labels[:tests]}
    given = {"optimizer": SGD(momentum=0.9), "learning_rates": np.full(100, 0.05, np.float32), "batch": BATCH, "seed": 3} | options
    return TrainingSession(net, images, labels=labels, augment=Augment.parse(augment), resident=resident, team=team, **test_set, **given)


def pictures(dtype=np.uint8, count=COUNT):
    made = np.random.default_rng(5).integers(0, 256, (count, *SHAPE)).astype(np.uint8)
    return made if dtype == np.uint8 else (made / np.float32(255)).astype(np.float32)


def trained(made, epochs=2, steps=None):
    """What a training is after `epochs`, the last of them cut off after `steps`; test losses of each."""
    losses = []
    for epoch in range(epochs):
        made.begin_epoch(epoch)
        for _ in range(made.steps_left if steps is None or epoch < epochs - 1 else steps):
            made.step()
        losses.append(made.evaluate())
    return made.state(), losses


def assert_same(one, other):
    assert one[1] == other[1]
    assert one[0].keys() == other[0].keys()
    for name, tensor in one[0].items():
        np.testing.assert_array_equal(tensor, other[0][name], err_msg=name)


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
@pytest.mark.parametrize("mode", MODES)
def test_streamed_training_has_the_bits_of_resident_training(request, mode, dtype):
    count, epochs = COUNT, 2
    if mode != "cpu" and request.getfixturevalue("device").device_name == "CUDA simulator":
        count, epochs = 9, 1  # two full steps and one of a single image take a quarter of a minute there
    images = pictures(dtype, count)
    ends = []
    for resident in (True, False):
        made = session(images, resident, mode)
        ends.append(trained(made, epochs))
        assert (made.streamed_bytes > 0) == (not resident)
        made.close()
    assert_same(*ends)


def test_a_memory_map_is_read_where_it_lies(tmp_path):
    np.save(tmp_path / "images.npy", pictures())
    mapped = np.load(tmp_path / "images.npy", mmap_mode="r")
    streamed, resident = session(mapped, False), session(pictures(), True)
    assert_same(trained(streamed), trained(resident))
    streamed.close()


@pytest.mark.parametrize("steps", [1, 2, 5, 13])
def test_a_training_resumed_within_an_epoch_goes_on_with_the_same_images(steps):
    first, second = session(pictures(), True), session(pictures(), False)
    state, _ = trained(first, 2, steps)
    second.load_state(state)
    for made in (first, second):
        for _ in range(made.steps_left):
            made.step()
    assert_same((first.state(), first.evaluate()), (second.state(), second.evaluate()))
    second.close()


def test_a_step_that_is_repeated_reads_its_own_images_and_training_goes_on():
    plain, asked = session(pictures(), True), session(pictures(), False)
    for made in (plain, asked):
        made.begin_epoch(0)
    while plain.steps_left:
        if plain.steps_left in (14, 9, 1):
            # Repeating a step updates weights: on both sides the same.
            assert asked.first_nonfinite() == plain.first_nonfinite()
            for made in (plain, asked):
                made.load_state(made.state() | {"step_state": np.array([0, 0, made._position, 3, 0, 0, 0, 0])})
        plain.step()
        asked.step()
    assert_same((plain.state(), plain.evaluate()), (asked.state(), asked.evaluate()))
    asked.close()


def test_two_ranks_stream_their_shares():
    def work(resident):
        def one(team):
            made = session(pictures(), resident, team=team)
            result = trained(made)
            made.close()
            return result

        return one

    resident, streamed = together(2, work(True)), together(2, work(False))
    for one, other in zip(resident, streamed, strict=True):
        assert_same(one, other)


def test_what_does_not_fit_is_streamed_and_what_cannot_fit_is_refused(monkeypatch):
    images = pictures(count=2000)
    resident, streamed = session(images, True), session(images, False)
    between = sum(streamed.planned_bytes.values())
    assert between < sum(resident.planned_bytes.values())
    streamed.close()
    monkeypatch.setattr("nbcnn.gpu.device.Host.free_bytes", lambda self: between)
    made = session(images, None)
    assert made.streamed_bytes == streamed.streamed_bytes > 0
    made.close()
    with pytest.raises(MemoryPlanError):
        session(images, True)
    monkeypatch.setattr("nbcnn.gpu.device.Host.free_bytes", lambda self: between - 1)
    with pytest.raises(MemoryPlanError):
        session(images, None)


def test_an_error_of_a_worker_reaches_the_training(monkeypatch):
    made = session(pictures(), False)

    def fails(self, source, rows, target):
        raise OSError("the disk is gone")

    monkeypatch.setattr(streaming.Feeder, "_collect", fails)
    made.begin_epoch(1)
    with pytest.raises(OSError, match="the disk is gone"):
        made.step()
    made.close()


def test_predictions_take_bytes_and_floats_alike():
    images = pictures()
    net = Net([Flatten(), Linear(3)], SHAPE, mode="cpu", normalisation=Normalisation((0.5, 0.4), (0.25, 0.5)))
    # (v − 255m)·(1/255d) and (v/255 − m)·(1/d): a few roundings of terms up to 3, through 72 products of weights below 0.12.
    np.testing.assert_allclose(net.predict(pictures(np.float32)), net.predict(images), atol=4 * 2**-24 * 3 * 72 * 0.12)
