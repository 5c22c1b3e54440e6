"""Tests of graphs with every other feature: norms fused and folded, layers for training alone, all layers saved, losses of several outputs, flags."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

import nbcnn
from nbcnn import BatchNorm2d, Conv2d, Flatten, Graph, Input, Layer, Linear, Noise, ReLU, SoftmaxCrossEntropy, Whiten
from nbcnn.cli.train_data import harder
from nbcnn.cli.train_loss import with_loss
from nbcnn.dictionary import fit
from nbcnn.nn import description
from nbcnn.nn.models import encoder
from nbcnn.plan.bounds import parity_bound
from nbcnn.run.net import Net

IMAGE = (3, 6, 6)
BOUND = 12 * parity_bound(8 * 9 + 36 * 16, "fp32")
"""Of about twelve layers, whose longest sums are those of a 3×3 convolution of eight channels and of a channel's statistics."""


def images(count=16, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, *IMAGE), dtype=np.uint8)


def normed(general=False):
    """A block with norms: one that a convolution takes in, one whose output has two readers, one that two calls share, one behind a sum."""
    x = Input(IMAGE)
    norm = BatchNorm2d()
    a = ReLU()(BatchNorm2d()(Conv2d(8, 3, padding=1, bias=False)(x)))
    b = BatchNorm2d()(Conv2d(8, 3, padding=1)(a))
    c = ReLU()(b) + b
    d = ReLU()(norm(Conv2d(8, 3, padding=1, groups=4 if general else 1)(c)))
    e = ReLU()(norm(Conv2d(8, 3, padding=2, dilation=2)(d) if general else Conv2d(8, 1)(d)) + a)
    return Graph.of(x, Linear(3)(Flatten()(e)), SoftmaxCrossEntropy())


@pytest.mark.parametrize("general", [False, True], ids=["engines", "general"])
def test_norms_in_graphs_are_the_same_fused_and_not(fusing_cpu, general):
    """Fused, folded for predictions, and layer by layer: the same gradients, the same running statistics, the same predictions."""
    made = []
    for fuse in (True, False):
        model = nbcnn.Model(normed(general), mode="cpu", fuse=fuse).build(IMAGE)
        history = model.fit(images(), np.arange(16) % 3, epochs=3, batch_size=8, verbose=0)
        made.append((history.history["loss"], model.predict(images(4, 1)), model.net.params.as_dict()))
    (losses, outputs, weights), (others, plain, expected) = made
    assert losses == pytest.approx(others, rel=BOUND)
    # Six steps of training carry on what the first one rounds otherwise.
    np.testing.assert_allclose(outputs, plain, rtol=6 * BOUND, atol=6 * BOUND * np.abs(plain).max())
    for name in ("batchnorm1.running_var", "batchnorm3.running_mean", "batchnorm3.running_var"):
        np.testing.assert_allclose(weights[name], expected[name], rtol=6 * BOUND, atol=6 * BOUND, err_msg=name)


def test_a_norm_whose_output_has_two_readers_keeps_it(fusing_cpu):
    def ops(general):
        net = nbcnn.Model(normed(general), mode="cpu").build(IMAGE).net
        return {step.scope: str(step.op) for step in net.record_gradients(2).steps if step.op.direction in ("fprop", "apply")}

    engines = ops(general=False)
    assert (engines["conv1"], engines["batchnorm1"]) == ("conv_statistics_fprop", "batchnorm_relu_apply")
    assert (engines["batchnorm2"], engines["relu2"]) == ("batchnorm_apply", "relu_fprop")
    assert engines["batchnorm3@2"] == "batchnorm_add_relu_apply"
    general = ops(general=True)
    assert (general["conv3"], general["batchnorm3"]) == ("gconv_fprop", "batchnorm_relu_fprop")


