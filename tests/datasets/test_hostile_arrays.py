"""Tests of npz:PATH with damaged and hostile files: exit code 3 and a sentence that names the array, and no more memory than what is wanted takes."""

from __future__ import annotations

import io
import os
import tracemalloc
import zipfile

import numpy as np
import pytest

from nbcnn import datasets
from nbcnn.datasets import DataError, DataTooLarge, npz

BYTES = np.zeros((4, 1, 6, 6), np.uint8)


def load(path, **options):
    return datasets.load(f"npz:{path}", **options)


def peak(work):
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_float_training_images_and_byte_test_images_are_refused(tmp_path):
    np.savez(tmp_path / "x.npz", train_images=BYTES.astype(np.float32), test_images=BYTES)
    with pytest.raises(DataError, match="training images are float32, and test images uint8"):
        load(tmp_path / "x.npz")


def test_a_label_of_two_thousand_million_makes_no_two_thousand_million_names(tmp_path):
    np.savez(tmp_path / "x.npz", train_images=BYTES, test_images=BYTES, train_labels=[0, 1, 2, 2**31 - 2], test_labels=[0, 1, 2, 0])
    with pytest.raises(DataError, match=r"train_labels\[3\] is 2147483646"):
        load(tmp_path / "x.npz")


def test_a_limit_reads_no_more_than_its_images(tmp_path):
    """60 MB of zeros in an archive of 60 kB: six images are read, through a block of 4 MiB."""
    images = np.zeros((20_000, 1, 30, 100), np.uint8)
    images[7] = 7
    np.savez_compressed(tmp_path / "x.npz", images=images)
    whole = load(tmp_path / "x.npz")
    assert peak(lambda: load(tmp_path / "x.npz", limit=6)) < 16 << 20
    made = load(tmp_path / "x.npz", limit=6)
    np.testing.assert_array_equal(made.train_images, whole.train_images[:6])
    np.testing.assert_array_equal(made.test_images, whole.test_images[:6])


def test_arrays_larger_than_memory_are_refused_before_they_are_read(tmp_path, monkeypatch):
    np.save(tmp_path / "images.npy", np.zeros((100, 1, 100, 100), np.uint8))
    monkeypatch.setattr(npz.memory, "available", lambda: 500_000)
    with pytest.raises(DataTooLarge, match="smaller --limit, or save its arrays as train_images"):
        load(tmp_path)
    assert load(tmp_path, limit=6).train_images.shape == (6, 1, 100, 100)


def test_arrays_on_the_disk_may_be_larger_than_memory(tmp_path, monkeypatch):
    for part in ("train", "test"):
        np.save(tmp_path / f"{part}_images.npy", np.zeros((100, 1, 100, 100), np.float32))
    monkeypatch.setattr(npz.memory, "available", lambda: 500_000)
    assert isinstance(load(tmp_path).train_images, np.memmap)


@pytest.mark.parametrize("name", ["images.npy", "x.npz"])
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: os.symlink("/dev/zero", path)])
def test_what_is_no_regular_file_is_refused_and_not_waited_for(tmp_path, name, make):
    make(tmp_path / name)
    with pytest.raises(DataError, match="no regular file"):
        load(tmp_path if name.endswith("npy") else tmp_path / name)


def archive(path, members, method=zipfile.ZIP_DEFLATED):
    with zipfile.ZipFile(path, "w", method) as made:
        for name, content in members.items():
            made.writestr(name, content)


def content(array):
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("images", np.zeros((2, 3, 4, 5), complex), "images are bytes"),
        ("images", np.array([{"a": 1}], object), "Python objects"),
        ("labels", np.zeros((4, 1 << 21), np.uint8), "one class per image"),
        ("labels", np.zeros(3, np.int64), r"3 labels for 4 images"),
        ("masks", np.zeros((3, 6, 6), np.uint8), r"3 masks for 4 images"),
        ("classes", np.array(["x" * 2000]), "names of at most"),
        ("channels_last", np.zeros(1000, bool), "true or false"),
    ],
)
def test_arrays_that_are_none_of_theirs_are_named(tmp_path, name, value, words):
    members = {"images.npy": content(BYTES), "labels.npy": content(np.arange(4)), f"{name}.npy": content(value)}
    archive(tmp_path / "x.npz", members)
    with pytest.raises(DataError, match=words) as refused:
        load(tmp_path / "x.npz")
    assert name in str(refused.value)


def test_an_archive_that_claims_more_than_it_can_hold_is_refused(tmp_path):
    archive(tmp_path / "x.npz", {"images.npy": content(BYTES)}, zipfile.ZIP_STORED)
    raw = bytearray((tmp_path / "x.npz").read_bytes())
    at = raw.index(b"PK\x01\x02")
    raw[at + 24 : at + 28] = b"\xff\xff\xff\x7f"  # the size of what is stored
    (tmp_path / "x.npz").write_bytes(raw)
    with pytest.raises(DataError, match="claims that 272 bytes hold 2,147,483,647"):
        load(tmp_path / "x.npz")
    archive(tmp_path / "x.npz", {"images.npy": content(BYTES)}, zipfile.ZIP_LZMA)
    with pytest.raises(DataError, match="compressed by method 14"):
        load(tmp_path / "x.npz")
