"""The mirrored kernel: its definition, both machines beside scikit-learn's with a kernel that is given, the file, the command, new images."""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image
from scripts import exits, extract, message
from sklearn.svm import SVC

from nbcnn import datasets
from nbcnn.classify import classifier, gpu_samples, kernel, pipeline, ridge
from nbcnn.classify import gpu as device_svm
from nbcnn.classify.classifier import ClassifierError
from nbcnn.classify.features import read_features
from nbcnn.classify.kernel import Samples
from nbcnn.classify.pipeline import Settings
from nbcnn.cli import classify as command
from nbcnn.cli import predict
from nbcnn.gpu import device as gpu_device

EPS = float(np.finfo(np.float32).eps)
once = pytest.mark.skipif(gpu_device.SIMULATOR, reason="runs no kernel: once is enough")


def by_definition(x, xm, y, ym, gamma):
    """The mirrored kernel in float64, from the four terms and the value that an image has with itself."""
    x, xm, y, ym = (np.asarray(each, np.float64) for each in (x, xm, y, ym))

    def k(a, b):
        return np.exp(-gamma * ((a[:, None] - b) ** 2).sum(-1))

    def own(a, b):
        return (1 + np.exp(-gamma * ((a - b) ** 2).sum(-1))) / 2

    return (k(x, y) + k(x, ym) + k(xm, y) + k(xm, ym)) / 4 / np.sqrt(own(x, xm)[:, None] * own(y, ym))


def overlapping(count, width=20, classes=3, seed=2):
    """Samples of overlapping classes and their mirrored ones: other values of the same latent numbers."""
    rng = np.random.default_rng(seed)
    labels = np.arange(count) % classes
    latent = rng.standard_normal((classes, 8))[labels] + rng.standard_normal((count, 8))
    turned = np.random.default_rng(9).standard_normal((2, 8, width))
    rows, mirrored = (np.maximum(latent @ each + 0.1 * rng.standard_normal((count, width)), 0).astype(np.float32) for each in turned)
    return rows, mirrored, labels.astype(np.int32)


@pytest.fixture(scope="module")
def sets():
    rows, mirrored, labels = overlapping(150)
    return (rows[:110], rows[110:], mirrored[:110], mirrored[110:]), labels[:110], labels[110:]


@once
@pytest.mark.parametrize("panel", [1, 1 << 25])
def test_the_kernel_follows_its_definition(sets, monkeypatch, panel):
    monkeypatch.setattr(kernel, "PANEL_VALUES", panel)
    (x, y, xm, ym), *_ = sets
    a, b = Samples.of(x, xm), Samples.of(y, ym)
    # Four terms of a mean, each right to ε·(2 + 4γ|x|²); and the factors.
    bound = EPS * (8 + 4 * 0.01 * max(a.largest, b.largest))
    assert np.abs(kernel.kernel(a, b, 0.01) - by_definition(x, xm, y, ym, 0.01)).max() <= bound
    k = kernel.kernel(a, a, 0.01)
    assert np.abs(k - by_definition(x, xm, x, xm, 0.01)).max() <= bound
    assert np.abs(k.diagonal() - 1).max() <= bound
    # An image and its mirrored one are the same to it.
    np.testing.assert_allclose(kernel.kernel(Samples.of(xm, x), b, 0.01), kernel.kernel(a, b, 0.01), atol=2 * bound)


@once
def test_c_svc_is_that_of_scikit_learn_on_this_kernel(sets, tmp_path):
    features, labels, _ = sets
    found = pipeline.classify(lambda: features, labels, settings=Settings(), scratch=tmp_path, jobs=1)
    scaled = [found.scaler.applied(each) for each in features]
    # Scaling and gamma are those of the images alone.
    assert found.gamma == pytest.approx(1 / (20 * scaled[0].var()), rel=1e-5)
    k, kt = (by_definition(each, mirrored, scaled[0], scaled[2], found.gamma) for each, mirrored in ((scaled[0], scaled[2]), (scaled[1], scaled[3])))
    direct = SVC(kernel="precomputed", C=10).fit(k, labels)
    assert found.mirrored
    np.testing.assert_array_equal(found.train_predicted, direct.predict(k))
    np.testing.assert_array_equal(found.test_predicted, direct.predict(kt))
    plain = pipeline.classify(lambda: features[:2], labels, settings=Settings(), scratch=tmp_path, jobs=1)
    assert not plain.mirrored
    assert np.abs(plain.test_decisions - found.test_decisions).max() > 0.01