def test_gradients_of_a_shared_norm_are_those_of_finite_differences():
    """In float32 a central difference of step h errs by about u·loss/h from rounding: 6e-8/4e-3 of a loss near 1, and by h² of curvature."""
    x = Input(IMAGE)
    norm = BatchNorm2d()
    graph = Graph.of(x, Linear(2)(Flatten()(norm(norm(Conv2d(4, 3)(x)) * norm(Conv2d(4, 3)(x))))), SoftmaxCrossEntropy())
    net = Net(graph, IMAGE, mode="cpu")
    given, labels = np.random.default_rng(2).standard_normal((6, *IMAGE)).astype(np.float32), np.arange(6, dtype=np.int32) % 2
    _, grads = net.gradients(given, labels)
    start, step = net.params.as_dict(), 4e-3
    for name in ("batchnorm1.weight", "batchnorm1.bias"):
        for at in range(4):
            losses = []
            for sign in (1, -1):
                moved = {key: value.copy() for key, value in start.items()}
                moved[name][at] += sign * step
                net.params.load_dict(moved)
                losses.append(net.gradients(given, labels)[0])
            assert grads[name][at] == pytest.approx((losses[0] - losses[1]) / (2 * step), abs=2e-3), (name, at)


IMAGES_TO_IMAGES = [
    nbcnn.BatchNorm2d(), nbcnn.GroupNorm(2), nbcnn.InstanceNorm2d(affine=True), nbcnn.LayerNorm(), nbcnn.EvoNormS0(groups=2), nbcnn.EvoNormB0(),
    nbcnn.Tanh(), nbcnn.ELU(0.5), nbcnn.ReLU6(), nbcnn.HardSwish(), nbcnn.PReLU(8), nbcnn.Softmax(), nbcnn.Dropout(0.25), nbcnn.Root(),
    nbcnn.Noise(0.1), nbcnn.MaskSquares(0.25, 2), nbcnn.KSparse(4), nbcnn.MaxPool2d(3, 1, padding=1), nbcnn.AvgPool2d((1, 3), 1, padding=(0, 1)),
    nbcnn.Conv2d(8, 3, padding=2, dilation=2, groups=2), nbcnn.ConvTranspose2d(8, 3, padding=1),
    nbcnn.Residual(nbcnn.Conv2d(8, 1), nbcnn.BatchNorm2d()),
]  # fmt: skip


def test_every_layer_of_images_is_called_trained_saved_and_loaded(tmp_path):
    """One graph through all of them; each is read twice, so that its gradient is a sum."""
    x = Input(IMAGE)
    y = Conv2d(8, 3, padding=1)(Whiten(3)(x))
    for layer in IMAGES_TO_IMAGES:
        y = layer(y) + y
    y = nbcnn.GlobalAvgPool2d()(nbcnn.Resize(mode="bilinear")(y))
    model = nbcnn.Model(x, Linear(3)(y), loss=SoftmaxCrossEntropy(label_smoothing=0.1), mode="cpu")
    options = {"optimizer": nbcnn.AdamW(lr=1e-3), "accumulate": 2, "ema": 0.5}
    history = model.fit(images(), np.arange(16) % 3, epochs=1, batch_size=8, verbose=0, **options)
    assert np.isfinite(history.history["loss"]).all()
    loaded = nbcnn.load(model.save(tmp_path / "all.safetensors"), mode="cpu")
    np.testing.assert_array_equal(loaded.predict(images(3, 1)), model.predict(images(3, 1)))
    assert loaded.layers == model.layers
    kinds = {type(layer) for layer in [*model.layers, *IMAGES_TO_IMAGES]}
    assert all(issubclass(kind, Layer) for kind in kinds)


def test_all_layers_of_the_package_can_be_called():
    assert [name for name, kind in description.known_layers().items() if not issubclass(kind, Layer)] == []


def test_a_cut_graph_is_without_what_is_there_for_training_alone():
    x = Input(IMAGE)
    y = ReLU()(Conv2d(4, 3, padding=1)(Noise(0.1)(Whiten(3)(x))))
    graph = Graph.of(x, Conv2d(3, 3, padding=1)(nbcnn.KSparse(2)(y) + y), nbcnn.MSE())
    cut = encoder(graph, "add1")
    assert cut.names == ("whiten1", "conv1", "relu1", "add1")
    assert cut.call_names() == ["whiten1", "conv1", "relu1", "add1"]
    assert [reads for _, reads in cut.calls] == [(0,), (1,), (2,), (3, 3)]


