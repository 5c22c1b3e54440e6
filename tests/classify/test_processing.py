"""Tests of feature processing: each step by its definition, fitting on training features alone, both machines, the file, the commands."""

from __future__ import annotations

import json

import numpy as np
import pytest
from scripts import exits, extract, message
from test_mirrored import overlapping

from nbcnn.classify import classifier, gpu_processing, pipeline, processing, ridge
from nbcnn.classify import gpu as device_svm
from nbcnn.classify.classifier import ClassifierError
from nbcnn.classify.features import Origin, read_features
from nbcnn.classify.pipeline import Settings
from nbcnn.classify.processing import parse
from nbcnn.cli import baselines, predict
from nbcnn.cli import classify as command
from nbcnn.files.errors import UsageError
from nbcnn.gpu import device as gpu_device
from nbcnn.nn.layers import Conv2d
from nbcnn.ops.svm import process
from nbcnn.train import checkpoint

EPS = float(np.finfo(np.float32).eps)
SHAPE, TEXT = (5, 2, 2), "blur+sqrt+cw1+std+l2"
once = pytest.mark.skipif(gpu_device.SIMULATOR, reason="runs no kernel: once is enough")


@pytest.fixture(scope="module")
def sets():
    rows, mirrored, labels = overlapping(90)
    return (rows[:60], rows[60:], mirrored[:60], mirrored[60:]), labels[:60], labels[60:]


def by_definition(text, shape, train, rows):
    """The steps on `rows` in float64, statistics of `train`."""
    x, t = (np.asarray(each, np.float64).reshape(-1, *shape) for each in (rows, train))
    for step in text.split("+"):
        if step == "blur":
            w = np.outer([1, 2, 1], [1, 2, 1]) / 16

            def blurred(maps, w=w):
                wide = np.pad(maps, ((0, 0), (0, 0), (1, 1), (1, 1)), mode="edge")
                return sum(w[i, j] * wide[:, :, i : i + maps.shape[2], j : j + maps.shape[3]] for i in range(3) for j in range(3))

            x, t = blurred(x), blurred(t)
        elif step == "sqrt":
            x, t = (np.sign(each) * np.sqrt(np.abs(each)) for each in (x, t))
        elif step == "std":
            mean, deviation = t.mean(0), t.std(0)
            x, t = (x - mean) / deviation, (t - mean) / deviation
        elif step == "l2":
            x, t = (each / np.sqrt((each**2).sum((1, 2, 3), keepdims=True)) for each in (x - t.mean(0), t - t.mean(0)))
        else:
            mean = t.mean(0)
            positions = (t - mean).transpose(1, 0, 2, 3).reshape(shape[0], -1)
            values, vectors = np.linalg.eigh(positions @ positions.T / positions.shape[1])
            Z = (vectors / np.sqrt(values + float(step[2:]) * values.mean())) @ vectors.T
            x, t = (np.einsum("dc,nchw->ndhw", Z, each - mean) for each in (x, t))
    return x.reshape(len(x), -1)


@once
@pytest.mark.parametrize("text", [*processing.STEPS, TEXT, "blur+blur+sqrt+cw0.1+l2"])
def test_steps_follow_their_definition(sets, text, monkeypatch):
    monkeypatch.setattr(processing, "_CHUNK_VALUES", 7 * 20)
    (train, test, *_), *_ = sets
    fitted, (made, other) = processing.prepared(parse(text, SHAPE), [train, test])
    # Every step rounds a few times; whitening divides by at least √(E·mean λ), E = 0.1, so errors grow by 1/√0.1 against the values' scale.
    for got, rows in ((made, train), (other, test)):
        expected = by_definition(text, SHAPE, train, rows)
        np.testing.assert_allclose(got, expected, rtol=0, atol=64 * EPS * max(1, np.abs(expected).max()) * 4)
        np.testing.assert_array_equal(fitted.applied(rows), got)
    assert fitted.fitted
    assert made.dtype == np.float32


@once
def test_what_steps_are_for():
    rng = np.random.default_rng(0)
    mixed = np.einsum("dc,ncp->ndp", rng.standard_normal((4, 4)), rng.standard_normal((500, 4, 9))).reshape(500, 36).astype(np.float32) + 3
    fitted, (white,) = processing.prepared(parse("cw0.000001", (4, 3, 3)), [mixed])
    positions = white.reshape(500, 4, 9).transpose(1, 0, 2).reshape(4, -1)
    # The share adds a millionth of the mean variance to each; a condition of less than a thousand makes that 1e-3.
    np.testing.assert_allclose(positions @ positions.T / positions.shape[1], np.eye(4), atol=2e-3)
    np.testing.assert_allclose(fitted.arrays["0.whitener"], fitted.arrays["0.whitener"].T, atol=1e-5)
    _, (unit,) = processing.prepared(parse("l2", (36,)), [mixed])
    np.testing.assert_allclose((unit**2).sum(1), 1, rtol=8 * EPS)
    _, (flat,) = processing.prepared(parse("cw1+l2", (4, 3, 3)), [np.ones_like(mixed)])
    assert not flat.any()


