"""Tests of `nbcnn.Model`: what the root exports, training, predicting, continuing, freezing, files, and what bad input is told."""

from __future__ import annotations

import ast
import json
import os
import pickle
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from scripts import ROOT, exits, train

import nbcnn
from nbcnn import Conv2d, Flatten, Linear, MaxPool2d, ReLU, SoftmaxCrossEntropy
from nbcnn.files import extras
from nbcnn.files.errors import UsageError
from nbcnn.nn import description
from nbcnn.nn.optim import learning_rates
from nbcnn.train import checkpoint
from nbcnn.train.trainer import CallbackError


def network():
    return [Conv2d(4, 3, padding=1), ReLU(), MaxPool2d(2), Flatten(), Linear(3)]


def examples(count=24, seed=1):
    """Images 1×6×6 of three classes: each has its bright third."""
    rng = np.random.default_rng(seed)
    y = np.arange(count) % 3
    x = rng.integers(0, 60, (count, 1, 6, 6)).astype(np.uint8)
    for image, label in zip(x, y, strict=True):
        image[0, 2 * label : 2 * label + 2] += 180
    return x, y


def trained(**options):
    model = nbcnn.Model(network(), loss="cross_entropy", mode="cpu", **options)
    model.fit(*examples(), epochs=4, batch_size=8, optimizer=nbcnn.SGD(lr=0.1), verbose=0)
    return model


# -- what the root exports


def test_importing_costs_little_and_brings_nothing_heavy():
    code = "import time, sys; t = time.perf_counter(); import nbcnn; s = time.perf_counter() - t; print(s); "
    code += "print([m for m in ('numba', 'numpy', 'sklearn', 'matplotlib', 'tqdm') if m in sys.modules])"
    seconds, heavy = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout.splitlines()
    assert heavy == "[]"
    assert float(seconds) < 0.2


