"""Tests of functions of one's own: Mish, focal loss and Lion, each declared in a file outside of the package, trained, saved, loaded and resumed."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import sys

import numpy as np
import pytest
from compiled import assert_lean, on_every_arch
from gradients import assert_same_gradients

import nbcnn
from nbcnn.check import gradcheck
from nbcnn.check.one_op import Bound, Unsupported, run_op
from nbcnn.datasets.augment import Augment
from nbcnn.gpu import device as gpu_device
from nbcnn.gpu.compiler import SIMULATED_CAPABILITY
from nbcnn.gpu.device import Host
from nbcnn.gpu.lockstep.arrays import on_arrays
from nbcnn.modes import MODES, named
from nbcnn.ops.activations.table import ACTIVATIONS
from nbcnn.ops.images import gather
from nbcnn.ops.losses.pairs import LOSSES
from nbcnn.ops.update.advance import EPOCH, POSITION, SEED
from nbcnn.ops.update.random import philox4x32
from nbcnn.plan.bounds import STORE, parity_bound
from nbcnn.plan.graph import Tape, trace
from nbcnn.plan.graph import named as layers_named
from nbcnn.plan.merging import merge
from nbcnn.plan.storage import decode, encode
from nbcnn.run.net import Net

EPS = float(np.finfo(np.float32).eps)
FILES = {
    "mish": '''
import math
import nbcnn
from nbcnn import Mul, Softplus, Tanh


def mish(x):
    """x·tanh(log(1 + exp(x))) (Misra, arXiv:1908.08681)"""
    return x * math.tanh((0.0 if x < 0.0 else x) + math.log1p(math.exp(-abs(x))))


def mish_gradient(dy, x):
    t = math.tanh((0.0 if x < 0.0 else x) + math.log1p(math.exp(-abs(x))))
    e = math.exp(-abs(x))
    s = (e if x < 0.0 else 1.0) / (1.0 + e)
    return dy * (t + x * s * (1.0 - t * t))


Mish = nbcnn.activation("mish", mish, mish_gradient, composition=lambda x: x * Tanh()(Softplus()(x)))
''',
    "jump": '''
import math
import nbcnn


def jump(row, column, height, width, a, b, c, d, most):
    """Moved up or down by whole rows; half of the images are mirrored."""
    down = math.floor((2.0 * most + 1.0) * a) - most
    if b < 0.5:
        return row + down, column
    return row + down, width - 1.0 - column


def gained(x, channel, row, column, a, b, c, d, most):
    return x * (0.5 + c) if channel < 1.0 else x


Jump = nbcnn.augmentation("jump", source=jump, value=gained, most=2.0)
Placed = nbcnn.augmentation("placed", source=jump, most=1.0)
''',
    "softsign": '''
import nbcnn


def softsign(x, scale):
    """x/(scale + |x|)"""
    return x / (scale + abs(x))


def softsign_gradient(dy, y, scale):
    rest = 1.0 - abs(y)
    return dy * (rest * rest) / scale


Softsign = nbcnn.activation("soft_sign", softsign, softsign_gradient, reads="y", scale=1.0)
''',
    "focal": '''
import math
import nbcnn


def focal(y, target, gamma):
    """(1 − p)^gamma·cross-entropy of a logit y, p the probability of its target, 0 or 1 (Lin et al., arXiv:1708.02002)"""
    z = y if target > 0.5 else -y
    cost = (0.0 if z > 0.0 else -z) + math.log1p(math.exp(-abs(z)))
    return math.pow(1.0 - math.exp(-cost), gamma) * cost


def focal_gradient(y, target, gamma):
    sign = 1.0 if target > 0.5 else -1.0
    z = sign * y
    cost = (0.0 if z > 0.0 else -z) + math.log1p(math.exp(-abs(z)))
    p = math.exp(-cost)
    missing = 1.0 - p
    return -sign * math.pow(missing, gamma) * (missing + gamma * p * cost)


FocalLoss = nbcnn.loss("focal_loss", focal, focal_gradient, gamma=2.0)
''',
    "lion": '''
import nbcnn


def lion(w, g, m, lr, beta1, beta2):
    """The sign of an interpolated momentum (Chen et al., arXiv:2302.06675)"""
    u = beta1 * m + (1.0 - beta1) * g
    step = 1.0 if u > 0.0 else -1.0 if u < 0.0 else u
    return w - lr * step, beta2 * m + (1.0 - beta2) * g


Lion = nbcnn.optimizer("lion", lion, states=("m",), lr=1e-3, decoupled=True, beta1=0.9, beta2=0.99)
''',
}


def declared(folder, name):
    """The module of a file that a user might write, run from a folder of its own."""
    path = folder / f"own_{name}.py"
    path.write_text(FILES[name], encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    return {name: declared(folder, name) for name in FILES}


def examples():
    rng = np.random.default_rng(5)
    x = rng.integers(0, 256, (12, 1, 6, 6)).astype(np.uint8)
    return x, (x.reshape(12, -1).mean(1) > 127).astype(np.float32)[:, None]


def model_of(own, mode="cpu", precision=None):
    mish, softsign, loss = own["mish"].Mish, own["softsign"].Softsign, own["focal"].FocalLoss(gamma=1.5)
    layers = [nbcnn.Conv2d(4, 3), softsign(scale=0.5), nbcnn.Conv2d(4, 1), mish(), nbcnn.Flatten(), nbcnn.Linear(8), softsign(), nbcnn.Linear(1)]
    return nbcnn.Model(layers, loss, mode=mode, precision=precision, seed=3)


def scalar_mish(x):
    return x * math.tanh(math.log1p(math.exp(x)))


def scalar_focal(y, target, gamma):
    p = 1 / (1 + math.exp(-y))
    p = p if target > 0.5 else 1 - p
    return -((1 - p) ** gamma) * math.log(p)


def test_the_functions_are_their_formulas(own, rng):
    x = rng.standard_normal(200) * 3
    y = np.empty_like(x)
    ACTIVATIONS["mish"].fprop(x, y)
    # Constants of the functions are float32, and these have none but 0 and 1.
    np.testing.assert_allclose(y, [scalar_mish(float(v)) for v in x], rtol=1e-12)
    target = (rng.random(200) > 0.5).astype(np.float64)
    terms = LOSSES["focal_loss"].terms(x, target, gamma=1.5)
    np.testing.assert_allclose(terms, [scalar_focal(float(a), float(b), 1.5) for a, b in zip(x, target, strict=True)], rtol=1e-10)


def test_every_row_has_them_and_convolutions_apply_them(own):
    for key, row in MODES.items():
        assert {"mish_fprop", "mish_dgrad", "focal_loss_fprop", "focal_loss_dgrad", "lion"} <= set(map(str, row.ops)), key
        assert (named("conv_mish_fprop") in row.ops) == (named("conv_relu_fprop") in row.ops), key


@pytest.mark.parametrize("key", [key for key in MODES if key[0] != "cpu"], ids="-".join)
@pytest.mark.parametrize("op", ["mish_fprop", "mish_dgrad", "focal_loss_dgrad", "lion", "conv_mish_fprop"])
def test_kernels_are_the_reference(own, key, op, device, rng):
    row = MODES[key]
    if named(op) not in row.ops:
        pytest.skip(f"{key} does not fuse")
    x, other = (rng.standard_normal((3, 8)).astype(np.float32) for _ in range(2))
    if op == "lion":
        w, g, m = (rng.standard_normal(37).astype(np.float32) for _ in range(3))
        state, rates = np.zeros(8, np.int64), np.full(3, 0.01, np.float32)
        attrs = {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "decayed": 20}
        lion = next(each for each in row.ops if str(each) == op)
        got = run_op(next(impl for _, impl in row.chain(named(lion))), lion, [w, g, m, rates, state], [0, 2, 4], device=device, attrs=attrs)
        u = 0.9 * m.astype(np.float64) + 0.1 * g
        decayed = w.astype(np.float64) * np.where(np.arange(37) < 20, 1 - 0.01 * 0.1, 1)
        assert np.abs(got[0] - (decayed - 0.01 * np.sign(u))).max() <= 4 * EPS * np.abs(w).max()
        assert np.abs(got[1] - (0.99 * m.astype(np.float64) + 0.01 * g)).max() <= 4 * EPS * np.abs(m).max()
        return
    ins, attrs = {
        "mish_fprop": ([x], {}),
        "mish_dgrad": ([other, x], {}),
        "focal_loss_dgrad": ([x, (other > 0).astype(np.float32)], {"gamma": 1.5}),
    }.get(
        op,
        (
            [x.reshape(3, 8, 1, 1), rng.standard_normal((4, 8, 1, 1)).astype(np.float32), rng.standard_normal(4).astype(np.float32)],
            {"stride": 1, "pad": 0},
        ),
    )
    shape = (3, 4, 1, 1) if str(op).startswith("conv") else (3, 8)
    case = gradcheck.Case(named(op), "own", tuple(ins), ((shape, "float32"),), attrs, 16)
    for _, impl in row.chain(named(op)):
        with contextlib.suppress(Unsupported):
            assert gradcheck.parity(row, impl, case, device, None) <= gradcheck.bound(case, key[1])
            return
    raise AssertionError(f"{key} has no implementation of {op}")


def test_training_saving_loading_and_going_on(own, tmp_path):
    x, y = examples()
    model = model_of(own)
    lion = own["lion"].Lion(nbcnn.Cosine(0.01), weight_decay=0.01)
    history = model.fit(x, y, epochs=20, batch_size=4, optimizer=lion, run=tmp_path / "run", verbose=0)
    assert history.rows[-1]["loss"] < 0.7 * history.rows[0]["loss"]
    found = nbcnn.load(tmp_path / "run", mode="cpu")
    assert found.loss == own["focal"].FocalLoss(gamma=1.5)
    np.testing.assert_array_equal(found.predict(x), model.predict(x))
    # The momentum is kept: three epochs and three more are six.
    whole, parts = model_of(own), model_of(own)
    whole.fit(x, y, epochs=6, batch_size=4, optimizer=own["lion"].Lion(0.01), verbose=0, shuffle=False)
    for _ in range(2):
        parts.fit(x, y, epochs=3, batch_size=4, optimizer=own["lion"].Lion(0.01), verbose=0, shuffle=False)
    np.testing.assert_array_equal(parts.predict(x), whole.predict(x))


@pytest.mark.parametrize("key", [key for key in MODES if key[0] != "cpu"], ids="-".join)
def test_training_on_kernels(own, key, device):
    if gpu_device.SIMULATOR and key[0] == "tensorcore" and SIMULATED_CAPABILITY < (8, 0):
        pytest.skip("the simulated GPU has no tensor cores, unless NBCNN_SIMULATOR=80")
    x, y = examples()
    losses = [
        model_of(own, *each).fit(x, y, epochs=1, batch_size=12, optimizer=own["lion"].Lion(), verbose=0).rows[0]["loss"] for each in (key, ("cpu",))
    ]
    # A mean of 12 terms of about 0.5, before the first update; operands are off by 2^-8 of themselves in bf16, by 2^-11 in tf32.
    assert losses[0] == pytest.approx(losses[1], rel={"bf16": 2**-6, "tf32": 2**-9, "fp16": 2**-9}.get(key[1], 1e-5))


def test_what_reads_its_output_is_an_epilogue_in_training(own):
    net = Net([*model_of(own).layers], (1, 6, 6), mode="cpu", fusing=True)
    assert "conv_soft_sign_fprop" not in {str(step.op) for step in net.record_gradients(4).steps}  # NumPy gains nothing
    tape = Tape(training=True)
    trace(tape, layers_named([*net.layers])[:2], tape.temp("x", (4, 1, 6, 6)))
    (step,) = merge(tape.steps, MODES["cudacore", "fp32"].ops)
    assert (str(step.op), step.attrs["scale"]) == ("conv_soft_sign_fprop", 0.5)


@pytest.mark.parametrize("key", [key for key in MODES if key[0] != "cpu"], ids="-".join)
def test_a_norm_applies_it_in_training(own, key, device, rng):
    """With a parameter and without, of the input and of the output: the norm makes it, and its gradient."""
    if gpu_device.SIMULATOR and key[0] == "tensorcore" and SIMULATED_CAPABILITY < (8, 0):
        pytest.skip("the simulated GPU has no tensor cores, unless NBCNN_SIMULATOR=80")
    body = [nbcnn.BatchNorm2d(), own["mish"].Mish(), nbcnn.BatchNorm2d(), own["softsign"].Softsign(scale=0.5), nbcnn.Conv2d(2, 1), nbcnn.MSE()]
    plain, made = (Net(body, (2, 4, 4), mode=mode, precision=precision, seed=3) for mode, precision in (("cpu", "fp32"), key))
    ops = {str(step.op) for step in made.record_gradients(3).steps}
    assert {f"batchnorm_{name}_{path}" for name in ("mish", "soft_sign") for path in ("fprop", "grads")} <= ops
    assert not {"mish_fprop", "mish_dgrad", "soft_sign_fprop", "soft_sign_dgrad"} & ops
    x = decode(encode(rng.standard_normal((3, 2, 4, 4)).astype(np.float32), STORE[key[1]]), STORE[key[1]])
    # Five layers forward and back, of sums over 48 pixels.
    assert_same_gradients(plain, made, x, None, limit=2 * 5 * parity_bound(48, key[1]))


def test_a_parameter_called_as_an_attribute_of_the_step_before_stays_apart():
    """A convolution's stride and a norm's eps are not overwritten by it: the map stays a step of its own."""

    def by_stride(x, stride):
        return x * stride

    def by_stride_gradient(dy, y, stride):
        return dy * stride

    def by_eps(x, eps):
        return x * eps

    def by_eps_gradient(dy, x, eps):
        return dy * eps

    ByStride = nbcnn.activation("by_stride", by_stride, by_stride_gradient, reads="y", stride=0.5)
    ByEps = nbcnn.activation("by_eps", by_eps, by_eps_gradient, eps=0.5)
    for layer, made, name, own_value in (
        (nbcnn.Conv2d(4, 3, in_channels=1), ByStride(), "stride", 1),
        (nbcnn.BatchNorm2d(channels=1), ByEps(), "eps", 1e-5),
    ):
        tape = Tape(training=True)
        trace(tape, layers_named([layer, made]), tape.temp("x", (4, 1, 6, 6)))
        assert [step.attrs[name] for step in merge(tape.steps, MODES["cudacore", "fp32"].ops)] == [own_value, 0.5]


def test_what_is_wrong_with_a_declaration_is_said(own):
    def square(x):
        return x * x

    def wrong(dy, x):
        return dy * x

    def right(dy, x):
        return 2.0 * dy * x

    def without_dy(dy, x):
        return 2.0 * x

    def squared(dy, x):
        return dy * dy * 2.0 * x

    def printing(x):
        print(x)
        return x

    def moving(w, g, lr):
        return w + lr

    def in_a_tuple(w, g, lr):
        return (w - lr * g,)

    for call, words in (
        (lambda: nbcnn.activation("square", square, wrong), "square: the gradient is not the derivative of the function: at -4.03 it is -4.03"),
        (lambda: nbcnn.activation("square", square, without_dy), "square: the gradient is not the derivative of the function at dy = -2"),
        (lambda: nbcnn.activation("square", square, squared), "square: the gradient is not the derivative of the function at dy = -2"),
        (lambda: nbcnn.activation("square", square, square), "square must take 2 arguments, it takes 1"),
        (lambda: nbcnn.activation("relu", square, right), "nbcnn has a relu of its own"),
        (lambda: nbcnn.activation("relu_pool", square, right), "nbcnn has a relu_pool of its own"),
        (lambda: nbcnn.activation("add_relu", square, right), "nbcnn has a add_relu of its own"),
        (lambda: nbcnn.activation("linear", square, right), "nbcnn has a linear of its own"),
        (lambda: nbcnn.activation("Square", square, right), "a name has small letters"),
        (lambda: nbcnn.activation("square", square, right, reads="z"), 'reads must be "x" or "y"'),
        (lambda: nbcnn.activation("square", lambda x: x, right), "not of a lambda"),
        (lambda: nbcnn.activation("square", printing, right), "kernels do not know print, which printing names"),
        (lambda: nbcnn.activation("square", square, right, a=1, b=2, c=3), "room for 2"),
        (lambda: nbcnn.optimizer("moving", moving, lr=0.1), "the weight must stay 0"),
        (lambda: nbcnn.optimizer("one", in_a_tuple, lr=0.1), "a rule without states returns the weight, not a tuple"),
        (lambda: nbcnn.optimizer("moving", moving, lr=0), "lr must be a number of more than 0"),
        (lambda: nbcnn.optimizer("moving", moving, states=("a", "b", "c"), lr=1), "at most 2 different names"),
    ):
        with pytest.raises(nbcnn.UsageError, match=words.replace("(", r"\(")):
            call()


def test_an_augmentation_is_its_definition(own, rng):
    """A loop over pixels in the random numbers' own integers, after a flip and a crop of the gather itself."""
    images, order = rng.integers(0, 256, (6, 2, 5, 4)).astype(np.uint8), rng.permutation(6).astype(np.int32)
    state, epoch = np.zeros(8, np.int64), 3
    state[[POSITION, EPOCH, SEED]] = 1, epoch, 11
    for more in ({}, {"flip": True, "crop": 2}):
        before, after = (np.empty((5, 2, 5, 4), np.float32) for _ in range(2))
        gather.gather(images, order, state, before, **more)
        gather.gather(images, order, state, after, own=own["jump"].Jump(most=1).pixels(), **more)
        ones = np.empty_like(before)  # zero in the padding of the crop
        gather.gather(np.full_like(images, 255), order, state, ones, **more)
        wanted, moved = np.zeros_like(before), set()
        for n, index in enumerate(order[1:]):
            a, b, c, _ = ((int(word) >> 8) / 2**24 for word in philox4x32((int(index), epoch, 3, 0), (11, 0)))
            down = math.floor(3 * a) - 1
            moved.add((down, b < 0.5))
            for h in range(5):
                for w in range(4):
                    r, s = (h + down, w) if b < 0.5 else (h + down, 3 - w)
                    if 0 <= r < 5:
                        for channel in range(2):
                            gain = np.float32(0.5 + c) if channel == 0 else np.float32(1)
                            wanted[n, channel, h, w] = before[n, channel, r, s] * gain if ones[n, channel, r, s] else 0
        np.testing.assert_array_equal(after, wanted)
        assert len(moved) > 2


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("shape", [(3, 4, 4), (2, 3, 5)])
def test_kernels_augment_as_the_reference_does(own, device, rng, layout, shape):
    images, order = rng.integers(0, 256, (7, *shape)).astype(np.uint8), rng.permutation(7).astype(np.int32)
    state = np.zeros(8, np.int64)
    state[[POSITION, EPOCH, SEED]] = 2, 1, (3 << 32) + 5
    normal = {"shift": (100.5,) * shape[0], "factor": (0.125,) * shape[0]}
    for more in ({}, {"flip": "alternate"}, {"flip": True, "crop": 2, "reflect": True, "cutout": 2, **normal}):
        for pixels in (own["jump"].Jump().pixels(), own["jump"].Jump().pixels().of_targets):
            attrs, x = {"own": pixels, **more}, np.empty((5, *shape), np.float32)
            gather.gather(images, order, state, x, **attrs)
            (found,) = run_op(
                gather.OPS[named("gather")], "gather", [images, order, state], [(x.shape, "float32")], device=device, attrs=attrs, layout=layout
            )
            np.testing.assert_array_equal(found, x)