@once
def test_what_is_not_a_step_is_answered():
    with pytest.raises(UsageError, match=r"no processing step 'blurr'.*blur"):
        parse("blurr+l2", SHAPE)
    for text in ("cw0", "cw", "cw-1", ""):
        with pytest.raises(UsageError, match="step"):
            parse(text, SHAPE)
    with pytest.raises(UsageError, match=r"'cw1' takes maps \(C, H, W\), the features are of shape \(20,\)"):
        parse("sqrt+cw1", (20,))
    assert parse("none", SHAPE) is None
    with pytest.raises(ValueError, match="not fitted"):
        parse("l2", SHAPE).applied(np.zeros((1, 20)))
    with pytest.raises(ValueError, match=r"takes \(n, 20\) features"):
        processing.prepared(parse("l2", SHAPE), [np.zeros((2, 21))])
    huge = np.full((4, 20), 1e30, np.float32) * np.arange(4)[:, None].astype(np.float32)
    _, (made,) = processing.prepared(parse("std", SHAPE), [huge])
    assert np.isfinite(made).all()


@once
@pytest.mark.parametrize("machine", ["svm", "ridge"])
def test_a_machine_of_processed_features_and_its_file(sets, tmp_path, machine):
    features, labels, _ = sets
    settings = Settings(scale=False, process=parse(TEXT, SHAPE))
    ready = [by_definition(TEXT, SHAPE, features[0], rows).astype(np.float32) for rows in features]

    def trained(features, settings):
        if machine == "ridge":
            return ridge.classify(lambda: features, labels, settings=settings)
        return pipeline.classify(lambda: features, labels, settings=settings, scratch=tmp_path, jobs=1)

    found, direct = trained(features, settings), trained(ready, Settings(scale=False))
    assert found.mirrored
    assert found.gamma == pytest.approx(direct.gamma, rel=1e-5)
    np.testing.assert_array_equal(found.test_predicted, direct.test_predicted)
    # The statistics are those of the training images alone.
    alone, _ = processing.prepared(settings.process, features[:1])
    for name, array in alone.arrays.items():
        np.testing.assert_array_equal(found.process.arrays[name], array)
    origin = Origin("runs/x", "c", "ab" * 32, "noise", "made", ("a", "b", "c"), (1, 2, 2), SHAPE, "cpu", None)
    classifier.save(tmp_path / "c", found, origin, tmp_path, "ab" * 32, features[0], features[2])
    loaded = classifier.load(tmp_path / "c")
    assert loaded.process.name == TEXT
    got = loaded.decisions(features[1], features[3])
    bound = 1e-4 * max(1, np.abs(found.test_decisions).max())  # sums of 60 kernel values, of which each is right to ε·(2 + 4·γ·|x|²), times at most C
    np.testing.assert_allclose(got, found.test_decisions, atol=bound)
    tensors, notes = checkpoint.load(tmp_path / "c")
    assert notes["version"] == "3"
    for change, words in (({"process": "none"}, "does not go with"), ({"process": "cw1"}, "missing, of another shape"), ({"version": "2"}, None)):
        checkpoint.save(tmp_path / "changed", tensors, notes | change)
        if words:
            with pytest.raises(ClassifierError, match=words):
                classifier.load(tmp_path / "changed")
    checkpoint.save(tmp_path / "less", {name: array for name, array in tensors.items() if name != "process.2.whitener"}, notes)
    with pytest.raises(ClassifierError, match=r"'2\.whitener'"):
        classifier.load(tmp_path / "less")


@once
def test_a_search_fits_steps_on_what_it_trains_on(sets):
    features, labels, _ = sets
    steps, seen = parse("std", SHAPE), []

    def trial(load, labels, settings):
        seen.append(ridge.classify(load, labels, settings=settings))
        return seen[-1]

    settings, tried = pipeline.search(features[::2], labels, Settings(scale=False, process=steps), ("lambda",), trial, "lambda")
    inside, _ = pipeline.split(labels)
    assert settings.process is steps  # what is trained next is fitted on all training images
    assert len(tried) == len(seen) == 4
    for outcome in seen:
        np.testing.assert_allclose(outcome.process.arrays["0.mean"], features[0][inside].mean(0), rtol=0, atol=1e-5)


@once
def test_values_that_are_no_numbers_are_named(sets):
    features, labels, _ = sets
    bad = features[0].copy()
    bad[3, 2] = np.inf
    with pytest.raises(ValueError, match="feature 2 of sample 3 is inf"):
        ridge.classify(lambda: (bad, features[1]), labels, settings=Settings(process=parse("cw1", SHAPE)))