def test_what_type_checkers_see_is_what_is_exported():
    tree = ast.parse((ROOT / "nbcnn" / "__init__.py").read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {(node.module, alias.name) for node in block.body if isinstance(node, ast.ImportFrom) and node.module != "typing" for alias in node.names}
    assert seen == {(f"nbcnn.{module}", name) for module, names in nbcnn._HOMES.items() for name in names}
    assert set(nbcnn.__all__) == {"__version__", *(name for _, name in seen)}
    for name in nbcnn.__all__:
        assert getattr(nbcnn, name).__doc__, name
    assert set(nbcnn.__all__) <= set(dir(nbcnn))
    with pytest.raises(AttributeError, match="no attribute 'Modell'"):
        _ = nbcnn.Modell


# -- training and predicting


def test_the_example_of_the_readme_as_it_stands(tmp_path):
    rng = np.random.default_rng(0)
    x, y, xt, yt = (*(rng.integers(0, 256, (16, 3, 8, 8)).astype(np.uint8), rng.integers(0, 10, 16)) * 2,)[:4]
    new = xt
    model = nbcnn.Model([Conv2d(64, 3, padding=1), ReLU(), MaxPool2d(2), Flatten(), Linear(10)], loss="cross_entropy")
    history = model.fit(
        x, y, epochs=5, batch_size=256 // 16, optimizer=nbcnn.SGD(lr=nbcnn.Cosine(0.1), momentum=0.9), validation_data=(xt, yt), verbose=0
    )
    assert list(history.history) == [
        "epoch",
        "step",
        "learning_rate",
        "loss",
        "val_loss",
        "seconds",
        "images_per_second",
        "val_accuracy",
    ]
    assert len(history) == 5
    assert not history.interrupted
    model.save(tmp_path / "net.safetensors")
    again = nbcnn.load(tmp_path / "net.safetensors")
    np.testing.assert_array_equal(again.predict(new), model.predict(new))
    np.testing.assert_allclose(model.predict_proba(new).sum(1), 1, rtol=1e-6)
    assert model.features(new, at="pool1").shape == (16, 64, 4, 4)
    assert model.evaluate(xt, yt).keys() == {"loss", "accuracy"}


def test_it_learns_and_evaluates_as_the_trainer_does():
    x, y = examples()
    model = nbcnn.Model(network(), loss="cross_entropy", mode="cpu")
    history = model.fit(x, y, epochs=6, batch_size=8, optimizer=nbcnn.SGD(lr=0.1), validation_data=(x, y), verbose=0)
    found = model.evaluate(x, y)
    assert found["accuracy"] == 1.0
    assert history.rows[-1]["val_accuracy"] == 1.0
    # The trainer takes the logarithm of float32 probabilities near 1, each of which is rounded by 2⁻²⁴.
    assert found["loss"] == pytest.approx(history.rows[-1]["val_loss"], rel=1e-5, abs=2**-23)
    assert (model.predict_classes(x) == y).all()


def test_a_single_image_and_channels_last_are_the_same_images():
    x, _ = examples()
    model = trained()
    wanted = model.predict(x)
    np.testing.assert_array_equal(model.predict(x[3]), model.predict(x[3:4]))
    np.testing.assert_array_equal(model.predict(x[3, 0]), model.predict(x[3:4]))
    np.testing.assert_array_equal(model.predict(x.transpose(0, 2, 3, 1), channels_last=True), wanted)
    np.testing.assert_array_equal(model.predict(x.tolist()), wanted)


def test_floats_between_0_and_1_are_the_bytes_that_they_stand_for():
    x, y = examples()
    made = []
    for data in (x, x.astype(np.float32) / 255):
        model = nbcnn.Model(network(), loss="cross_entropy", mode="cpu")
        model.fit(data, y, epochs=1, batch_size=8, verbose=0)
        made.append(model.predict(data))
    # A byte is multiplied by the float32 nearest to 1/255, which is one rounding off; three training steps keep that small.
    np.testing.assert_allclose(*made, rtol=1e-4, atol=1e-6)


def test_floats_are_not_rounded_to_bytes():
    x = np.linspace(-3, 5, 1000, dtype=np.float32).reshape(-1, 1, 1, 1)
    model = nbcnn.Model([Conv2d(1, 1, bias=False)], loss="mse", mode="cpu")
    model.fit(x, epochs=1, batch_size=100, verbose=0)
    assert len(np.unique(model.predict(x))) == 1000
    inside, outside = model.predict(x[-1:]), model.predict(x[-1:] + 8)
    np.testing.assert_allclose(outside, 2.6 * inside, rtol=1e-5)  # floats are taken as they are: 5 and 13
    with pytest.raises(nbcnn.UsageError, match="NaN or Inf"):
        model.predict(np.full((1, 1, 1, 1), np.inf, np.float32))


def test_a_second_fit_goes_on_as_one_longer_would():
    x, y = examples(20)
    once, twice = (nbcnn.Model(network(), loss="cross_entropy", mode="cpu") for _ in range(2))
    options = {"batch_size": 8, "verbose": 0}
    for optimizer in (nbcnn.Adam(lr=0.01), nbcnn.SGD(lr=0.1)):
        once.fit(x, y, epochs=3, optimizer=optimizer, **options)
        twice.fit(x, y, epochs=1, optimizer=optimizer, **options)
        twice.fit(x, y, epochs=2, optimizer=optimizer, **options)
        assert (once.predict(x) == twice.predict(x)).all()


def test_a_run_is_what_train_py_makes(tmp_path):
    """Same recipe, same bits: weights, moments, order and losses."""
    flags = ["--model", "mnist-cnn", "--dataset", "shapes", "--limit", "8", "--batch", "4", "--epochs", "2", "--mode", "cpu", "--quiet"]
    flags += ["--recipe", "default", "--lr", "0.05", "--seed", "3", "--out", tmp_path / "command"]
    assert exits(train, flags) == 0
    from nbcnn import datasets

    model = nbcnn.Model(nbcnn.mnist_cnn()[:-1], loss="cross_entropy", mode="cpu", seed=3)
    model.fit(
        datasets.load("shapes").cut(8),
        epochs=2,
        batch_size=4,
        optimizer=nbcnn.SGD(lr=nbcnn.Cosine(0.05, warmup=1), momentum=0.9),
        run=tmp_path / "library",
        verbose=0,
    )
    saved = [checkpoint.read(tmp_path / name / checkpoint.LAST) for name in ("command", "library")]
    assert saved[0].tensors.keys() == saved[1].tensors.keys()
    for name, tensor in saved[0].tensors.items():
        np.testing.assert_array_equal(tensor, saved[1].tensors[name], err_msg=name)
    files = [{file.name for file in (tmp_path / name).iterdir()} for name in ("command", "library")]
    assert files[0] == files[1]
    rows = [[json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()] for name in ("command", "library")]
    for name in ("train_loss", "test_loss", "test_accuracy", "learning_rate"):
        assert [row[name] for row in rows[0]] == [row[name] for row in rows[1]]
    images = datasets.load("shapes").test_images[:5]
    for name in ("command", "library"):
        np.testing.assert_array_equal(nbcnn.load(tmp_path / name, mode="cpu").predict(images), model.predict(images))
    assert exits(train, ["--resume", tmp_path / "library", "--quiet"]) == 3, "the command cannot have the arrays"


def test_nothing_is_written_without_a_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trained()
    assert list(tmp_path.iterdir()) == []


def test_an_autoencoder_has_its_input_as_target():
    x, _ = examples()
    model = nbcnn.Model([Conv2d(4, 3, padding=1), ReLU(), Conv2d(1, 3, padding=1)], loss="mse", mode="cpu")
    history = model.fit(x, epochs=2, batch_size=8, optimizer=nbcnn.Adam(lr=0.01), validation_data=x, verbose=0)
    assert history.history["loss"][1] < history.history["loss"][0]
    assert model.predict(x).shape == x.shape
    assert model.evaluate(x)["loss"] == pytest.approx(history.rows[-1]["val_loss"], rel=1e-5)
    with pytest.raises(UsageError, match="predict_proba is for networks that classify"):
        model.predict_proba(x)
    with pytest.raises(UsageError, match=r"targets are \(24,\), and the network.s output is \(M, 1, 6, 6\); for classes, the loss is"):
        model.fit(x, np.zeros(len(x), int), verbose=0)


def test_ctrl_c_returns_the_history_so_far():
    class Press(nbcnn.Callback):
        def epoch(self, trainer, epoch):
            if epoch.epoch == 2:
                os.kill(os.getpid(), signal.SIGINT)

    model = nbcnn.Model(network(), loss="cross_entropy", mode="cpu")
    history = model.fit(*examples(), epochs=50, batch_size=8, callbacks=[Press()], verbose=0)
    assert history.interrupted
    assert len(history) == 2
    assert model.predict(examples()[0]).shape == (24, 3)
    assert "interrupted" in repr(history)


def test_a_callback_that_raises_says_which_and_loses_nothing():
    class Broken(nbcnn.Callback):
        def epoch(self, trainer, epoch):
            raise KeyError("mine")

    model = nbcnn.Model(network(), loss="cross_entropy", mode="cpu")
    with pytest.raises(CallbackError, match=r"the callback Broken.epoch raised KeyError: 'mine'; nothing was written"):
        model.fit(*examples(), epochs=3, batch_size=8, callbacks=[Broken()], verbose=0)
    after = model.net.params.as_dict()["conv1.weight"]
    assert np.isfinite(after).all()
    assert len(model.fit(*examples(), epochs=1, batch_size=8, verbose=0)) == 1


def test_early_stopping_takes_the_best_weights_in_memory_and_from_the_run_folder(tmp_path):
    x, y = examples()
    model = nbcnn.Model(network(), loss="cross_entropy", mode="cpu")
    far = nbcnn.SGD(lr=nbcnn.Constant(3.0), momentum=0.0)
    options = {"epochs": 30, "batch_size": 8, "optimizer": far, "validation_data": (x, y), "callbacks": [nbcnn.EarlyStopping(2)], "verbose": 0}
    history = model.fit(x, y, run=tmp_path / "run", **options)
    assert len(history) < 30
    assert history.stopped == "the loss has not fallen for 2 epochs"
    assert not history.interrupted
    losses = history.history["val_loss"]
    assert history.best_epoch == int(np.argmin(losses)) + 1 == len(history) - 2
    assert model.evaluate(x, y)["loss"] == pytest.approx(min(losses), rel=1e-5)
    for which, loss in ((None, min(losses)), ("best", min(losses)), ("last", losses[-1])):
        assert nbcnn.load(tmp_path / "run", mode="cpu", checkpoint=which).evaluate(x, y)["loss"] == pytest.approx(loss, rel=1e-5)


def test_divergence_leaves_finite_weights():
    model = trained()
    with pytest.raises(nbcnn.Diverged, match=r"nothing was written; a smaller learning rate \(1e\+29\), clip-norm 1"):
        model.fit(*examples(), epochs=3, batch_size=8, optimizer=nbcnn.SGD(lr=1e30), verbose=0)
    assert all(np.isfinite(tensor).all() for tensor in model.net.params.as_dict().values())


@pytest.mark.filterwarnings("ignore:examples are floats")
def test_divergence_at_a_tiny_rate_is_not_blamed_on_the_rate():
    model = nbcnn.Model([nbcnn.Linear(1)], "mse", mode="cpu")
    x = np.full((8, 4), 3e38, np.float32)
    with np.errstate(all="ignore"), pytest.raises(nbcnn.Diverged, match="the learning rate, 1e-09, is small already: look for"):
        model.fit(x, x[:, :1], optimizer=nbcnn.SGD(lr=1e-9), verbose=0)


# -- fine-tuning


def test_frozen_parameters_stay_and_rates_are_multiplied():
    x, y = examples()
    model, slow, plain = (nbcnn.Model(network(), loss="cross_entropy", mode="cpu") for _ in range(3))
    for each in (model, slow, plain):
        each.build((1, 6, 6))
    first = model.net.params.as_dict()
    assert model.freeze("conv*") == ["conv1.weight", "conv1.bias"]
    assert slow.set_factors("linear1", lr=0.25) == ["linear1.weight", "linear1.bias"]
    one_step = {"epochs": 1, "batch_size": 24, "verbose": 0}
    for each in (model, slow, plain):
        each.fit(x, y, optimizer=nbcnn.SGD(lr=0.5, momentum=0, weight_decay=0.1), **one_step)
    after, slower, whole = (each.net.params.as_dict() for each in (model, slow, plain))
    for name in ("conv1.weight", "conv1.bias"):
        np.testing.assert_array_equal(after[name], first[name])
        np.testing.assert_array_equal(slower[name], whole[name])
    for name in ("linear1.weight", "linear1.bias"):
        np.testing.assert_array_equal(after[name], whole[name])
        # The step is a quarter: two float32 roundings of weights of at most 1 apart.
        np.testing.assert_allclose(slower[name] - first[name], (whole[name] - first[name]) / 4, rtol=0, atol=4 * 2**-24)
    assert "2 of 4 parameters frozen" in model.summary()
    with pytest.raises(UsageError, match=r"no parameter matches 'conw1'; did you mean conv1\?"):
        model.freeze("conw1")
    model.freeze()
    with pytest.raises(UsageError, match="every parameter is frozen"):
        model.fit(x, y, verbose=0)
    assert model.unfreeze() == ["conv1.weight", "conv1.bias", "linear1.weight", "linear1.bias"]


def test_no_gradient_of_what_is_frozen_is_computed_or_clipped_by():
    from nbcnn.nn.optim import FROZEN
    from nbcnn.run.session import TrainingSession

    x, y = examples()
    net = nbcnn.Model(network(), loss="cross_entropy", mode="cpu", input_shape=(1, 6, 6)).net

    def ops(names, optimizer):
        rates = np.full(1, 0.1, np.float32)
        session = TrainingSession(net, x, labels=y, optimizer=optimizer, learning_rates=rates, batch=24, factors=dict.fromkeys(names, FROZEN))
        return [(item.step.scope, str(item.step.op)) for item in session.plans["train", 24].steps]

    optimizer = nbcnn.SGD(clip_norm=1.0)
    made = ops(["conv1.weight", "conv1.bias"], optimizer)
    assert not [scope for scope, op in made if str(op).endswith(("dgrad", "wgrad")) and scope in ("conv1", "relu1", "pool1", "flatten1")]
    assert ("linear1", "conv_wgrad") in made
    with pytest.raises(UsageError, match=r"clip_norm would count the gradient of the frozen conv1\.weight"):
        ops(["conv1.weight"], optimizer)


def test_weights_are_taken_where_they_fit(tmp_path):
    path = trained().save(tmp_path / "small.safetensors")
    other = nbcnn.Model([*network()[:-1], Linear(5)], loss="cross_entropy", mode="cpu", input_shape=(1, 6, 6))
    with pytest.raises(nbcnn.CheckpointError, match=r"partial=True(.|\n)*of another shape: linear1\.weight"):
        other.load_weights(path)
    found = other.load_weights(path, partial=True)
    assert found.taken == ("conv1.weight", "conv1.bias")
    assert found.other_shape == ("linear1.weight", "linear1.bias")
    assert "2 parameters taken" in str(found)
    assert not nbcnn.Model(network(), mode="cpu", input_shape=(1, 6, 6)).load_weights(path).missing


def test_weights_of_another_program_have_the_names_of_the_parameters(tmp_path):
    """A file of PyTorch names tensors as a state dict does, with a counter of batches beside the statistics of every norm."""
    model = nbcnn.Model([Conv2d(4, 3), nbcnn.BatchNorm2d()], mode="cpu", input_shape=(1, 6, 6))
    values = {name: array + np.float32(1) for name, array in model.net.params.as_dict().items()}
    path = tmp_path / "other.safetensors"
    checkpoint.save(path, values | {"batchnorm1.num_batches_tracked": np.array(3)}, {})
    assert model.load_weights(path).taken == tuple(model.net.params.names)
    for name, array in model.net.params.as_dict().items():
        np.testing.assert_array_equal(array, values[name])
    checkpoint.save(path, values | {"further": np.array(3)}, {})
    with pytest.raises(nbcnn.CheckpointError, match="not of this network: further"):
        model.load_weights(path)


# -- files


def test_a_saved_model_has_everything(tmp_path):
    x, y = examples()
    model = nbcnn.Model(network(), loss="cross_entropy", mode="cpu", classes=["a", "b", "c"])
    model.fit((x.transpose(0, 2, 3, 1) / 16.0).astype(np.float32), y, epochs=1, batch_size=8, verbose=0)
    again = nbcnn.load(model.save(tmp_path / "net"), mode="cpu")
    assert again.classes == ("a", "b", "c")
    assert again.form == model.form
    assert again.form.channels_last
    assert (again.form.scale, again.form.span) == ((0.0, 1.0), (0.0, x.max() / 16))
    assert again.layers == model.layers
    assert isinstance(again.loss, SoftmaxCrossEntropy)
    noted = checkpoint.read(tmp_path / "net.safetensors").metadata
    assert {"format", "network", "nbcnn", "numpy", "python", "mode"} <= noted.keys()
    again.fit((x.transpose(0, 2, 3, 1) / 16.0).astype(np.float32), y, epochs=1, batch_size=8, verbose=0)


def test_every_layer_is_data_and_back():
    layers = [
        Conv2d(4, (3, 5), stride=2, padding=1, bias=False),
        nbcnn.Residual(Conv2d(4, 1), nbcnn.LeakyReLU(0.2)),
        nbcnn.EvoNormS0(groups=2, channels=4),
        nbcnn.StateSpaceConv1d(7, init="repo"),
        nbcnn.RMSLE(2.0),
    ]
    assert description.from_data(json.loads(json.dumps(description.as_data(layers)))) == layers
    public = {name for name in nbcnn.__all__ if hasattr(getattr(nbcnn, name), "build") and name != "Model"}
    assert public == set(description.known_layers())


def test_an_unknown_layer_is_named_and_can_be_given(tmp_path):
    from dataclasses import dataclass

    from nbcnn.nn.activations import Elementwise

    @dataclass(frozen=True)
    class Mine(Elementwise):
        kind = "swish"

    model = nbcnn.Model([Conv2d(2, 3), Mine()], mode="cpu", input_shape=(1, 6, 6))
    path = model.save(tmp_path / "mine.safetensors")
    with pytest.raises(description.DescriptionError, match=r"a Mine, which nbcnn does not have: .*layers=\[Mine\]"):
        nbcnn.load(path)
    x = examples()[0]
    np.testing.assert_array_equal(nbcnn.load(path, layers=[Mine], mode="cpu").predict(x), model.predict(x))


def test_a_damaged_file_is_refused(tmp_path):
    path = trained().save(tmp_path / "net.safetensors")
    content = path.read_bytes()
    for spoilt in (content[:-3], content[:40] + b"x" + content[41:], content[:-8] + b"\xff" * 8):
        path.write_bytes(spoilt)
        with pytest.raises(nbcnn.CheckpointError):
            nbcnn.load(path)
    with pytest.raises(nbcnn.CheckpointError, match=r"no file or run folder .*: give a \.safetensors file, or the folder of a run"):
        nbcnn.load(tmp_path / "none")


# -- memory


def test_closing_lets_everything_go():
    import gc
    import weakref

    with trained() as model:
        model.features(examples()[0], at="pool1")
        weights = weakref.ref(model.net.params)
    gc.collect()
    assert weights() is None
    for restored in (model, pickle.loads(pickle.dumps(model))):
        with pytest.raises(UsageError, match="the model was closed"):
            restored.predict(examples()[0])
    assert model.build((1, 6, 6)).predict(examples()[0]).shape == (24, 3)
    with nbcnn.Model(network(), mode="cpu") as model, pytest.raises(UsageError, match="not built"):
        model.weights()


def test_fits_in_a_loop_keep_no_session(monkeypatch):
    import weakref

    from nbcnn.model import training as module

    alive = []

    class Session(module.TrainingSession):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            alive.append(weakref.ref(self))

    monkeypatch.setattr(module, "TrainingSession", Session)
    model = trained()
    for _ in range(3):
        model.fit(*examples(), epochs=1, batch_size=8, verbose=0)
    import gc

    gc.collect()
    assert len(alive) == 4
    assert [each() for each in alive] == [None] * 4


def test_counts_may_be_whole_numbers_of_any_type():
    x, y = examples()
    found = []
    for whole in (int, np.int64, np.uint8, float, np.float32):
        options = {"epochs": whole(1), "batch_size": whole(8), "accumulate": whole(2)}
        with nbcnn.Model(network(), loss="cross_entropy", mode="cpu", seed=whole(3), input_shape=[whole(n) for n in (1, 6, 6)]) as model:
            assert len(model.fit(x, y, verbose=0, **options)) == 1
            found.append(model.predict(x, batch_size=whole(4)))
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])


