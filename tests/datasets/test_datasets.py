"""Tests of the front door of the data sets, MNIST's files good and bad, and the embedded sets. No test touches the network."""

import gzip
import hashlib
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from nbcnn import PackageMissing, datasets
from nbcnn.datasets import DataCorrupt, DataMissing, Dataset, UnknownDataset, bundled, mnist, photos, shapes
from nbcnn.files import extras

DATA = Path(__file__).parents[2] / "data"


# MNIST


def idx(array):
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


def write_mnist(folder, compress=False):
    folder.mkdir(parents=True, exist_ok=True)
    contents = {}
    for images, labels, count in ((mnist.FILES[0], mnist.FILES[1], 5), (mnist.FILES[2], mnist.FILES[3], 2)):
        contents[images] = idx(np.arange(count * 28 * 28).reshape(count, 28, 28) % 256)
        contents[labels] = idx(np.arange(count) % 10)
    for name, content in contents.items():
        (folder / (name + ".gz" * compress)).write_bytes(gzip.compress(content) if compress else content)
    return folder


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("below", ["", "mnist", "MNIST/raw"])
def test_mnist_in_every_place_and_form(tmp_path, below, compress):
    write_mnist(tmp_path / below, compress)
    data = datasets.load("mnist", data_dir=tmp_path)
    assert data.train_images.shape == (5, 1, 28, 28)
    assert data.test_images.shape == (2, 1, 28, 28)
    assert data.train_labels.tolist() == [0, 1, 2, 3, 4]
    assert data.train_images[1, 0, 2, 3] == (28 * 28 + 2 * 28 + 3) % 256


def test_mnist_missing_names_the_files_and_places(tmp_path):
    write_mnist(tmp_path / "mnist")
    (tmp_path / "mnist" / mnist.FILES[3]).unlink()
    with pytest.raises(DataMissing) as caught:
        datasets.load("mnist", data_dir=tmp_path)
    for part in (*mnist.FILES, str(tmp_path / "mnist"), "Only train-images-idx3-ubyte"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("change", "offset"),
    [
        (lambda content: b"\0\0\x0d" + content[3:], 0),  # float32 instead of uint8
        (lambda content: content[:3] + b"\x01" + content[4:], 0),  # one dimension instead of three
        (lambda content: content[:9], 9),
        (lambda content: b"", 0),
        (lambda content: content[:-1], 16 + 5 * 784 - 1),
        (lambda content: content + b"\0", 16 + 5 * 784),
        (lambda content: content[:4] + b"\xff" * 12 + content[16:], 4),
        (lambda content: content[:4] + b"\0" * 12 + content[16:], 4),
    ],
    ids=["type", "dimensions", "header cut", "empty", "one byte short", "one byte long", "huge", "zero"],
)
@pytest.mark.parametrize("compress", [False, True])
def test_mnist_bad_images(tmp_path, change, offset, compress):
    path = write_mnist(tmp_path) / mnist.FILES[0]
    content = change(path.read_bytes())
    if compress:
        path.unlink()
        path = path.with_name(path.name + ".gz")
        content = gzip.compress(content)
    path.write_bytes(content)
    with pytest.raises(DataCorrupt) as caught:
        datasets.load("mnist", data_dir=tmp_path)
    assert (caught.value.path, caught.value.offset) == (path, offset)