@once
@pytest.mark.parametrize("portable", [True, False])
def test_kernel_ridge_is_its_definition_and_its_file_decides_alike(sets, tmp_path, portable):
    features, labels, _ = sets
    found = ridge.classify(lambda: features, labels, settings=Settings())
    scaled = [found.scaler.applied(each) for each in features]
    k, kt = (by_definition(each, mirrored, scaled[0], scaled[2], found.gamma) for each, mirrored in ((scaled[0], scaled[2]), (scaled[1], scaled[3])))
    beta = np.linalg.solve(k + 0.1 * np.eye(110), ridge.targets(labels, np.arange(3)))
    # β is right to ε times the condition number, at most (n + λ)/λ.
    np.testing.assert_allclose(found.test_decisions, kt @ beta, atol=110 / 0.1 * 8 * EPS)
    from test_classifier_file import ORIGIN

    if portable:
        classifier.save(tmp_path / "c", found, ORIGIN, tmp_path, "ab" * 32, features[0], features[2])
    else:
        sha = write(tmp_path, features, labels, sets[2], ORIGIN)
        classifier.save(tmp_path / "c", found, ORIGIN, tmp_path, sha)
    loaded = classifier.load(tmp_path / "c")
    assert loaded.mirrored
    got = loaded.decisions(features[1], features[3])
    np.testing.assert_allclose(got, found.test_decisions, atol=110 * 16 * EPS * np.abs(found.machine.beta).max())
    np.testing.assert_array_equal(loaded.predict(features[1], features[3]), found.test_predicted)
    margins = loaded.margins(got)
    assert ((margins > 0).sum(1) <= 1).all()
    np.testing.assert_array_equal(margins.argmax(1), found.test_predicted)
    with pytest.raises(ValueError, match="mean over mirrored images"):
        loaded.predict(features[1])
    with pytest.raises(ValueError, match="vectors and mirrored vectors go together"):
        classifier.save(tmp_path / "d", found, ORIGIN, tmp_path, "ab" * 32, features[0])


def write(folder, features, labels, test_labels, origin):
    """Store the four sets; returns their hash."""
    from nbcnn.classify.feature_writer import FeatureWriter, publish

    kinds = [("train", labels, False), ("test", test_labels, False), ("train", None, True), ("test", None, True)]
    made = []
    for rows, (split, own, mirrored) in zip(features, kinds, strict=True):
        made.append(FeatureWriter(folder, split, len(rows), rows.shape[1], labels=own, mirrored=mirrored))
        made[-1].write(0, rows)
    return publish(folder, origin, made[0], made[1], (made[2], made[3]))


@once
def test_features_mirrored_and_not_have_other_hashes_and_a_flipped_bit_is_found(sets, tmp_path):
    from test_classifier_file import ORIGIN

    features, labels, test_labels = sets
    first = write(tmp_path, features, labels, test_labels, ORIGIN)
    other = write(tmp_path / "other", (*features[:3], features[3] + 1), labels, test_labels, ORIGIN)
    assert first != other
    found = read_features(tmp_path)
    np.testing.assert_array_equal(found.train_mirrored, features[2])
    np.testing.assert_array_equal(found.test_mirrored, features[3])
    index = json.loads((tmp_path / "features.json").read_text())
    assert index["version"] == 2
    (tmp_path / "features.json").write_text(json.dumps(index | {"version": 1}))
    with pytest.raises(datasets.DataCorrupt, match="do not go together"):
        read_features(tmp_path)


@once
def test_a_run_is_extracted_mirrored_classified_and_asked_about_files(copied, tmp_path, capsys):
    """The whole way by commands: features of both, the kernel of both, a file of it, classes and margins of image files."""
    out = tmp_path / "features"
    assert exits(extract, [copied, "--mode", "cpu", "--out", out, "--limit", "6", "--quiet", "--mirror"]) == 0
    capsys.readouterr()
    assert exits(command.main, [out, "--device", "cpu", "--jobs", "1", "--json"]) == 0
    printed = capsys.readouterr()
    assert "kernel: mean over mirrored images" in printed.err
    assert json.loads(printed.out)["kernel"] == "mirrored"
    file, data = out / "classify" / classifier.NAME, datasets.load("shapes", limit=6)
    loaded, features = classifier.load(file), read_features(out)
    images = data.test_images[:2]
    expected = loaded.predict(features.test, features.test_mirrored)[:2]
    np.testing.assert_array_equal(loaded.predict_images(images, mode="cpu"), expected)

    for at, image in enumerate(images):
        Image.fromarray(image.transpose(1, 2, 0)).save(tmp_path / f"{at}.png")
    files = [tmp_path / f"{at}.png" for at in range(2)]
    words = [copied, *files, "--classifier", file, "--mode", "cpu", "--quiet"]
    assert exits(predict.main, [*words, "--json", "--top", "2", "--csv", tmp_path / "f.csv", "--picture", tmp_path / "f.png"]) == 0
    rows = json.loads(capsys.readouterr().out)["images"]
    assert [row["classes"][0]["class"] for row in rows] == [data.classes[c] for c in expected]
    margins = loaded.margins(loaded.decisions(features.test[:2], features.test_mirrored[:2]))
    best = [np.flatnonzero(loaded.classes == c)[0] for c in expected]
    np.testing.assert_allclose([row["classes"][0]["margin"] for row in rows], margins[range(2), best], atol=2e-5)
    assert (tmp_path / "f.csv").read_text().splitlines()[0] == "image,class_1,margin_1,class_2,margin_2"
    assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG")
    assert exits(predict.main, words) == 0
    assert f"{files[0]}  {data.classes[expected[0]]} margin " in capsys.readouterr().out

    # Another checkpoint than the one that made the features.
    (copied / "checkpoint-last.safetensors").write_bytes((copied / "checkpoint-last.safetensors").read_bytes())
    from nbcnn.train import checkpoint

    tensors, notes = checkpoint.load(copied / checkpoint.LAST)
    checkpoint.save(copied / checkpoint.LAST, {name: tensor * np.asarray(2, tensor.dtype) for name, tensor in tensors.items()}, notes)
    assert "is not the checkpoint that made the classifier's features" in message(capsys, 3, exits(predict.main, words))
    with pytest.raises(ClassifierError, match="SHA-256"):
        loaded.predict_images(images, mode="cpu")


