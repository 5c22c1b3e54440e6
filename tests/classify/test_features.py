"""Tests of features on disk: what is written is what is read, nothing half-written stays, and damage is named."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from nbcnn.classify.feature_writer import FeatureWriter, publish
from nbcnn.classify.features import Origin, Verification, read_features
from nbcnn.datasets import DataCorrupt, DataMissing
from nbcnn.files.atomic import DiskFull

ORIGIN = Origin(
    run="runs/one",
    checkpoint="runs/one/checkpoint-best.safetensors",
    checkpoint_sha256="ab" * 32,
    dataset="digits",
    source="scikit-learn",
    classes=("zero", "one", "two"),
    image_shape=(1, 8, 8),
    code_shape=(3, 2, 1),
    mode="cpu",
    gpu=None,
)
WIDTH = 6


def write(folder, train, test, labels=True, storage="npy", blocks=4, model=None):
    """Write two splits in `blocks` pieces; labels are 0, 1, 2, 0, …"""
    numbers = [np.arange(len(rows), dtype=np.int32) % 3 if labels else None for rows in (train, test)]
    origin = dataclasses.replace(ORIGIN, model=model, **({} if labels else {"classes": None}))
    with (
        FeatureWriter(folder, "train", len(train), WIDTH, labels=numbers[0], storage=storage) as a,
        FeatureWriter(folder, "test", len(test), WIDTH, labels=numbers[1], storage=storage) as b,
    ):
        for writer, rows in ((a, train), (b, test)):
            offset = 0
            for block in np.array_split(rows, blocks):
                writer.write(offset, block)
                offset += len(block)
        return publish(folder, origin, a, b)


@pytest.fixture
def rows(rng):
    values = rng.standard_normal((33, WIDTH), dtype=np.float32) * np.float32(10) ** rng.integers(-30, 30, (33, WIDTH))
    return values[:23].astype(np.float32), values[23:].astype(np.float32)


def test_features_written_before_they_named_their_model_are_read(tmp_path, rows):
    write(tmp_path, *rows, model="mnist-cnn")
    assert read_features(tmp_path).origin.model == "mnist-cnn"
    index = json.loads((tmp_path / "features.json").read_text())
    del index["origin"]["model"]
    (tmp_path / "features.json").write_text(json.dumps(index))
    assert read_features(tmp_path).origin == ORIGIN


def test_features_written_before_there_were_precisions_are_fp32(tmp_path, rows):
    write(tmp_path, *rows)
    index = json.loads((tmp_path / "features.json").read_text())
    del index["origin"]["precision"]
    (tmp_path / "features.json").write_text(json.dumps(index))
    assert read_features(tmp_path).origin == ORIGIN


@pytest.mark.parametrize("storage", ["npy", "csv"])
@pytest.mark.parametrize("labels", [True, False])
def test_what_is_written_is_read(tmp_path, rows, storage, labels):
    sha256 = write(tmp_path, *rows, labels, storage)
    features = read_features(tmp_path)
    np.testing.assert_array_equal(features.train, rows[0])
    np.testing.assert_array_equal(features.test, rows[1])
    assert features.train.dtype == np.float32
    assert features.sha256 == sha256
    assert features.origin == (ORIGIN if labels else dataclasses.replace(ORIGIN, classes=None))
    if labels:
        np.testing.assert_array_equal(features.test_labels, np.arange(10) % 3)
        assert features.train_labels.dtype == np.int32
    else:
        assert features.train_labels is None
        assert features.test_labels is None
    names = {"npy": {"train_features.npy", "test_features.npy"}, "csv": {"features_train.csv", "features_test.csv"}}[storage]
    if labels and storage == "npy":
        names |= {"train_labels.npy", "test_labels.npy"}
    assert {path.name for path in tmp_path.iterdir()} == names | {"features.json"}


def test_npy_is_memory_mapped(tmp_path, rows):
    write(tmp_path, *rows)
    assert isinstance(read_features(tmp_path).train, np.memmap)


def test_both_storages_have_one_identity(tmp_path, rows):
    assert write(tmp_path / "npy", *rows) == write(tmp_path / "csv", *rows, storage="csv", blocks=3)


def test_a_new_storage_replaces_the_old_one(tmp_path, rows):
    write(tmp_path, *rows)
    write(tmp_path, *rows, labels=False, storage="csv")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["features.json", "features_test.csv", "features_train.csv"]
    write(tmp_path, *rows, labels=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["features.json", "test_features.npy", "train_features.npy"]


class Stop(Exception):
    """Stands for whatever may happen in the middle."""


def test_nothing_half_written_stays_and_the_old_features_do(tmp_path, rows):
    write(tmp_path, *rows)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def interrupted():
        with FeatureWriter(tmp_path, "train", 5, WIDTH) as writer:
            writer.write(0, rows[0][:2])
            raise Stop

    with pytest.raises(Stop):
        interrupted()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_missing_rows_are_not_published(tmp_path, rows):
    with FeatureWriter(tmp_path, "train", 5, WIDTH) as a, FeatureWriter(tmp_path, "test", 0, WIDTH) as b:
        a.write(0, rows[0][:2])
        with pytest.raises(ValueError, match="2 of 5 rows"):
            publish(tmp_path, dataclasses.replace(ORIGIN, classes=None), a, b)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("offset", "shape"), [(1, (2, WIDTH)), (0, (2, WIDTH + 1)), (0, (6, WIDTH)), (0, (WIDTH,))], ids=["gap", "width", "count", "axes"]
)
def test_rows_that_do_not_fit_are_refused(tmp_path, offset, shape):
    with FeatureWriter(tmp_path, "train", 5, WIDTH) as writer, pytest.raises(ValueError, match="rows"):
        writer.write(offset, np.zeros(shape, np.float32))


def test_labels_of_another_count_are_refused(tmp_path):
    with pytest.raises(ValueError, match="need 5 labels"):
        FeatureWriter(tmp_path, "train", 5, WIDTH, labels=np.zeros(4, np.int32))


def test_a_disk_too_small_is_found_out_before(tmp_path):
    with pytest.raises(DiskFull, match=r"needs 4,000,\d{3},\d{3},\d{3} bytes") as caught:
        FeatureWriter(tmp_path, "train", 1_000_000, 1_000_000)
    assert caught.value.exit_code == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("storage", ["npy", "csv"])
def test_a_disk_that_fills_on_the_way_costs_nothing(disk, rows, monkeypatch, storage):
    small_disk = disk("size=1m")
    write(small_disk, *rows)
    before = {path.name: path.read_bytes() for path in small_disk.iterdir()}
    # As if another program took the space after the check.
    monkeypatch.setattr(FeatureWriter, "_check_room", lambda self: None)
    many = np.full((60_000, WIDTH), 1 / 3, np.float32)
    with pytest.raises(DiskFull, match=r"needs [\d,]+ bytes and the disk is full"):
        write(small_disk, many, rows[1], storage=storage)
    assert {path.name: path.read_bytes() for path in small_disk.iterdir()} == before
    np.testing.assert_array_equal(read_features(small_disk).train, rows[0])


def test_a_folder_without_features_is_missing_data(tmp_path):
    for folder in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(DataMissing, match=r"extract_features\.py RUN"):
            read_features(folder)


def edit_index(folder, **changes):
    path = folder / "features.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_origin(folder, **changes):
    index = json.loads((folder / "features.json").read_text())
    edit_index(folder, origin=index["origin"] | changes)


def rewrite(folder, old, new, behind=b""):
    path = folder / "train_features.npy"
    path.write_bytes(path.read_bytes().replace(old, new, 1) + behind)


def truncate(folder):
    path = folder / "train_features.npy"
    path.write_bytes(path.read_bytes()[:-4])


def flip(folder):
    path = folder / "test_features.npy"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


def put_nan(folder):
    features = np.lib.format.open_memmap(folder / "train_features.npy", "r+")
    features[4, 2] = np.nan
    features.flush()


def count_labels_wrong(folder):
    np.save(folder / "train_labels.npy", np.zeros(22, np.int32))


def label_ten(folder):
    np.save(folder / "train_labels.npy", np.full(23, 10, np.int32))


def another_dtype(folder):
    np.save(folder / "test_features.npy", np.zeros((10, WIDTH)))


DAMAGES = {
    "truncated": (truncate, "train_features.npy.*truncated"),
    "flipped bit": (flip, "test_features.npy.*SHA-256"),
    "NaN": (put_nan, f"byte {128 + 4 * (4 * WIDTH + 2)}: value 2 of train image 4 is nan"),
    "label count": (count_labels_wrong, r"train_labels.npy.*\(22,\)"),
    "label 10": (label_ten, "train image 0 has label 10"),
    "float64": (another_dtype, "holds float64"),
    "pickle": (lambda folder: np.save(folder / "train_labels.npy", np.array([{}])), "train_labels.npy"),
    "open bracket": (lambda folder: rewrite(folder, b"(23,", b"((3,"), "train_features.npy.*header is not one"),
    "archive": (lambda folder: (folder / "train_features.npy").write_bytes(b"PK\x03\x04" + bytes(200)), "train_features.npy.*no npy file"),
    "bytes behind": (lambda folder: rewrite(folder, b"\x93NUMPY", b"\x93NUMPY", b"more"), "train_features.npy.*too long"),
    "no npy": (lambda folder: (folder / "train_features.npy").write_bytes(b"hello"), "train_features.npy"),
    "empty": (lambda folder: (folder / "train_features.npy").write_bytes(b""), "train_features.npy"),
    "index deep": (lambda folder: (folder / "features.json").write_text("[" * 100_000), "more than 64 deep"),
    "index classes": (lambda folder: edit_origin(folder, classes=None), "labels and class names go together"),
    "index shape": (lambda folder: edit_origin(folder, image_shape=[3]), "is no shape"),
    "index gpu": (lambda folder: edit_origin(folder, gpu=[]), "gpu must be string or null"),
    "index cut": (lambda folder: (folder / "features.json").write_text('{"format"'), "features.json"),
    "index foreign": (lambda folder: (folder / "features.json").write_text('{"a": 1}'), "lacks 'format'"),
    "index list": (lambda folder: (folder / "features.json").write_text("[]"), "features.json"),
    "index version": (lambda folder: edit_index(folder, version=3), "reads 1 and 2"),
    "index width": (lambda folder: edit_index(folder, width="6"), "width"),
    "index origin": (lambda folder: edit_index(folder, origin={"run": "x"}), "origin"),
    "index hash": (lambda folder: edit_index(folder, sha256="0"), "does not follow"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named(tmp_path, rows, damage):
    write(tmp_path, *rows)
    spoil, words = DAMAGES[damage]
    spoil(tmp_path)
    with pytest.raises(DataCorrupt, match=words) as caught:
        read_features(tmp_path)
    assert caught.value.exit_code == 3


def test_a_missing_array_is_named(tmp_path, rows):
    write(tmp_path, *rows)
    (tmp_path / "test_labels.npy").unlink()
    with pytest.raises(DataMissing, match=r"test_labels\.npy"):
        read_features(tmp_path)


@pytest.mark.parametrize(("old", "new", "words"), [(",", ";", "not a table"), ("\n", "\n0\n", "not a table"), ("\n", ",1\n", "of 8 values")])
def test_a_damaged_csv_is_named(tmp_path, rows, old, new, words):
    write(tmp_path, *rows, storage="csv")
    path = tmp_path / "features_train.csv"
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(DataCorrupt, match=words):
        read_features(tmp_path)


@pytest.mark.parametrize("at", [None, 0, -1])
def test_a_verification_beside_finds_what_one_before_finds(tmp_path, rows, at):
    write(tmp_path, *rows)
    path = tmp_path / "train_features.npy"
    if at is not None:
        content = bytearray(path.read_bytes())
        content[128 if at == 0 else -1] ^= 1
        path.write_bytes(content)
    verification = Verification(tmp_path, read_features(tmp_path, verify=False))
    if at is None:
        verification.finish()
        return
    for _ in range(2):
        with pytest.raises(DataCorrupt, match="train_features"):
            verification.finish()
