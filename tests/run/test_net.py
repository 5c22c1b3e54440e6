"""Tests of whole nets: every mode lands together, images are overfit, sessions repeat and resume bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from nbcnn.datasets import shapes
from nbcnn.files.errors import UsageError
from nbcnn.gpu import device
from nbcnn.gpu.target import H200
from nbcnn.modes import MODES, named
from nbcnn.nn.activations import LeakyReLU, ReLU, Sigmoid, Swish
from nbcnn.nn.layers import Conv2d, Flatten, Linear, Residual
from nbcnn.nn.losses import MSE, SoftmaxCrossEntropy
from nbcnn.nn.models import autoencoder, encoder
from nbcnn.nn.optim import SGD, Adam, learning_rates
from nbcnn.nn.params import ParameterError
from nbcnn.nn.resampling import AvgPool2d, MaxPool2d, Upsample2d
from nbcnn.ops.update.advance import GOOD, POSITION
from nbcnn.plan.bounds import STORE, parity_bound
from nbcnn.plan.graph import Buf, Plan, Step
from nbcnn.plan.op import Map, Op, Pool
from nbcnn.plan.storage import UNIT_ROUNDOFF
from nbcnn.run.allocation import MemoryPlanError
from nbcnn.run.net import Net
from nbcnn.run.resolve import resolver
from nbcnn.run.rows import Choice, choose_mode, on_tensor_cores
from nbcnn.run.session import TrainingSession, epoch_order
from nbcnn.train.saved_net import choice_of

ROWS = pytest.mark.parametrize("row", [pytest.param(key, marks=[] if key[0] == "cpu" else pytest.mark.gpu) for key in MODES], ids="-".join)


def depth_bound(layers, precision):
    """How far a gradient that came through `layers` layers, of at most 150 terms each, may be from the NumPy path's.

    Every layer may err by the parity bound. A ReLU or a maximum also passes a gradient the other way where its inputs are
    nearer to the switch than one rounding u: about a part u of all elements, √u in norm, at three such layers.
    """
    switches = 0.0 if precision == "fp32" else 3 * UNIT_ROUNDOFF[STORE[precision]] ** 0.5
    return layers * parity_bound(150, precision) + switches


def small_autoencoder():
    return [
        Conv2d(8, 3, padding=1, in_channels=3),
        ReLU(),
        MaxPool2d(2),
        Conv2d(4, 3, padding=1, in_channels=8),
        ReLU(),
        Upsample2d(2),
        Conv2d(3, 3, padding=1, in_channels=4),
        MSE(),
    ]


def every_layer():
    return [
        Conv2d(6, (5, 3), stride=2, padding=2, bias=False, in_channels=3),
        LeakyReLU(0.1),
        Residual(Conv2d(6, 3, padding=1, in_channels=6), Swish()),
        AvgPool2d(3, 2),
        Conv2d(5, 1, in_channels=6),
        Sigmoid(),
        MaxPool2d(2, 1),
        Flatten(),
        Linear(7, in_features=30),
        ReLU(),
        Linear(4, bias=False, in_features=7),
        SoftmaxCrossEntropy(),
    ]


def net_or_skip(layers, shape, row, simulated=False, **options):
    """A net of (mode, precision) `row`; skips where that cannot run, and in the simulator unless the case is small (`simulated`)."""
    (mode, precision), reason = row, device.gpu_missing()
    if mode != "cpu" and reason:
        pytest.skip(f"{reason}; NUMBA_ENABLE_CUDASIM=1 trains a tiny net in the simulator")
    if mode != "cpu" and device.SIMULATOR and not simulated:
        pytest.skip("takes minutes in the simulator")
    if mode == "tensorcore" and precision not in on_tensor_cores(device.Gpu().capability):
        pytest.skip("needs tensor cores that have the precision")
    return Net(layers, shape, mode=mode, precision=precision, **options)


def images_of(count, size, seed=1):
    return shapes.generate(count, seed, size=8)[0][:, :, :size, :size] if size < 8 else shapes.generate(count, seed, size=size)[0]


def session_of(net, count=10, size=8, batch=4, **options):
    images = images_of(count, size)
    options = {"optimizer": SGD(momentum=0.9), "learning_rates": learning_rates("cosine", 0.1, 30), **options}
    return TrainingSession(net, images, batch=batch, test_images=images[:5], **options)


@ROWS
def test_gradients_of_every_layer_agree_with_the_numpy_path(row):
    rng = np.random.default_rng(3)
    x, labels = rng.standard_normal((2, 3, 14, 18)).astype(np.float32), np.array([3, 0], np.int32)
    net = net_or_skip(every_layer(), (3, 14, 18), row)
    loss, grads = net.gradients(x, labels)
    expected_loss, expected = Net(every_layer(), (3, 14, 18), mode="cpu").gradients(x, labels)
    limit = depth_bound(12, row[1])
    assert loss == pytest.approx(expected_loss, rel=limit)
    for name, grad in expected.items():
        assert np.linalg.norm(grads[name] - grad) <= limit * np.linalg.norm(grad), name


@ROWS
@pytest.mark.parametrize("fusing", [True, False])
def test_three_training_steps_land_together(row, fusing):
    size, batch, steps = (4, 2, 1) if device.SIMULATOR else (8, 4, 3)
    nets = [net_or_skip(small_autoencoder(), (3, size, size), r, simulated=True, fusing=fusing) for r in (("cpu", "fp32"), row)]
    sessions = [session_of(net, size=size, batch=batch) for net in nets]
    before = sessions[0].state()
    for session in sessions:
        for _ in range(steps):
            session.step()
    expected, got = (s.state() for s in sessions)
    np.testing.assert_array_equal(got["step_state"][:GOOD], expected["step_state"][:GOOD])
    for name, tensor in expected.items():
        if name.startswith("param."):
            update = np.linalg.norm(tensor - before[name])
            # Six layers, three steps: what the first changed, the next ones read.
            assert np.linalg.norm(got[name] - tensor) <= steps * depth_bound(6, row[1]) * update, name


@ROWS
def test_eight_images_are_overfit(row):
    net = net_or_skip(small_autoencoder(), (3, 8, 8), row)
    session = session_of(net, count=8, batch=8, optimizer=Adam(), learning_rates=learning_rates("constant", 0.01, 300))
    before = session.evaluate()
    for epoch in range(300):
        session.begin_epoch(epoch)
        session.step()
    assert session.evaluate() < 0.1 * before


@ROWS
def test_predictions_agree_with_the_numpy_path(row):
    net = net_or_skip(encoder(small_autoencoder(), "pool1"), (3, 8, 8), row)
    images = images_of(5, 8)
    got = net.predict(images, batch=2)
    assert got.shape == (5, 8, 4, 4)
    expected = Net(encoder(small_autoencoder(), "pool1"), (3, 8, 8), mode="cpu").predict(images)
    assert np.linalg.norm(got - expected) <= 2 * parity_bound(27, row[1]) * np.linalg.norm(expected)  # the input's rounding, and the layer's


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


@ROWS
def test_two_runs_with_one_seed_are_equal_bit_for_bit(row):
    states = []
    for _ in range(2):
        session = session_of(net_or_skip(small_autoencoder(), (3, 8, 8), row, seed=5), flip=True, seed=5)
        for _ in range(3):
            session.step()
        states.append(session.state())
    for name in states[0]:
        np.testing.assert_array_equal(states[0][name], states[1][name], err_msg=name)


@ROWS
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(row):
    def fresh(tiles=None):
        return session_of(net_or_skip(small_autoencoder(), (3, 8, 8), row, tiles=tiles), optimizer=Adam(), flip=True)

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
    monkeypatch.setattr(net.device, "free_bytes", lambda: 200_000, raising=False)
    with pytest.raises(MemoryPlanError, match=r"batch 64 needs .* free; the largest batch that fits is \d+") as error:
        session_of(net, count=64, batch=64)
    fits = int(str(error.value).split()[-1])
    session_of(net, count=64, batch=fits)
    with pytest.raises(MemoryPlanError):
        session_of(net, count=64, batch=fits + 1)


def test_a_batch_to_predict_that_does_not_fit_says_which_would(monkeypatch):
    net = Net(small_autoencoder(), (3, 8, 8), mode="cpu")
    monkeypatch.setattr(net.device, "free_bytes", lambda: 50_000, raising=False)
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
        (lambda: session_of(Net(encoder(small_autoencoder(), "pool1"), (3, 8, 8), mode="cpu")), "no loss"),
        (lambda: Net(small_autoencoder(), (3, 8, 8), mode="cpu").predict(np.zeros((1, 3, 9, 8), np.uint8)), "images must be uint8"),
        (
            lambda: session_of(Net([Flatten(), Linear(3, in_features=192), SoftmaxCrossEntropy()], (3, 8, 8), mode="cpu")),
            "there are no training labels",
        ),
    ],
)
def test_what_cannot_be_done_is_said_in_words(make, words):
    with pytest.raises(UsageError, match=words):
        make()


def test_auto_takes_what_this_machine_has():
    row, why = choose_mode("auto", None)
    assert row.mode in (("cpu",) if device.gpu_missing() else ("cudacore", "tensorcore"))
    assert why


@pytest.mark.parametrize(
    ("mode", "precision", "capability", "expected"),
    [
        ("auto", None, (9, 0), ("tensorcore", "bf16")),
        ("auto", "tf32", (8, 0), ("tensorcore", "tf32")),
        ("auto", None, (7, 5), ("tensorcore", "fp16")),
        ("auto", None, (7, 0), ("cudacore", "fp32")),
        ("auto", "fp32", (7, 5), ("cudacore", "fp32")),
        ("auto", "fp16", (8, 0), ("tensorcore", "fp16")),
        ("tensorcore", None, (7, 5), ("tensorcore", "fp16")),
        ("tensorcore", None, (8, 6), ("tensorcore", "bf16")),
        ("tensorcore", "fp16", (9, 0), ("tensorcore", "fp16")),
        ("tensorcore", "tf32", (7, 5), ("cudacore", "fp32")),
        ("cudacore", None, (9, 0), ("cudacore", "fp32")),
    ],
)
def test_the_mode_follows_the_gpu(monkeypatch, mode, precision, capability, expected):
    monkeypatch.setattr("nbcnn.gpu.device.gpu_missing", lambda: None)
    row, why = choose_mode(mode, precision, capability=capability)
    assert (row.mode, row.precision) == expected
    assert ("7.5" in why) == (mode == "tensorcore" and expected[0] == "cudacore")


@pytest.mark.parametrize(
    ("mode", "precision", "noted", "capability", "expected"),
    [
        ("auto", None, "bf16", (7, 5), ("cudacore", "fp32")),
        ("auto", None, "tf32", (7, 5), ("cudacore", "fp32")),
        ("auto", None, None, (7, 5), ("cudacore", "fp32")),
        ("auto", None, "fp16", (7, 5), ("tensorcore", "fp16")),
        ("auto", "fp16", "bf16", (7, 5), ("tensorcore", "fp16")),
        ("tensorcore", None, "fp16", (7, 5), ("tensorcore", "fp16")),
        ("auto", None, "bf16", (8, 0), ("tensorcore", "bf16")),
        ("auto", None, "fp16", (7, 0), ("cudacore", "fp32")),
    ],
)
def test_a_file_gets_fp16_only_if_it_is_its_own_or_asked_for(monkeypatch, mode, precision, noted, capability, expected):
    """fp16 ends at 65,504: what was trained in another precision may be beyond."""
    monkeypatch.setattr("nbcnn.gpu.device.gpu_missing", lambda: None)
    monkeypatch.setattr("nbcnn.run.rows.capability_of_gpu", lambda: capability)
    monkeypatch.setattr("nbcnn.gpu.device.SIMULATOR", False)
    row, why = choice_of(mode, precision, noted)
    assert (row.mode, row.precision) == expected
    assert ("fp16 alone" in why) == (capability == (7, 5) and expected[0] == "cudacore")


@pytest.mark.parametrize(
    ("mode", "precision", "engine", "capability", "words"),
    [
        ("tensorcore", None, "wgmma", (8, 0), "needs compute capability 9.0"),
        ("tensorcore", "fp16", "wgmma", (9, 0), "--engine wgmma has no fp16; --engine mma has it"),
        ("cudacore", None, "mma", (9, 0), "belongs to mode tensorcore"),
    ],
)
def test_an_engine_that_cannot_be_is_refused(monkeypatch, mode, precision, engine, capability, words):
    monkeypatch.setattr("nbcnn.gpu.device.gpu_missing", lambda: None)
    with pytest.raises(UsageError, match=words):
        choose_mode(mode, precision, engine, capability)


def test_compute_capability_7_5_has_one_engine(monkeypatch):
    monkeypatch.setattr("nbcnn.gpu.device.gpu_missing", lambda: None)
    row, _ = choose_mode("tensorcore", None, "mma", (7, 5))
    assert (row.precision, {"thin", "wgmma"} & {part for part, _ in row.fallbacks}) == ("fp16", set())


def test_a_forced_engine_leaves_the_other_out(monkeypatch):
    monkeypatch.setattr("nbcnn.gpu.device.gpu_missing", lambda: None)
    row, _ = choose_mode("tensorcore", None, "mma", (9, 0))
    assert "wgmma" not in [part for part, _ in row.fallbacks]
    row, _ = choose_mode("tensorcore", None, "wgmma", (9, 0))
    assert "mma" not in row.own
    assert "mma" in [part for part, _ in row.fallbacks]
    row, _ = choose_mode("tensorcore", "tf32", "wgmma", (9, 0))
    assert [part for part, _ in row.chain(named("upconv_wgrad"))][-2:] == ["wgmma", "mma"]


@pytest.mark.parametrize(("batch", "part"), [(1, "mma"), (4, "wgmma")])
def test_few_pixels_run_in_the_portable_engine(monkeypatch, batch, part):
    monkeypatch.setattr("nbcnn.gpu.device.gpu_missing", lambda: None)
    row, _ = choose_mode("tensorcore", None, "auto", (9, 0))
    x, y, index = (
        Buf(name, (batch, *shape), dtype)
        for name, shape, dtype in (("x", (256, 16, 16), "bfloat16"), ("y", (128, 8, 8), "bfloat16"), ("i", (32, 8, 8), "uint8"))
    )
    weights = Buf("w", (128, 256, 3, 3), home="param"), Buf("b", (128,), home="param")
    step = Step(Op("conv", "fprop", after=(Map("relu"), Pool())), (x, *weights), (y, index), {"stride": 1, "pad": 1}, "conv2")
    assert resolver(row, H200)(step).mode == part


def test_a_classifier_trains_on_labels():
    images, labels = shapes.generate(40, 2, size=8)
    layers = [Conv2d(8, 3, padding=1, in_channels=3), ReLU(), MaxPool2d(2), Flatten(), Linear(10, in_features=128), SoftmaxCrossEntropy()]
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


@pytest.mark.gpu
def test_a_step_that_runs_elsewhere_is_named_and_refused_when_strict():
    layers = [Conv2d(4, 9, padding=4, in_channels=3), MSE()]
    net = net_or_skip([Conv2d(3, 9, padding=4, in_channels=3), MSE()], (3, 8, 8), ("tiled", "fp32"))
    plan: Plan = net.lower(net.record_gradients(1))
    assert [line.split(" ")[0] for line in net.fallbacks(plan)] == ["conv1.conv_fprop", "conv1.conv_wgrad", "conv1.conv_dgrad"]
    with pytest.raises(UsageError, match="--strict"):
        Net(layers[:1], (3, 8, 8), mode="tiled", strict=True)


def test_strict_refuses_the_next_best_mode(monkeypatch):
    monkeypatch.setattr("nbcnn.gpu.device.gpu_missing", lambda: None)
    assert choose_mode("tensorcore", None, capability=(7, 0)).row.mode == "cudacore"
    assert choose_mode("auto", None, capability=(7, 0), strict=True).row.mode == "cudacore"
    with pytest.raises(UsageError, match=r"--strict: mode tensorcore became cudacore, the next best: tensorcore needs compute capability 7\.5"):
        choose_mode("tensorcore", None, capability=(7, 0), strict=True)
    with pytest.raises(UsageError, match=r"the next best: tensorcore bf16 needs compute capability 8\.0, this GPU has 7\.5"):
        choose_mode("tensorcore", "bf16", capability=(7, 5), strict=True)


def test_a_net_chooses_strictly(monkeypatch):
    asked = []
    monkeypatch.setattr("nbcnn.run.net.choose_mode", lambda *_, strict, **__: asked.append(strict) or Choice(MODES["cpu", "fp32"], "as asked"))
    for strict in (True, False):
        Net([Conv2d(3, 1, in_channels=3)], (3, 8, 8), strict=strict)
    assert asked == [True, False]


def test_the_autoencoder_has_751875_parameters_in_one_buffer():
    net = Net(autoencoder(), (3, 32, 32), mode="cpu")
    assert net.params.count == 751_875
    assert net.params.names[0] == "conv1.weight"
    assert all(offset % 64 == 0 for offset in net.params.layout.offsets.values())