@pytest.mark.full
@once
def test_the_commands_process_and_predict_alike(copied, tmp_path, capsys):
    out = tmp_path / "features"
    assert exits(extract, [copied, "--mode", "cpu", "--out", out, "--limit", "40", "--mirror", "--quiet"]) == 0
    words = [str(out), "--device", "cpu", "--jobs", "1", "--quiet", "--json", "--machine", "ridge", "--process", "blur+sqrt+cw1+l2"]
    capsys.readouterr()
    assert command.main([*words, "--baselines"]) == 0
    result = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert result["process"] == "blur+sqrt+cw1+l2"
    assert result["scale"] == "none"
    assert {row["process"] for row in result["classifiers"].values()} == {"blur+sqrt+cw1+l2"}
    found, features = classifier.load(out / "classify" / classifier.NAME), read_features(out)
    assert found.process.shape == features.origin.code_shape
    hits = found.predict(features.test, features.test_mirrored) == features.test_labels
    assert hits.mean() == pytest.approx(result["classifiers"]["encoder"]["test_accuracy"])
    from PIL import Image

    Image.new("RGB", (16, 16), (200, 30, 30)).save(tmp_path / "red.png")
    capsys.readouterr()
    code = exits(predict.main, [copied, tmp_path / "red.png", "--classifier", out / "classify" / classifier.NAME, "--mode", "cpu", "--json"])
    assert code == 0
    assert len(json.loads(capsys.readouterr().out.strip().splitlines()[-1])["images"]) == 1
    assert "no processing step 'blurr'" in message(capsys, 2, exits(command.main, [out, "--process", "blurr"]))


@once
def test_the_random_encoder_gets_the_images_that_the_trained_one_gets(copied, tmp_path, monkeypatch):
    out = tmp_path / "features"
    assert exits(extract, [copied, "--mode", "cpu", "--out", out, "--limit", "4", "--quiet"]) == 0
    origin = read_features(out).origin
    assert baselines._forgotten(origin, "cpu") is None  # no layer prepares images
    monkeypatch.setattr(Conv2d, "prepares", True, raising=False)
    net = baselines._forgotten(origin, "cpu")
    trained = checkpoint.read(copied / origin.checkpoint).tensors
    np.testing.assert_array_equal(net.params.read("conv1.weight"), trained["param.conv1.weight"])
    (copied / origin.checkpoint).write_bytes(b"gone")
    assert baselines._forgotten(origin, "cpu") is None


@pytest.mark.parametrize("text", ["blur+sqrt+cw1+l2", "sqrt+std+l2"])
def test_the_gpu_processes_as_the_reference(device, sets, text, monkeypatch):
    monkeypatch.setattr(process, "BLOCKS", 2)
    (train, test, *_), *_ = sets
    train, test = train[:9], test[:4]
    kernel = device_svm.Kernel(device)
    places, count, pitch = np.array([1, 4, 2, 8, 5, 6, 11, 9, 10]), 12, 64
    values = kernel.bring(train, places, count, pitch, lambda done: None)
    unfitted = parse(text, SHAPE)
    fitted = processing.run(gpu_processing.OnGpu(kernel, values, places, pitch, unfitted), unfitted)
    reference, (expected, other) = processing.prepared(unfitted, [train, test])
    for name, array in reference.arrays.items():
        # A covariance is right to 33 roundings of a sum's size, and Z = f(covariance) with |f′| ≤ 1 / (2·(E·mean λ)^1.5): both of about 1 here.
        np.testing.assert_allclose(fitted.arrays[name], array, rtol=0, atol=64 * EPS * max(1, np.abs(array).max()))
    got = device.download(values).reshape(count, pitch)
    np.testing.assert_allclose(got[places, :20], expected, rtol=0, atol=128 * EPS * max(1, np.abs(expected).max()))
    room = np.setdiff1d(np.arange(count), places)
    assert not got[room].any()
    assert not got[:, 20:].any()
    # New samples by the statistics that the training samples have.
    more = kernel.bring(test, np.arange(4), 4, pitch, lambda done: None)
    assert processing.run(gpu_processing.OnGpu(kernel, more, np.arange(4), pitch, fitted), fitted) is fitted
    np.testing.assert_allclose(device.download(more).reshape(4, pitch)[:, :20], other, rtol=0, atol=128 * EPS * max(1, np.abs(other).max()))


@pytest.mark.parametrize("machine", ["svm", "ridge"])
def test_machines_of_both_devices_agree(gpu, tmp_path, machine):
    rows, mirrored, labels = overlapping(1500, width=16 * 36, classes=5)
    features, own = (rows[:1200], rows[1200:], mirrored[:1200], mirrored[1200:]), labels[:1200]
    settings = Settings(scale=False, process=parse("blur+sqrt+cw1+l2", (16, 6, 6)))
    if machine == "ridge":
        host, found = (ridge.classify(lambda: features, own, settings=settings, device=each) for each in (None, gpu))
    else:
        host = pipeline.classify(lambda: features, own, settings=settings, scratch=tmp_path, jobs=1)
        found = device_svm.classify(lambda: features, own, settings=settings, device=gpu)
    assert found.gamma == pytest.approx(host.gamma, rel=1e-5)
    assert (found.test_predicted == host.test_predicted).mean() >= 0.99
    # The machines' own bound is three times the solver's tolerance of 1e-3; kernel values of features that agree to 1e-5 add as little.
    assert np.abs(found.test_decisions - host.test_decisions).max() < 5e-3