# -- what bad input is told


def misuse():
    x, y = examples()

    def fit(*given, **options):
        return lambda: nbcnn.Model(network(), loss="cross_entropy", mode="cpu").fit(*given, **{"verbose": 0} | options)

    one_hot = np.eye(3)[y]
    return [
        (fit(x, y + 1), r"labels\[2\] is 3, and the 3 classes are 0 to 2; classes are counted from 0"),
        (fit(x, y - 1), r"labels\[0\] is -1, and the 3 classes are 0 to 2"),
        (fit(x, y + 0.5), r"labels\[0\] is 0.5: a class is a whole number"),
        (fit(x, one_hot / 2), "row 0 is not one-hot"),
        (fit(x, np.eye(4)[y]), "one-hot rows of 4 classes, and there are 3"),
        (fit(x, y[:5]), "there are 5 labels for 24 images: each image needs one"),
        (fit(x), "there are no labels, and the loss needs them"),
        (fit(x, y, validation_data=(x, y + 5)), r"validation labels\[0\] is 5"),
        (fit(x, y, validation_data=x), r"validation_data must be \(x, y\)"),
        (fit(x, y, epochs=0), "fit needs a whole number of at least 1 as epochs, got 0"),
        (fit(x, y, epochs=1.5), "fit needs a whole number of at least 1 as epochs, got 1.5"),
        (fit(x, y, epochs=True), "at least 1 as epochs, got True"),
        (fit(x, y, epochs=np.float32(1.5)), "at least 1 as epochs, got "),
        (fit(x, y, epochs="2"), "at least 1 as epochs, got '2'"),
        (fit(x, y, epochs=float("inf")), "at least 1 as epochs, got inf"),
        (fit(x, y, batch_size=16.5), "fit needs a whole number of at least 1 as batch_size, got 16.5"),
        (fit(x, y, accumulate=1.5), "fit needs a whole number of at least 1 as accumulate, got 1.5"),
        (fit(lambda epoch: [(x, y)], steps_per_epoch=1.5), "at least 1 as steps_per_epoch, got 1.5"),
        (lambda: trained().predict(x, batch_size=1.5), "predict needs a whole number of at least 1 as batch_size, got 1.5"),
        (lambda: trained().evaluate(x, y, batch_size=1.5), "evaluate needs a whole number of at least 1 as batch_size, got 1.5"),
        (lambda: trained().explain(1.5), "explain needs a whole number of at least 1 as batch_size, got 1.5"),
        (fit(x, y, optimizer="sgdx"), r"optimizer must be nbcnn.SGD.* did you mean sgd"),
        (fit(x[:0], y[:0]), "there are no examples"),
        (fit(np.zeros((4, 3, 5, 3)), np.zeros(4, int)), "both its second and its last axis could be channels"),
        (fit(np.full((4, 1, 6, 6), np.nan), np.zeros(4, int)), "NaN or Inf"),
        (fit([["a"]], [0]), "examples are of dtype <U1: nbcnn takes bytes"),
        (lambda: trained().predict(x[:0]), "nothing to predict"),
        (lambda: trained().evaluate(x[:0], y[:0]), "nothing to evaluate: no examples"),
        (fit(x, list("abc") * 8), "number the classes first"),
        (fit(x, np.where(y, y, np.nan)), "is nan: a class is a whole number"),
        (lambda: trained().predict(x[:, :, :5]), r"must be \(M, 1, 6, 6\)"),
        (lambda: trained().features(x, at="pool9"), "no layer 'pool9'"),
        (lambda: nbcnn.Model(network(), loss="cross_entropy").predict(x), "not built"),
        (lambda: trained().net.gradients(x.astype(np.float32) / 255), "there are no labels"),
        (lambda: trained().net.gradients(x.astype(np.float32) / 255, y + 1), r"labels\[2\] is 3"),
        (lambda: nbcnn.Model([]), "at least one layer"),
        (lambda: nbcnn.Model([SoftmaxCrossEntropy()]), "at least one layer"),
        (lambda: nbcnn.Model([SoftmaxCrossEntropy(), Linear(3)], mode="cpu").build((4,)), "a loss must be the last"),
        (lambda: nbcnn.Model([Linear]), "is no layer"),
        (lambda: nbcnn.Model(network(), loss="cross_entropi"), "did you mean cross_entropy"),
        (lambda: nbcnn.Model([*network(), SoftmaxCrossEntropy()], loss="mse"), "is a loss already"),
        (lambda: nbcnn.Model(network(), mode="cpu").fit(x, y), "the network has no loss"),
        (lambda: nbcnn.Model(network(), seed=1e26), "Model needs a whole number of at least 0 and less than 9,223,372,036,854,775,808 as seed"),
        (lambda: nbcnn.Model(network(), seed=1.5), "as seed, got 1.5"),
        (lambda: nbcnn.Model(network(), input_shape="abc"), r"an example is \(C, H, W\) or \(F,\), each a whole number of at least 1, got 'abc'"),
        (lambda: nbcnn.Model(network(), input_shape=6), "each a whole number of at least 1, got 6"),
        (lambda: nbcnn.Model(network(), input_shape=(1, 6.5, 6)), r"each a whole number of at least 1, got \(1, 6.5, 6\)"),
        (lambda: Conv2d(0, 3), "at least 1 as out_channels, got 0"),
        (lambda: Conv2d(4, 0), "at least 1 as kernel_size, got 0"),
        (lambda: Conv2d(4, (3, 0)), r"at least 1 as kernel_size, got \(3, 0\)"),
        (lambda: Conv2d(4, 3, padding=-1), "at least 0 as padding"),
        (lambda: MaxPool2d(0), "at least 1 as kernel_size"),
        (lambda: nbcnn.AvgPool2d(0), "AvgPool2d needs a whole number of at least 1 as kernel_size, got 0"),
        (lambda: Linear(0), "at least 1 as out_features"),
        (lambda: nbcnn.Upsample2d(0), "at least 1 as scale_factor"),
        (lambda: nbcnn.Upsample2d(1.5), "at least 1 as scale_factor, got 1.5"),
        (lambda: nbcnn.SGD(lr=float("nan")), "SGD: lr must be a number of more than 0"),
        (lambda: nbcnn.SGD(lr=float("inf")), "lr must be"),
        (lambda: nbcnn.SGD(momentum=-0.1), "SGD: momentum must be a number of at least 0 and less than 1, got -0.1"),
        (lambda: nbcnn.SGD(weight_decay=float("nan")), "weight_decay must be"),
        (lambda: nbcnn.Adam(beta1=1), "Adam: beta1 must be"),
        (lambda: nbcnn.Adam(eps=0), "eps must be"),
        (lambda: nbcnn.Cosine(0.1, warmup=float("inf")), "warmup must be"),
        (lambda: nbcnn.EarlyStopping(0), "EarlyStopping needs a whole number of at least 1 as patience, got 0"),
        (lambda: nbcnn.EarlyStopping(1.5), "as patience, got 1.5"),
        (lambda: nbcnn.use_device("gpu"), "no device 'gpu'"),
    ]