@pytest.mark.parametrize("key", [key for key in MODES if key[0] != "cpu"], ids="-".join)
def test_rows_train_on_augmented_images(own, key, device):
    if gpu_device.SIMULATOR and key[0] == "tensorcore" and SIMULATED_CAPABILITY < (8, 0):
        pytest.skip("the simulated GPU has no tensor cores, unless NBCNN_SIMULATOR=80")
    x, y = examples()
    losses = [
        model_of(own, *each).fit(x, y, epochs=1, batch_size=12, augment=augment, verbose=0).rows[0]["loss"]
        for each, augment in ((key, "flip,jump"), (("cpu",), "flip,jump"), (("cpu",), "flip"))
    ]
    assert losses[0] == pytest.approx(losses[1], rel={"bf16": 2**-6, "tf32": 2**-9, "fp16": 2**-9}.get(key[1], 1e-5))
    assert losses[1] != losses[2]


def test_augmented_training_moves_targets_and_goes_on(own):
    x, _ = examples()
    layers = [nbcnn.Conv2d(1, 3, padding=1)]

    def trained(y, *epochs, augment="jump"):
        model = nbcnn.Model(layers, "mse", mode="cpu", seed=3)
        for count in epochs:
            history = model.fit(x, y, epochs=count, batch_size=4, augment=augment, optimizer=nbcnn.SGD(0.01, momentum=0), verbose=0)
        return history.rows[-1]["loss"], model.predict(x)

    placed = own["jump"].Placed()
    for found, wanted in (
        (trained(None, 1, 1), trained(None, 2)),  # goes on with the epoch's own numbers
        (trained(x.copy(), 2, augment=placed), trained(None, 2, augment=placed)),  # a copy of the input is moved as the input is
        (trained(None, 1, augment=own["jump"].Jump), trained(None, 1, augment=Augment(own=own["jump"].Jump(most=2)))),
    ):
        np.testing.assert_array_equal(found[1], wanted[1])
    assert trained(None, 1)[0] != trained(None, 1, augment=placed)[0]


