"""The README's first command and the commands that it proposes, on a machine without GPU and network, as a person would type them."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import zlib

import numpy as np
import pytest
from scripts import ROOT

from nbcnn.cli import extract, recipes, train
from nbcnn.datasets import cifar10, mnist

CONTROLS = ("raw pixels", "random encoder")


def typed(line, folder):
    """What `line` prints in `folder`: on stdout, and on stderr."""
    program, *words = shlex.split(line)
    assert program == "python"
    hidden = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT), "NBCNN_OFFLINE": "1"}
    environment = {name: value for name, value in os.environ.items() if name not in ("NUMBA_ENABLE_CUDASIM", "NBCNN_SIMULATOR")} | hidden
    done = subprocess.run([sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout, done.stderr


def proposed(output):
    """The one command that the output proposes to run next."""
    (line,) = [line for line in output.splitlines() if line.startswith("next: ")]
    return line.removeprefix("next: ")


def first_command():
    """The training of the README's first command, behind its installation."""
    (line,) = [line for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines() if line.endswith("&& python train.py")]
    return line.rpartition(" && ")[2]


@pytest.mark.full
def test_the_first_command_and_what_it_proposes_end_in_a_confusion_matrix(tmp_path):
    for door in ("train.py", "extract_features.py"):
        shutil.copy(ROOT / door, tmp_path)
    trained, said = typed(first_command(), tmp_path)
    assert "small-autoencoder, 10 epochs of up to 1,024 images" in said
    assert "digits: 1,024 training and 360 test images" in said
    assert said.count("where the time went") == 1
    run = next((tmp_path / "runs").iterdir())
    losses = [json.loads(line)["test_loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    # The variance of the pixels is 0.14: what is left of it is under one part in a hundred.
    assert losses[-1] < 0.0014
    assert losses[-1] < losses[0] / 5
    extracted, _ = typed(proposed(trained), tmp_path)
    assert "1,384 images × 256 features" in extracted
    printed, _ = typed(proposed(extracted), tmp_path)
    assert "next: " not in printed
    for name in ("encoder", *CONTROLS, "true class"):
        assert name in printed
    folder = tmp_path / "features" / "digits" / "classify"
    assert (folder / "confusion.png").is_file()
    found = json.loads((folder / "classify.json").read_text())["classifiers"]
    accuracy = {name: found[name]["test_accuracy"] for name in ("encoder", *CONTROLS)}
    assert accuracy["encoder"] > accuracy["random encoder"], accuracy


def cifar10_files(folder, count):
    """The six files of CIFAR-10 with `count` images each, of one colour each."""
    folder.mkdir()
    for number, name in enumerate(cifar10.FILES):
        table = np.zeros((count, cifar10.RECORD), np.uint8)
        table[:, 0] = np.arange(count) % 10
        table[:, 1:] = (np.arange(count)[:, None] * 7 + number) % 251
        (folder / name).write_bytes(table.tobytes())


def mnist_files(folder, count):
    """The four files of MNIST with `count` images each, of one grey each."""
    folder.mkdir(parents=True)
    for images, labels in zip(mnist.FILES[::2], mnist.FILES[1::2], strict=True):
        for name, array in ((images, np.arange(count * 784).reshape(count, 28, 28) // 784), (labels, np.arange(count) % 10)):
            head = bytes((0, 0, 8, array.ndim)) + b"".join(length.to_bytes(4, "big") for length in array.shape)
            (folder / name).write_bytes(head + array.astype(np.uint8).tobytes())


@pytest.mark.parametrize(
    ("held", "words", "name"),
    [
        ("nothing", "", "digits"),
        ("cifar10", "", "cifar10"),
        ("mnist", "", "digits"),
        ("mnist", "--dataset mnist", "mnist"),
        ("fashion-mnist", "--dataset fashion-mnist", "fashion-mnist"),
    ],
)
def test_what_the_small_run_of_a_cpu_says_is_what_it_trains_on_resumes_and_extracts(held, words, name, tmp_path, monkeypatch, capsys):
    """Whatever lies in data/: the images are read in a thread beside the imports, which must know the small run's limit."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NBCNN_OFFLINE", "1")
    monkeypatch.setitem(recipes.ON_CPU, "limit", 96)
    if held == "cifar10":
        cifar10_files(tmp_path / "data", 120)
    elif held != "nothing":
        mnist_files(tmp_path / "data" / held, 120)
    assert train.main([*words.split(), "--epochs", "1", "--mode", "cpu", "--out", "run"]) == 0
    said = capsys.readouterr().err
    assert "small-autoencoder, 1 epoch of up to 96 images" in said
    assert f"{name}: 96 training and 96 test images" in said
    assert "6 training steps per epoch" in said
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (config["flags"]["limit"], config["data"]["training_images"]) == (96, 96)
    assert train.main(["--resume", "run", "--epochs", "2"]) == 0
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2
    assert extract.main(["run", "--out", "features", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["images"] == 192


@pytest.mark.parametrize("driver", [True, False])
def test_the_first_command_installs_the_compiler_where_there_is_a_driver(driver, tmp_path):
    (line,) = [line for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines() if line.endswith("&& python train.py")]
    assert line in (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    for name in ("pip", *(["nvidia-smi"] if driver else [])):
        (tmp_path / name).write_text('#!/bin/sh\nprintf "%s|" "$@"\n')
        (tmp_path / name).chmod(0o755)
    words = line.split(" && ", 2)[2].rpartition(" && ")[0]
    done = subprocess.run(["/bin/sh", "-c", words], env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, f"install|-e|.[plots,svm{',cu13' if driver else ''}]|"), done.stderr


def test_the_size_of_the_wheel_that_the_page_names():
    page = (ROOT / "docs" / "howto" / "deployment.md").read_text(encoding="utf-8")
    assert "a wheel of less than three megabytes" in page
    packed = sum(len(zlib.compress(path.read_bytes(), 6)) for path in (ROOT / "nbcnn").rglob("*") if path.suffix in (".py", ".json", ".md"))
    assert 1_000_000 < packed < 3_000_000