@pytest.mark.parametrize("compress", [False, True])
def test_a_header_that_announces_a_gigabyte_takes_no_memory(tmp_path, compress):
    path = write_mnist(tmp_path) / mnist.FILES[0]
    content = idx(np.zeros((1, 2, 2)))
    content = content[:4] + (1 << 30).to_bytes(4, "big") + (1).to_bytes(4, "big") * 2 + content[16:]
    if compress:
        path.unlink()
    path.with_name(path.name + ".gz" * compress).write_bytes(gzip.compress(content) if compress else content)
    tracemalloc.start()
    try:
        with pytest.raises(DataCorrupt, match="4 bytes instead of the 1,073,741,824"):
            datasets.load("mnist", data_dir=tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_mnist_label_10_and_wrong_count(tmp_path):
    path = write_mnist(tmp_path) / mnist.FILES[1]
    path.write_bytes(idx(np.array([0, 1, 10, 3, 4])))
    with pytest.raises(DataCorrupt, match="label 10") as caught:
        datasets.load("mnist", data_dir=tmp_path)
    assert caught.value.offset == 8 + 2
    path.write_bytes(idx(np.arange(4)))
    with pytest.raises(DataCorrupt, match="4 labels for the 5 images"):
        datasets.load("mnist", data_dir=tmp_path)


def test_mnist_test_images_of_another_size(tmp_path):
    path = write_mnist(tmp_path) / mnist.FILES[2]
    path.write_bytes(idx(np.zeros((2, 27, 28))))
    with pytest.raises(DataCorrupt, match=r"test images are \(27, 28\)"):
        datasets.load("mnist", data_dir=tmp_path)


@pytest.mark.parametrize(
    "damage", [lambda c: c[: len(c) // 2], lambda c: c[:-8] + b"\0" * 8, lambda c: b"PK" + c[2:]], ids=["cut", "checksum", "magic"]
)
def test_mnist_damaged_gzip(tmp_path, damage):
    path = write_mnist(tmp_path, compress=True) / f"{mnist.FILES[0]}.gz"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataCorrupt, match="damaged") as caught:
        datasets.load("mnist", data_dir=tmp_path)
    assert caught.value.path == path


def test_real_mnist():
    try:
        data = datasets.load("mnist", data_dir=DATA)
    except DataMissing:
        pytest.skip(f"no MNIST files in {DATA}")
    assert data.train_images.shape == (60_000, 1, 28, 28)
    assert data.test_images.shape == (10_000, 1, 28, 28)
    assert data.train_labels[:5].tolist() == [5, 0, 4, 1, 9]


# Embedded sets


def fingerprint(data):
    arrays = (data.train_images, data.train_labels, data.test_images, data.test_labels)
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays if array is not None)).hexdigest()


@pytest.mark.parametrize("name", ["photos", "digits", "shapes"])
def test_embedded_sets_repeat_and_need_no_files(name):
    first, second = (datasets.load(name, data_dir="/nowhere") for _ in range(2))
    assert fingerprint(first) == fingerprint(second)
    assert first.name == name
    assert first.train_images.shape[1:] == (3, 32, 32)
    assert first.train_images.std() > 20


def test_shapes_are_the_same_bytes_everywhere():
    # The raw Philox stream and integer arithmetic promise this; a change here changes what earlier runs were trained on.
    assert fingerprint(datasets.load("shapes")) == "93458edd2a29ee9affdafed695af51ed87939b327d4703854328b15e6323c061"


def test_photos_train_and_test_share_no_pixel(monkeypatch):
    # Photographs in which every pixel knows its column.
    column = np.broadcast_to(np.arange(200, dtype=np.uint8), (3, 100, 200))
    monkeypatch.setattr(photos, "photographs", lambda: [column, column])
    data = photos.load()
    assert (len(data.train_images), len(data.test_images)) == (photos.TRAIN_COUNT, photos.TEST_COUNT)
    assert data.train_images.max() < 160 <= data.test_images.min()
    assert data.test_images.max() == 199


def test_photos_have_no_labels_and_name_the_photographers():
    data = datasets.load("photos")
    assert data.train_labels is None
    assert data.test_labels is None
    assert data.classes is None
    assert "danielbuechele" in data.source
    assert "CC BY" in data.source


def test_photos_are_scikit_learns_photographs():
    from sklearn.datasets import load_sample_images

    for ours, theirs in zip(photos.photographs(), load_sample_images().images, strict=True):
        np.testing.assert_array_equal(ours, theirs.transpose(2, 0, 1))


def test_bundled_files_that_are_not_there_are_named(monkeypatch):
    with pytest.raises(DataMissing, match=r"other\.csv is missing"):
        bundled.path("data/other.csv")
    monkeypatch.setattr(bundled.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PackageMissing, match=r'pip install "nbcnn\[svm\]"'):
        datasets.load("digits")


def test_auto_without_scikit_learn_is_shapes_and_says_how_to_have_digits(monkeypatch, tmp_path):
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    said = []
    found = datasets.load("auto", download=False, log=said.append)
    assert found.name == "shapes"
    assert found.source.endswith("used because CIFAR-10 was not available")
    assert "this run uses 'shapes'" in said[0]
    assert 'For handwritten digits: scikit-learn is not installed: pip install "nbcnn[svm]"' in said[0]