def test_what_is_wrong_with_an_augmentation_is_said(own):
    x, y = examples()

    def source(row, column, height, width, a, b, c, d):
        return row

    def value(x, channel, row, column, a, b, c, d):
        return x

    for call, words in (
        (lambda: nbcnn.augmentation("none"), "has a source, a value or both"),
        (lambda: nbcnn.augmentation("one", source=source), "source must return a row and a column"),
        (lambda: nbcnn.augmentation("one", value=value, much=1.0), "value must take 9 arguments, it takes 8"),
        (lambda: nbcnn.augmentation("flip", value=value), "nbcnn has a flip of its own"),
        (lambda: model_of(own).fit(x, y, augment=value, verbose=0), "an augmentation is words"),
        (lambda: model_of(own).fit(x, y, augment="jump,placed", verbose=0), "a function of yours stands twice"),
        (lambda: nbcnn.Model([nbcnn.Conv2d(2, 1)], "cross_entropy", mode="cpu").fit(x, x[:, 0] > 127, augment="jump", verbose=0), "have no class"),
        (lambda: nbcnn.Model([nbcnn.Linear(1)], "mse", mode="cpu").fit(x.reshape(12, -1), y, augment="jump", verbose=0), "changes images"),
    ):
        with pytest.raises(nbcnn.UsageError, match=words):
            call()


