"""Tests of the classify command: what it prints and writes, its baselines, its exit codes, and Ctrl-C."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from nbcnn import datasets
from nbcnn.classify import pipeline
from nbcnn.classify.feature_writer import FeatureWriter, publish
from nbcnn.classify.features import Origin
from nbcnn.cli.baselines import data_dir_of, untrained_encoder
from nbcnn.cli.classify import main
from nbcnn.files.errors import UsageError
from nbcnn.train import plots

ORIGIN = Origin(
    run="runs/one",
    checkpoint="runs/one/checkpoint-best.safetensors",
    checkpoint_sha256="ab" * 32,
    dataset="digits",
    source="scikit-learn",
    classes=tuple("0123456789"),
    image_shape=(3, 32, 32),
    code_shape=(16, 8, 8),
    mode="cpu",
    gpu=None,
)


def write(folder, train, test, train_labels, test_labels, origin=ORIGIN):
    with (
        FeatureWriter(folder, "train", len(train), train.shape[1], labels=train_labels) as a,
        FeatureWriter(folder, "test", len(test), test.shape[1], labels=test_labels) as b,
    ):
        a.write(0, train)
        b.write(0, test)
        publish(folder, origin, a, b)


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """Features of digits: one channel at the original 8×8 stands in for a trained encoder."""
    data, folder = datasets.load("digits"), tmp_path_factory.mktemp("digits")
    train, test = (images[:, 0, 2::4, 2::4].reshape(len(images), -1).astype(np.float32) for images in (data.train_images, data.test_images))
    write(folder, train, test, data.train_labels, data.test_labels)
    return folder


def test_tables_and_files(digits, tmp_path, capsys):
    assert main([str(digits), "--out", str(tmp_path), "--device", "cpu"]) == 0
    printed = capsys.readouterr()
    assert "encoder" in printed.out
    assert "true class" in printed.out
    assert "gamma = scale" in printed.err
    result = json.loads((tmp_path / "classify.json").read_text())
    assert result["classifiers"]["encoder"]["test_accuracy"] > 0.9
    assert np.array(result["classifiers"]["encoder"]["confusion"]).sum() == len(datasets.load("digits").test_labels)
    assert (tmp_path / "confusion.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in tmp_path.iterdir()} == {"classify.json", "confusion.png", "classifier.safetensors"}


@pytest.mark.parametrize(("machine", "name"), [("svm", "RBF SVM"), ("ridge", "kernel ridge")])
def test_the_matrix_has_a_title_without_the_path_of_the_images(machine, name, digits, tmp_path, monkeypatch):
    origin, titles = dataclasses.replace(ORIGIN, dataset="folder:/home/me/My figures?size=8x8"), []
    data = datasets.load("digits", limit=100)
    train, test = (images[:, 0, 2::4, 2::4].reshape(len(images), -1).astype(np.float32) for images in (data.train_images, data.test_images))
    write(tmp_path, train, test, data.train_labels, data.test_labels, origin)
    monkeypatch.setattr(plots, "confusion", lambda *given: titles.append(given[-1]))
    assert main([str(tmp_path), "--machine", machine, "--device", "cpu", "--quiet"]) == 0
    assert titles[0].startswith(f"My-figures: {name} on 64 features, ")


def test_json_is_one_line_and_quiet_is_quiet(digits, tmp_path, capsys):
    assert main([str(digits), "--out", str(tmp_path), "--json", "--quiet", "--limit", "300", "--scale", "none", "--gamma", "0.001", "--c", "3"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    (line,) = printed.out.splitlines()
    result = json.loads(line)
    row = result["classifiers"]["encoder"]
    assert (row["train_samples"], row["test_samples"], row["gamma"], row["C"]) == (300, 300, 0.001, 3.0)
    assert result["scale"] == "none"
    assert result == json.loads((tmp_path / "classify.json").read_text())


def test_a_search_judges_by_training_images_alone(digits, tmp_path, capsys):
    words = [str(digits), "--out", str(tmp_path), "--json", "--device", "cpu", "--limit", "150", "--jobs", "1", "--c", "3", "--search", "gamma,C"]
    assert main(words) == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    tried, row = result["search"], result["classifiers"]["encoder"]
    # The given settings, two gammas, and two other values of C: 3 is given already.
    assert len(tried) == 5
    best = max(tried, key=lambda each: each["accuracy"])
    assert row["C"] == best["C"]
    assert row["train_samples"] == 150
    assert "5 settings tried" in printed.err


def test_a_split_holds_a_tenth_of_each_class_and_shares_nothing():
    labels = np.repeat([4, 7, 9], [40, 2, 25])
    inside, judges = pipeline.split(labels)
    assert sorted([*inside, *judges]) == list(range(67))
    assert np.bincount(labels[judges]).tolist() == [0, 0, 0, 0, 4, 0, 0, 1, 0, 2]
    with pytest.raises(UsageError, match="class 1 has one training sample"):
        pipeline.split(np.array([0, 0, 1]))


def test_baselines_stand_in_the_same_table(digits, tmp_path, capsys):
    assert main([str(digits), "--out", str(tmp_path), "--baselines", "--json", "--quiet", "--device", "cpu", "--limit", "200"]) == 0
    rows = json.loads(capsys.readouterr().out)["classifiers"]
    assert list(rows) == ["encoder", "raw pixels", "random encoder"]
    assert [row["features"] for row in rows.values()] == [64, 3072, 1024]
    assert all(row["test_accuracy"] > 0.7 for row in rows.values())


def test_the_random_encoder_is_of_the_model_that_made_the_features(tmp_path, capsys):
    data, codes = datasets.load("digits"), np.random.default_rng(0).random((30, 8), np.float32)
    write(
        tmp_path, codes, codes, data.train_labels[:30], data.test_labels[:30], dataclasses.replace(ORIGIN, model="mnist-cnn", code_shape=(64, 8, 8))
    )
    assert main([str(tmp_path), "--baselines", "--json", "--device", "cpu", "--jobs", "1"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["classifiers"]["random encoder"]["features"] == 64 * 8 * 8
    assert "do not say" not in printed.err


def test_features_that_do_not_name_their_model_say_what_is_assumed(digits, tmp_path, capsys):
    layers, note = untrained_encoder(ORIGIN)
    assert [type(layer).__name__ for layer in layers] == ["Conv2d", "ReLU", "MaxPool2d"] * 2
    assert note == "the features do not say which model made them: their run is gone, so the autoencoder is assumed"
    origin = dataclasses.replace(ORIGIN, run=str(tmp_path), code_shape=(64, 8, 8))
    (tmp_path / "config.json").write_text(json.dumps({"flags": {"model": "mnist-cnn", "data_dir": "data"}, "data": {"name": "digits"}}))
    layers, note = untrained_encoder(origin)
    assert [type(layer).__name__ for layer in layers] == ["Conv2d", "EvoNormS0", "MaxPool2d"] * 2
    assert note.endswith(f"their run {tmp_path} says mnist-cnn")
    assert main([str(digits), "--out", str(tmp_path / "out"), "--baselines", "--device", "cpu", "--limit", "50"]) == 0
    assert "note      the features do not say which model made them" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": "mnist-cnn"}, "the encoder of mnist-cnn makes codes of (64, 8, 8), these features are of (16, 8, 8); extract"),
        (
            {"code_shape": (16, 7, 7)},
            "the encoder of the autoencoder makes codes of (16, 8, 8), these features are of (16, 7, 7); the features",
        ),
        ({"model": "own"}, "which layer of model 'own' makes a code is not known; it is for autoencoder, small-autoencoder, mnist-cnn, mnist-cnn-b0"),
    ],
)
def test_baselines_without_the_right_model_are_a_usage_error(tmp_path, capsys, change, words):
    rows, labels = np.ones((4, 2), np.float32), np.array([0, 1, 0, 1], np.int32)
    write(tmp_path, rows, rows, labels, labels, dataclasses.replace(ORIGIN, **change))
    code, message = failing([str(tmp_path), "--baselines", "--quiet"], capsys)
    assert code == 2
    assert words in message


def test_baselines_of_other_images_are_refused(digits, tmp_path, capsys):
    data = datasets.load("digits")
    rows, labels = np.random.default_rng(0).random((40, 3), np.float32), data.train_labels[1:41]
    write(tmp_path, rows, rows, labels, data.test_labels[:40])
    assert main([str(tmp_path), "--baselines", "--quiet"]) == 3
    assert "other images" in capsys.readouterr().err


def failing(arguments, capsys):
    """Exit code and message of a command that must not print a result."""
    try:
        code = main(arguments)
    except SystemExit as left:
        code = left.code
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "Traceback" not in printed.err
    return code, printed.err


def test_bad_flags_are_usage_errors(digits, capsys):
    for words, hint in (
        (["--lmit", "3"], "--limit"),
        (["--device", "gpuu"], "gpu"),
        (["--gamma", "0"], "more than 0"),
        (["--c", "x"], "no number"),
        (["--jobs", "0"], "below 1"),
    ):
        code, message = failing([str(digits), *words], capsys)
        assert code == 2
        assert hint in message


def test_missing_features_are_missing_data(tmp_path, capsys):
    code, message = failing([str(tmp_path)], capsys)
    assert code == 3
    assert "extract_features.py" in message


def test_features_without_labels_cannot_be_classified(tmp_path, capsys):
    rows = np.ones((3, 2), np.float32)
    write(tmp_path, rows, rows, None, None, dataclasses.replace(ORIGIN, dataset="photos", classes=None))
    code, message = failing([str(tmp_path)], capsys)
    assert code == 3
    assert "no labels" in message


def test_one_class_cannot_be_classified(tmp_path, capsys):
    rows = np.ones((3, 2), np.float32)
    write(tmp_path, rows, rows, np.zeros(3, np.int32), np.zeros(3, np.int32))
    code, message = failing([str(tmp_path)], capsys)
    assert code == 3
    assert "at least 2" in message


def test_a_gpu_that_is_not_there_is_exit_4(digits, capsys, monkeypatch):
    monkeypatch.setattr("nbcnn.gpu.device.gpu_missing", lambda: "no CUDA GPU visible")
    code, message = failing([str(digits), "--device", "gpu", "--quiet"], capsys)
    assert code == 4
    assert "no CUDA GPU visible" in message
    assert "--device cpu" in message
    assert "--mode cpu" not in message


def test_a_scratch_folder_is_made(digits, tmp_path, capsys):
    words = ["--limit", "100", "--quiet", "--out", str(tmp_path / "out"), "--scratch", str(tmp_path / "new" / "scratch")]
    assert main([str(digits), *words]) == 0
    assert not list((tmp_path / "new" / "scratch").iterdir())


def test_baselines_look_where_the_run_found_its_images(tmp_path):
    origin = dataclasses.replace(ORIGIN, run=str(tmp_path))
    assert data_dir_of(origin) == Path("data")
    config = {"flags": {"model": "autoencoder", "data_dir": "elsewhere"}, "data": {"name": "cifar10"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert data_dir_of(origin) == Path("elsewhere")


def test_an_output_folder_that_cannot_be_made_is_exit_1(digits, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    code, message = failing([str(digits), "--out", str(tmp_path / "file" / "out"), "--quiet"], capsys)
    assert code == 1
    assert "file/out: cannot make this folder (Not a directory); choose another with --out" in message
    code, message = failing([str(digits), "--out", str(tmp_path / "out"), "--scratch", str(tmp_path / "file" / "s"), "--quiet"], capsys)
    assert code == 1
    assert "choose another with --scratch" in message


def children(pid):
    """Process ids of the children of `pid`."""
    text = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True).stdout
    return [int(word) for word in text.split() if word.isdigit()]


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.skipif(sys.platform != "linux", reason="looks processes up as Linux does")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_leaves_no_process_and_no_file(tmp_path, number, code):
    rng = np.random.default_rng(0)
    rows, labels = rng.standard_normal((2400, 2), np.float32), rng.integers(0, 3, 2400).astype(np.int32)
    write(tmp_path / "features", rows, rows[:9], labels, labels[:9])
    # Noise with a huge C: libsvm would iterate for minutes.
    words = [str(tmp_path / "features"), "--c", "1e7", "--jobs", "2", "--device", "cpu", "--out", str(tmp_path / "out")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "nbcnn", "classify", *words]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True, env=environment) as process:
        busy, until = [], time.monotonic() + 60
        # Solvers are the children that have worked for a second of processor time.
        while len(busy) < 2 and time.monotonic() < until and process.poll() is None:
            time.sleep(0.1)
            busy = [pid for pid in children(process.pid) if processor_seconds(pid) > 1.5]
        assert len(busy) == 2
        if number == signal.SIGINT:
            os.killpg(process.pid, number)
        else:
            os.kill(process.pid, number)
        _, message = process.communicate(timeout=10)
    assert process.returncode == code
    assert "Traceback" not in message
    assert not any(alive(pid) for pid in busy)
    assert not list((tmp_path / "out").iterdir())


def processor_seconds(pid):
    """Processor time that process `pid` has used."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            values = file.read().rsplit(")", 1)[1].split()
    except OSError:
        return 0.0
    return (int(values[11]) + int(values[12])) / os.sysconf("SC_CLK_TCK")


def test_help_is_quick():
    begun = time.perf_counter()
    code = "import sys\nfrom nbcnn.cli.classify import main\nmain(['--help'])"
    done = subprocess.run([sys.executable, "-X", "importtime", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0
    assert "exit codes" in done.stdout
    imported = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}
    assert "argparse" in imported
    assert not imported & {"numpy", "numba", "sklearn", "matplotlib"}
    # No import that takes time; the limit allows for a busy machine.
    assert time.perf_counter() - begun < 3
