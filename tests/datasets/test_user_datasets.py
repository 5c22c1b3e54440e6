"""Tests of data sets that a function of a file outside the package makes: `--dataset file.py:function`."""

from __future__ import annotations

import hashlib
import json
import os
import sys

import numpy as np
import pytest
from scripts import exits, extract, message, train

from nbcnn import datasets
from nbcnn.datasets import DataError, own
from nbcnn.files import user_code
from nbcnn.files.errors import UsageError

SOURCE = """
import numpy as np

from nbcnn.datasets import Dataset

rng = np.random.default_rng(5)
IMAGES = rng.integers(0, 256, (40, 8, 8, 3), dtype=np.uint8)
LABELS = np.arange(40) % 2


def arrays():
    return {"images": IMAGES, "labels": LABELS, "classes": ["oak", "beech"]}


def apart():
    return {"x_train": IMAGES[:30], "y_train": LABELS[:30], "x_test": IMAGES[30:], "y_test": LABELS[30:]}


def unlabelled():
    return {"images": IMAGES}


def whole():
    first = np.ascontiguousarray(IMAGES.transpose(0, 3, 1, 2))
    labels = LABELS.astype(np.int32)
    return Dataset("mine", "made here", first[:30], labels[:30], first[30:], labels[30:], ("oak", "beech"))


def number():
    return 7


def broken():
    raise RuntimeError("no such tree")


def masked():
    return {"images": np.ma.masked_array(IMAGES, IMAGES > 9), "labels": LABELS}


def short():
    return {"images": IMAGES, "labels": LABELS[:9]}
"""
QUICK = ["--mode", "cpu", "--batch", "4", "--epochs", "1", "--quiet"]


@pytest.fixture
def leaves(tmp_path):
    """A file with functions that make data sets."""
    (tmp_path / "leaves.py").write_text(SOURCE)
    return tmp_path / "leaves.py"


def test_arrays_become_a_data_set_whose_name_reads_it_again(leaves, monkeypatch):
    monkeypatch.chdir(leaves.parent)
    data = datasets.load("leaves.py:arrays")
    assert data.name == f"{leaves}:arrays"
    assert data.source == f"arrays of {leaves}:arrays, uint8"
    assert data.classes == ("oak", "beech")
    assert (data.train_images.shape, data.test_images.shape) == ((36, 3, 8, 8), (4, 3, 8, 8))
    monkeypatch.chdir("/")
    again = datasets.load(data.name)
    assert np.array_equal(again.train_images, data.train_images)
    assert np.array_equal(again.test_labels, data.test_labels)


@pytest.mark.parametrize("function", ["apart", "whole"])
def test_parts_of_its_own_and_a_dataset_are_taken_as_they_are(leaves, function):
    data = datasets.load(f"{leaves}:{function}", limit=8)
    assert data.name == f"{leaves}:{function}"
    assert (len(data.train_images), len(data.test_images)) == (8, 8)
    assert data.train_labels.tolist() == [0, 1] * 4


def test_a_share_for_tests_stands_in_the_name(leaves):
    name = own.named(f"{leaves}:arrays", test_share=0.25)
    assert name == f"{leaves}:arrays?test-share=0.25"
    assert len(datasets.load(name).test_images) == 10
    assert own.short(name) == "leaves"


@pytest.mark.parametrize(
    ("name", "kind", "says"),
    [
        ("number", DataError, "must return a nbcnn.datasets.Dataset, or a dict of arrays .* it returned int"),
        ("broken", DataError, "raised RuntimeError: no such tree"),
        ("masked", DataError, "leaves.py: images are a masked array, whose mask nbcnn does not know"),
        ("short", DataError, "has 9 labels for 40 images"),
        ("array", UsageError, "has no function 'array'; did you mean arrays?"),
        ("whole?test-share=0.5", DataError, "leave --test-share out"),
    ],
)
def test_what_makes_no_data_set_is_said(leaves, name, kind, says):
    with pytest.raises(kind, match=says):
        datasets.load(f"{leaves}:{name}")


def test_a_file_that_was_changed_is_run_anew_and_hashed_as_it_was_run(tmp_path):
    """Of the same size and second, as a .pyc is found by."""
    path, hashed = tmp_path / "leaves.py", []
    for number in "12":
        path.write_text(f"def number():\n    return {number}\n")
        os.utime(path, (1e9, 1e9))
        assert user_code.function_of(f"{path}:number", "--model")() == int(number)
        hashed.append(user_code.hashes()[f"{path} (--model)"].decode())
        user_code.function_of(f"{path}:number", "--callback")
        assert f"{path} (--callback)" not in user_code.hashes()
        assert hashed[-1] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert len(set(hashed)) == 2


@pytest.mark.parametrize(("folder", "compared"), [("project", 2), ("site-packages", 1)])
def test_what_installed_packages_import_is_not_compared(folder, compared, tmp_path, monkeypatch):
    """It would be all that NumPy or PyTorch is: seconds before the first step."""
    (tmp_path / folder).mkdir()
    for name, text in (("woods", "import twigs\n\n\ndef load():\n    return twigs\n"), ("twigs", "")):
        (tmp_path / folder / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(user_code, "_LOADED", {})
    monkeypatch.syspath_prepend(tmp_path / folder)
    user_code.function_of("woods:load", "--dataset")
    assert len(user_code.hashes()) == compared


def test_a_size_is_for_folders_of_images(leaves):
    with pytest.raises(UsageError, match="--size is for --dataset folder:PATH; arrays are taken as they are"):
        own.named(f"{leaves}:arrays", "64")


def test_it_trains_resumes_and_gives_features(leaves, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    assert exits(train, [*QUICK, "--dataset", "leaves.py:arrays", "--model", "mnist-cnn", "--out", run]) == 0
    monkeypatch.chdir("/")
    assert exits(train, ["--resume", run, "--epochs", "2", "--quiet"]) == 0
    assert json.loads((run / "config.json").read_text())["data"]["name"] == f"{leaves}:arrays"
    assert exits(extract, [run, "--out", tmp_path / "features", "--quiet"]) == 0


def test_a_missing_file_is_named_before_anything_is_trained(tmp_path, capsys):
    text = message(capsys, 2, exits(train, [*QUICK, "--dataset", f"{tmp_path}/none.py:load", "--out", tmp_path / "run"]))
    assert f"--dataset: there is no file {tmp_path}/none.py" in text
    assert not (tmp_path / "run").exists()