@on_every_arch
def test_augmenting_kernels_compile_without_a_stack_frame(own, rng, arch):
    images, order = rng.integers(0, 256, (4, 3, 4, 4)).astype(np.uint8), rng.permutation(4).astype(np.int32)
    attrs = {"flip": True, "crop": 2, "reflect": True, "cutout": 3, "shift": (1.0,) * 3, "factor": (2.0,) * 3, "own": own["jump"].Jump().pixels()}
    for layout in ("NCHW", "NHWC"):
        options = {"layout": layout, "attrs": attrs, "device": Host()}
        (launch,) = Bound(
            gather.OPS[named("gather")], "gather", [images, order, np.zeros(8, np.int64)], [((2, 3, 4, 4), "float32")], **options
        ).launches
        assert_lean(launch, arch)


def test_an_onnx_file_has_the_composition(own):
    checker = pytest.importorskip("onnx.checker", reason="the package onnx is not installed (the extra onnx)")
    from nbcnn.onnx.exporter import exported

    file = exported(nbcnn.Model([nbcnn.Linear(3), own["mish"].Mish()], mode="cpu", input_shape=(4,)))
    checker.check_model(file)
    assert {"Softplus", "Tanh", "Mul"} <= {node.op_type for node in file.graph.node}


def test_on_arrays_runs_what_a_kernel_runs(rng):
    x = rng.standard_normal((5, 7)).astype(np.float32)
    np.testing.assert_array_equal(on_arrays(ACTIVATIONS["relu"].function)(x), np.maximum(x, 0))