def test_digits_are_scikit_learns_digits():
    from sklearn.datasets import load_digits

    data = datasets.load("digits")
    assert (len(data.train_images), len(data.test_images)) == (1437, 360)
    assert np.all(np.bincount(data.test_labels, minlength=10) > 20)
    small = np.concatenate([data.train_images, data.test_images])[:, 1, ::4, ::4]
    labels = np.concatenate([data.train_labels, data.test_labels])
    original = load_digits()
    ours = sorted(zip(labels.tolist(), (image.tobytes() for image in small)))
    theirs = sorted(zip(original.target.tolist(), ((image.astype(int) * 255 // 16).astype(np.uint8).tobytes() for image in original.images)))
    assert ours == theirs
    np.testing.assert_array_equal(data.train_images[:, 0, 3::4, 2::4], data.train_images[:, 2, ::4, ::4])


@pytest.mark.parametrize(("count", "size", "channels"), [(1, 8, 1), (40, 28, 1), (700, 33, 3), (5, 64, 4)])
def test_shapes_of_any_size(count, size, channels):
    images, labels = shapes.generate(count, 7, size, channels)
    assert images.shape == (count, channels, size, size)
    assert images.dtype == np.uint8
    assert labels.dtype == np.int32
    assert labels.min() >= 0
    assert labels.max() < len(shapes.CLASSES)
    # A figure and a background in every channel: their colours are at least 33 apart, noise is 32 wide.
    assert np.all(np.ptp(images.reshape(count, channels, -1).astype(int), axis=2) >= 33)


def test_shapes_prefix_does_not_depend_on_the_count():
    short, long = shapes.generate(513, 3, 16), shapes.generate(1100, 3, 16)
    np.testing.assert_array_equal(short[0], long[0][:513])
    np.testing.assert_array_equal(short[1], long[1][:513])
    assert not np.array_equal(short[0], shapes.generate(513, 4, 16)[0])


def test_shapes_of_one_label_differ_from_the_others():
    labels = np.arange(10)
    row = np.zeros((10, 4), np.uint64)
    figures = shapes._figure(row, labels, 32).reshape(10, -1)
    assert len({figure.tobytes() for figure in figures}) == 10
    assert np.all(figures.mean(axis=1) > 0.05)


@pytest.mark.parametrize("bad", [{"count": 0}, {"channels": 0}, {"size": 7}, {"seed": -1}])
def test_shapes_refuse_what_cannot_be_drawn(bad):
    with pytest.raises(ValueError, match="shapes need"):
        shapes.generate(**({"count": 1, "seed": 0} | bad))


# The front door


@pytest.mark.parametrize("name", ["photos", "digits"])
def test_limit_cuts_both_splits(name):
    data, whole = datasets.load(name, limit=7), datasets.load(name)
    assert (len(data.train_images), len(data.test_images)) == (7, 7)
    np.testing.assert_array_equal(data.train_images, whole.train_images[:7])
    assert data.train_images.base is None
    if name == "digits":
        np.testing.assert_array_equal(data.test_labels, whole.test_labels[:7])


def test_limit_beyond_the_set_and_below_one():
    data = datasets.load("digits", limit=1000)
    assert (len(data.train_images), len(data.test_images)) == (1000, 360)
    with pytest.raises(ValueError, match="at least 1"):
        datasets.load("digits", limit=0)


@pytest.mark.parametrize(("wrong", "near"), [("cifra10", "cifar10"), ("MNIST", "mnist"), ("digit", "digits"), ("photo", "photos")])
def test_a_wrong_name_gets_the_nearest_right_one(wrong, near):
    with pytest.raises(UnknownDataset, match=rf"did you mean {near}\?") as caught:
        datasets.load(wrong)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    "change",
    [
        {"train_images": np.zeros((2, 3, 4, 4), np.float32)},
        {"train_images": np.zeros((2, 3, 4, 4)), "test_images": np.zeros((2, 3, 4, 4))},
        {"train_images": np.zeros((2, 4, 4, 3), np.uint8).transpose(0, 3, 1, 2)},
        {"test_images": np.zeros((2, 1, 4, 4), np.uint8)},
        {"train_labels": np.zeros(2, np.int64)},
        {"train_labels": np.zeros(3, np.int32)},
        {"test_labels": None},
        {"classes": None},
    ],
)
def test_a_dataset_whose_arrays_do_not_fit_is_refused(change):
    images, labels = np.zeros((2, 3, 4, 4), np.uint8), np.zeros(2, np.int32)
    right = {"train_images": images, "train_labels": labels, "test_images": images, "test_labels": labels, "classes": ("a",)}
    Dataset(name="x", source="here", **right)
    with pytest.raises(ValueError, match="x: "):
        Dataset(name="x", source="here", **(right | change))


def test_importing_the_package_is_light():
    heavy = ("sklearn", "matplotlib", "PIL", "numba", "urllib.request", "tqdm")
    code = f"import sys, nbcnn.datasets; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