@once
def test_a_folder_without_mirrored_images_says_how_to_get_them(tmp_path, capsys):
    from test_classify import ORIGIN
    from test_classify import write as write_plain

    rows, labels = np.random.default_rng(0).random((12, 3), np.float32), np.arange(12, dtype=np.int32) % 3
    write_plain(tmp_path, rows, rows, labels, labels, ORIGIN)
    assert "extract RUN --mirror" in message(capsys, 3, exits(command.main, [tmp_path, "--kernel", "mirrored", "--device", "cpu"]))


def close(host, found, atol):
    np.testing.assert_allclose(found.test_decisions, host.test_decisions, atol=atol)
    assert (found.test_predicted == host.test_predicted).mean() >= 0.998
    assert found.mirrored


@pytest.mark.parametrize("fits", [True, False])
def test_a_gpu_trains_the_same_c_svc(gpu, tmp_path, monkeypatch, fits):
    rows, mirrored, labels = overlapping(2400, 300, 5)
    features = (rows[:2000], rows[2000:], mirrored[:2000], mirrored[2000:])
    host = pipeline.classify(lambda: features, labels[:2000], settings=Settings(), scratch=tmp_path, jobs=1)
    if not fits:
        monkeypatch.setattr(device_svm.Machine, "_free", lambda self: 4 * 1500**2)
    found = device_svm.classify(lambda: features, labels[:2000], settings=Settings(), device=gpu)
    assert all(pair.gap < 1e-3 for pair in found.machine.machines)
    close(host, found, 3e-3)


@pytest.mark.parametrize("count", [1000, 3001])
def test_a_gpu_solves_the_same_ridge(gpu, count):
    rows, mirrored, labels = overlapping(count + 500, 200, 10)
    features = (rows[:count], rows[count:], mirrored[:count], mirrored[count:])
    host, found = (ridge.classify(lambda: features, labels[:count], settings=Settings(), device=device) for device in (None, gpu))
    close(host, found, count / 0.1 * 8 * EPS)


@pytest.mark.parametrize("wgmma", [True, False])
def test_kernel_values_of_a_gpu_are_those_of_the_cpu(device, wgmma):
    """All of a symmetric matrix and of another one: small in the simulator, which has no wgmma, larger on a GPU."""
    kernels = gpu_samples.Kernel(device)
    if wgmma and not kernels.wgmma:
        pytest.skip("needs wgmma")
    kernels.wgmma = wgmma
    few, many, width = (6, 9, 8) if gpu_device.SIMULATOR else (200, 330, 192)
    rows, mirrored, _ = overlapping(many, width)
    a, b = Samples.of(rows[:few], mirrored[:few]), Samples.of(rows[few:], mirrored[few:])
    made = []
    for each in (a, b):
        given = [each.rows, each.mirror.rows]
        made.append(kernels.operand([kernels.uploaded(part.reshape(-1)) for part in given], given, len(each), width))
        kernels.weigh(made[-1], 0.004)
    # A mean of four is as wrong as one: on the GPU as in test_rows.py (|x|² + |y|² is at most twice the largest), on the CPU
    # ε·(2 + 4γ·(|x|² + |y|²)); the factors and sums of both round a few times more.
    steps = 6 + 2 * 12 * 64 / max(width, 64) + np.sqrt(max(width, 64) / 64)
    bound = EPS * (14 + 0.004 * max(a.largest, b.largest) * (8 + 2 * steps))
    for (x, left), (y, right) in (((a, made[0]), (a, made[0])), ((b, made[1]), (a, made[0]))):
        k = device.empty(len(x) * len(y), "float32")
        kernels.block(left, right, k, (0, 0), (len(x), len(y)), len(y), 0.004)
        got = device.download(k).reshape(len(x), len(y))
        assert np.abs(got - kernel.kernel(x, y, 0.004)).max() <= bound
        if x is y:
            assert not wgmma or (got == got.T).all()
            assert (got.diagonal() == 1).all()