@pytest.mark.parametrize("mode", ["cpu", pytest.param("cudacore", marks=pytest.mark.gpu)])
def test_a_name_may_have_words_of_ops(mode, request):
    if mode != "cpu":
        request.getfixturevalue("device")

    def rmsprop(w, g, v, lr, decay):
        v = decay * v + (1.0 - decay) * g * g
        return w - lr * g / (math.sqrt(v) + 1e-7), v

    def convex(x):
        return x * x

    rule, layer = nbcnn.optimizer("rmsprop", rmsprop, states=("v",), lr=0.01, decay=0.9), nbcnn.activation("conv_grad", convex)
    x, y = np.random.default_rng(2).standard_normal((8, 3, 4, 4)).astype(np.float32), [0, 1] * 4
    model = nbcnn.Model([nbcnn.Conv2d(4, 3), layer(), nbcnn.Flatten(), nbcnn.Linear(2)], "cross_entropy", mode=mode, seed=3)
    losses = model.fit(x, y, epochs=5, batch_size=4, optimizer=rule(), verbose=0, channels_last=False).history["loss"]
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize("mode", ["cpu", pytest.param("cudacore", marks=pytest.mark.gpu)])
def test_an_optimizer_may_have_no_states(mode, request):
    if mode != "cpu":
        request.getfixturevalue("device")

    def steepest(w, g, lr):
        """w − lr·g"""
        return w - lr * g

    x, y = np.random.default_rng(2).standard_normal((8, 3)).astype(np.float32), [0, 1] * 4
    found = []
    for optimizer in (nbcnn.optimizer("steepest", steepest, lr=0.1)(), nbcnn.SGD(lr=0.1, momentum=0.0)):
        model = nbcnn.Model([nbcnn.Linear(2)], "cross_entropy", mode=mode, seed=3)
        model.fit(x, y, epochs=2, batch_size=4, optimizer=optimizer, verbose=0)
        found.append(model.weights())
    assert all(np.allclose(found[0][name], found[1][name], rtol=4 * EPS, atol=4 * EPS) for name in found[0])