def test_an_autoencoding_graph_gives_back_the_whitened_image():
    """Training and evaluation compare with the same target: after a step of a rate too small to matter the losses agree."""
    x = Input(IMAGE)
    model = nbcnn.Model(x, Conv2d(3, 3, padding=1)(ReLU()(Conv2d(4, 3, padding=1)(Whiten(3)(x)))), loss="l1", mode="cpu")
    history = model.fit(images(), epochs=1, batch_size=16, optimizer=nbcnn.SGD(lr=1e-9), verbose=0)
    assert model.evaluate(images())["loss"] == pytest.approx(history.history["loss"][0], rel=BOUND)


@pytest.mark.parametrize("fuse", [True, False])
def test_parts_of_a_batch_add_up_with_shared_layers_and_whitening(fuse):
    """The second part of a batch is no second call of a layer, and whitens its own images. Sums of 8 and of 4 + 4 examples differ by rounding."""
    x = Input(IMAGE)
    shared, white = Conv2d(3, 3, padding=1), Whiten(3)(x)
    made = []
    for options in ({"batch_size": 4, "accumulate": 2}, {"batch_size": 8}):
        model = nbcnn.Model(Graph.of(x, shared(ReLU()(shared(white))) + Conv2d(3, 1)(x), nbcnn.MSE()), mode="cpu", fuse=fuse)
        model.fit(images(), epochs=2, shuffle=False, optimizer=nbcnn.SGD(lr=0.05), verbose=0, **options)
        made.append(model.predict(images(4, 1)))
    np.testing.assert_allclose(*made, rtol=4 * BOUND, atol=4 * BOUND * np.abs(made[1]).max())


def test_several_outputs_are_evaluated_by_the_losses_themselves():
    x = Input((4,))
    model = nbcnn.Model(x, [Linear(2)(x), Linear(3)(x)], loss=["l1", nbcnn.Huber(0.5)], mode="cpu")
    given, rng = np.random.default_rng(1).integers(0, 256, (7, 4), dtype=np.uint8), np.random.default_rng(2)
    targets = rng.standard_normal((7, 2)).astype(np.float32), rng.standard_normal((7, 3)).astype(np.float32)
    history = model.fit(given, targets, epochs=1, batch_size=7, optimizer=nbcnn.SGD(lr=1e-9), verbose=0)
    first, second = model.predict(given)
    d = np.abs(second - targets[1])
    expected = np.abs(first - targets[0]).mean() + np.where(d <= 0.5, d * d / 2, 0.5 * (d - 0.25)).mean()
    assert model.evaluate(given, targets, batch_size=3)["loss"] == pytest.approx(expected, rel=1e-6)
    assert history.history["loss"][0] == pytest.approx(expected, rel=1e-6)


def test_losses_of_several_outputs_count_examples_alike():
    with pytest.raises(nbcnn.UsageError, match="weight and ignore_index are for one output"):
        nbcnn.Losses((SoftmaxCrossEntropy(ignore_index=-1), SoftmaxCrossEntropy()))


def test_flags_put_layers_and_losses_into_a_graph():
    x = Input(IMAGE)
    graph = Graph.of(x, x + Conv2d(3, 3, padding=1)(x), nbcnn.MSE())
    none = {"sparse": None, "whiten": False, "noise": None, "mask": None}
    assert harder(graph, SimpleNamespace(**none)) is graph
    spoiled = harder(graph, SimpleNamespace(**none | {"whiten": True, "noise": 0.5}))
    assert spoiled.names == ("whiten1", "noise1", "conv1", "add1", "mse1")
    assert [reads for _, reads in spoiled.calls] == [(0,), (1,), (2,), (2, 3)]
    flags = {"loss": "l1", "class_weights": None, "ignore_index": None, "label_smoothing": None, "huber_delta": None, "model": "own.py:net"}
    assert with_loss(spoiled, SimpleNamespace(**flags)) == spoiled.with_loss(nbcnn.L1())


def test_weights_by_kmeans_are_for_lists():
    x = Input(IMAGE)
    net = Net(Graph.of(x, Conv2d(3, 3, padding=1)(x), nbcnn.MSE()), IMAGE, mode="cpu")
    with pytest.raises(nbcnn.UsageError, match="a graph trains from"):
        fit.start(net, images())