MISUSE = misuse()


@pytest.mark.parametrize("number", range(len(MISUSE)), ids=[says[:40] for _, says in MISUSE])
def test_misuse_is_told_what_is_wrong(number):
    wrong, says = MISUSE[number]
    with pytest.raises(UsageError, match=says):
        wrong()


def test_a_folder_with_something_in_it_is_not_written_over(tmp_path):
    (tmp_path / "thing").write_text("mine")
    with pytest.raises(UsageError, match="is there already"):
        nbcnn.Model(network(), loss="cross_entropy", mode="cpu").fit(*examples(), run=tmp_path, verbose=0)
    assert [file.name for file in tmp_path.iterdir()] == ["thing"]


def test_a_folder_that_cannot_be_written_is_named_in_the_words_of_fit(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"cannot write the run folder \(.*\); choose another with run=: '.*run'"):
        nbcnn.Model(network(), loss="cross_entropy", mode="cpu").fit(*examples(), run=tmp_path / "file" / "run", verbose=0)


def test_a_warmup_without_end_is_no_overflow():
    np.testing.assert_array_equal(nbcnn.Constant(0.1, warmup=2).rates(3, 2), learning_rates("constant", 0.1, 3, 4))
    assert (nbcnn.Cosine(0.1, warmup=1e308).rates(4, 2) < 1e-15).all()


def test_devices_are_chosen_by_number():
    code = "import os, nbcnn; nbcnn.use_device({0!r}); print(os.environ.get('CUDA_VISIBLE_DEVICES')); "
    code += "from nbcnn.gpu.select import refused; print(refused())"

    def run(name, visible):
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": visible}
        return subprocess.run([sys.executable, "-c", code.format(name)], env=environment, cwd=Path(ROOT), capture_output=True, text=True)

    assert run("cuda:1", "4,7").stdout.splitlines()[0] == "7"
    assert "shows 2" in run("cuda:2", "4,7").stderr
    assert run("cpu", "0").stdout.splitlines()[1] == "use_device('cpu') was called"


NO_DRIVER_CALLS = pytest.mark.skipif(not extras.installed("cuda"), reason=extras.missing("cuda"))


@pytest.mark.parametrize(
    ("device", "mode", "ends"), [pytest.param("cuda:63", "auto", 4, marks=NO_DRIVER_CALLS), ("cuda:63", "cpu", 0), ("cpu", "auto", 0)]
)
def test_a_gpu_that_was_asked_for_by_its_name_is_no_cpu(device, mode, ends):
    """No machine has 64 GPUs."""
    code = f"""import sys, nbcnn
nbcnn.use_device({device!r})
try:
    model = nbcnn.Model([nbcnn.Conv2d(2, 1)], "mse", mode={mode!r}).build((2, 4, 4))
except nbcnn.GpuUnavailable as error:
    print(error)
    sys.exit(error.exit_code)
print(model)
"""
    environment = {name: value for name, value in os.environ.items() if name not in ("CUDA_VISIBLE_DEVICES", "NBCNN_SIMULATOR")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=Path(ROOT), capture_output=True, text=True)
    assert done.returncode == ends, done.stderr
    assert ("there is no cuda:63, which was asked for by its name" in done.stdout) == (ends == 4)


@pytest.mark.parametrize(
    ("name", "line"),
    [("net.h5", "save('net.safetensors')"), ("net.PT", "nbcnn.torch.state_dict(model)"), ("net.onnx", "onnx.save(nbcnn.onnx.to_onnx(model), path)")],
)
def test_a_name_of_another_format_is_refused_with_what_to_write(tmp_path, name, line):
    model = nbcnn.Model([nbcnn.Linear(2)], mode="cpu").build((3,))
    with pytest.raises(UsageError, match="names another format") as error:
        model.save(tmp_path / name)
    assert line in str(error.value)
    assert not list(tmp_path.iterdir())
    assert [model.save(tmp_path / given).name for given in ("net", "net.v2")] == ["net.safetensors", "net.v2.safetensors"]


def test_a_normalised_model_is_saved_and_used_with_its_normalisation(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.integers(100, 140, (32, 3, 5, 6), np.uint8)
    normal = nbcnn.Normalisation.of(x)
    model = nbcnn.Model([nbcnn.Conv2d(3, 1)], loss="mse", mode="cpu", normalisation=normal)
    model.fit(x, epochs=2, batch_size=8, verbose=0)
    assert model.evaluate(x)["loss"] == pytest.approx(float(((model.predict(x) - normal.done(x)) ** 2).mean()), rel=1e-5)
    again = nbcnn.load(model.save(tmp_path / "net"), mode="cpu")
    assert again.normalisation == normal
    np.testing.assert_array_equal(again.predict(x), model.predict(x))
    np.testing.assert_array_equal(again.features(x, at="conv1"), model.predict(x))


def test_fit_keeps_the_class_names_of_a_data_set_and_takes_one_for_validation():
    data = nbcnn.datasets.load("digits", limit=64)
    with nbcnn.Model([Flatten(), Linear(10)], "cross_entropy", mode="cpu") as model:
        history = model.fit(data.train_images, data.train_labels, validation_data=data, verbose=0)
        assert model.classes is None
        assert history.rows[-1]["val_accuracy"] == model.evaluate(data)["accuracy"]
        model.fit(data, verbose=0)
        assert model.classes == data.classes
    with nbcnn.Model([Flatten(), Linear(10)], "cross_entropy", mode="cpu", classes=list("abcdefghij")) as model:
        model.fit(data, verbose=0)
        assert model.classes == tuple("abcdefghij"), "names that were given stay"
    with nbcnn.Model([Flatten(), Linear(12)], "cross_entropy", mode="cpu") as model:
        model.fit(data, verbose=0)
        assert model.classes is None, "ten names do not fit twelve outputs"


def test_a_data_set_is_a_line_and_the_package_has_its_parts():
    assert repr(nbcnn.datasets.load("digits")) == "<Dataset digits: 1,437 training and 360 test images of 3×32×32, uint8, 10 classes>"
    shapes = nbcnn.datasets.load("shapes", limit=5)
    assert repr(shapes) == "<Dataset shapes: 5 training and 5 test images of 3×32×32, uint8, 10 classes, masks of 11 classes>"
    assert repr(shapes.masks) == "<Masks of 11 classes: 5×32×32 and 5×32×32>"
    energy = repr(nbcnn.datasets.load_series("energy", limit=7))
    assert energy.startswith("<SeriesDataset energy")
    assert "\n" not in energy
    code = "import nbcnn; nbcnn.datasets.load; nbcnn.sklearn.ConvClassifier; assert {'datasets', 'onnx', 'sklearn', 'torch'} <= set(dir(nbcnn))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, cwd=ROOT)


def test_fit_says_the_range_of_the_numbers_and_other_ranges_are_warned_of(capsys):
    random = np.random.default_rng(0)
    data = random.integers(0, 256, (32, 3, 6, 6), dtype=np.uint8)
    y = np.arange(32) % 2

    def trained(x):
        model = nbcnn.Model([Flatten(), Linear(2)], "cross_entropy", mode="cpu")
        model.fit(x, y)
        return model, capsys.readouterr().err.splitlines()[0]

    standardised = (data.astype(np.float32) - 127.5) / 74
    low, high = standardised.min(), standardised.max()
    floats, said = trained(standardised)
    assert said == f"trained on floats from {low:.4g} to {high:.4g}, as they are"
    assert said.removeprefix("trained on ") in floats.summary()
    for call in (floats.predict, lambda x: floats.evaluate(x, y), lambda x: floats.features(x, at="flatten1")):
        with pytest.warns(UserWarning, match=r"examples lie from 0 to 255, and the network was trained on floats from -1\.7"):
            call(data)
    of_bytes, said = trained(data)
    assert said == "trained on bytes, of which 255 is 1"
    with pytest.warns(UserWarning, match="floats from 0 to 255 and are taken as they are.*divide images by 255 or give them as uint8"):
        raw, said = trained(data.astype(np.float32))
    assert said == "trained on floats from 0 to 255, as they are"
    np.testing.assert_array_equal(raw.predict(data), raw.predict(data.astype(np.float32)))  # a byte is the number that it was trained on
    wide, said = trained(data.astype(np.int64) * 100)
    assert said == "trained on numbers from 0 to 2.55e+04, which become 0 to 1"
    np.testing.assert_array_equal(wide.predict(data.astype(np.int64) * 100), wide.predict(data.astype(np.float64) * 100))
    for wrong in (data.astype(np.float32), standardised):
        with pytest.warns(UserWarning, match="and the network was trained on bytes, of which 255 is 1"):
            of_bytes.predict(wrong)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        floats.predict(standardised * 1.5)
        of_bytes.predict(data.astype(np.float32) / 255)
        of_bytes.predict(data.astype(np.int64))
        of_bytes.predict(data.astype(bool))


def test_weights_in_float64_are_taken(tmp_path):
    """Another program's file; a number that is no float32 is refused."""
    from nbcnn.train.checkpoint import CheckpointError, save

    model = nbcnn.Model([nbcnn.Linear(2)], mode="cpu").build((3,))
    wide = {"linear1.weight": np.arange(6.0).reshape(2, 3) / 3, "linear1.bias": np.array([0.5, -1.5])}
    save(tmp_path / "wide.safetensors", wide, {})
    assert not model.load_weights(tmp_path / "wide.safetensors").other_shape
    for name, value in wide.items():
        np.testing.assert_array_equal(model.weights()[name], value.astype(np.float32))
    save(tmp_path / "large.safetensors", wide | {"linear1.bias": np.array([1e300, 0])}, {})
    with pytest.raises(CheckpointError):
        model.load_weights(tmp_path / "large.safetensors")
    np.testing.assert_array_equal(model.weights()["linear1.bias"], [0.5, -1.5])
