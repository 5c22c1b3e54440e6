"""Tests of a network of one's own on the command line, settings from a file, predictions of image files, and the errors that people met."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from scripts import ROOT, TINY, exits, extract, message, train

import nbcnn
from nbcnn import datasets
from nbcnn.cli import classify, compare, launch, loading, predict, study_dwconv, train_flags
from nbcnn.files.errors import UsageError
from nbcnn.model import pictures
from nbcnn.train import callbacks, checkpoint, trainer
from nbcnn.train.runlog import RunFolder

MODEL_FILE = """
from nbcnn import Conv2d, Flatten, Linear, MaxPool2d, MSE, ReLU, SoftmaxCrossEntropy


def layers():
    return [Conv2d(4, 5, stride=4), ReLU(), MaxPool2d(2), Flatten(), Linear(10), SoftmaxCrossEntropy()]


def sized(channels, height, width):
    return [Conv2d(2, 3, padding=1), ReLU(), Conv2d(channels, 3, padding=1), MSE()]


def broken():
    raise RuntimeError("no idea")


def nothing():
    return []


def endless():
    return [Flatten()]
"""
QUICK = ["--dataset", "shapes", "--mode", "cpu", "--limit", "6", "--batch", "3", "--epochs", "2", "--quiet"]


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A folder with my_model.py and a run of its function layers."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "my_model.py").write_text(MODEL_FILE)
    assert exits(train, [*QUICK, "--model", f"{folder}/my_model.py:layers", "--out", folder / "run"]) == 0
    return folder


@pytest.fixture
def images(tmp_path):
    """A folder with a colour, a grey, a transparent, a 16-bit and an EXIF-rotated picture."""
    folder = tmp_path / "images"
    folder.mkdir()
    rng = np.random.default_rng(3)
    colour = rng.integers(0, 256, (40, 32, 3)).astype(np.uint8)
    Image.fromarray(colour).save(folder / "a.png")
    Image.fromarray(colour[..., 0]).save(folder / "b.png")
    Image.fromarray(np.dstack([colour, np.zeros((40, 32), np.uint8)])).save(folder / "c.png")
    Image.fromarray(colour[..., 0].astype(np.uint16) * 257).save(folder / "d.png")
    turned = Image.Exif()
    turned[0x0112] = 6
    Image.fromarray(colour).save(folder / "e.png", exif=turned)
    return folder


# -- a network of one's own


def test_a_network_of_ones_own_is_trained_resumed_loaded_and_extracted(own, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(own / "run", run)
    assert exits(train, ["--resume", run, "--epochs", "3", "--quiet"]) == 0
    assert len(RunFolder(run).rows()) == 3
    x = np.zeros((2, 3, 32, 32), np.uint8)
    assert nbcnn.load(run, mode="cpu").predict(x).shape == (2, 10)
    assert len(nbcnn.load(run, mode="cpu").classes) == 10
    assert exits(extract, [run, "--out", tmp_path / "f", "--mode", "cpu", "--quiet"]) == 2
    assert "name it by --at" in capsys.readouterr().err
    assert exits(extract, [run, "--out", tmp_path / "f", "--mode", "cpu", "--quiet", "--at", "pool1"]) == 0
    assert "12 images × 36 features" in capsys.readouterr().out, "as many of each split as the run took"


def test_a_changed_network_is_not_resumed(own, tmp_path, capsys):
    file = tmp_path / "other.py"
    file.write_text(MODEL_FILE)
    assert exits(train, [*QUICK, "--model", f"{file}:layers", "--out", tmp_path / "run"]) == 0
    file.write_text(MODEL_FILE.replace("stride=4", "stride=4, bias=True").replace("ReLU(), MaxPool2d(2)", "MaxPool2d(2), ReLU()"))
    assert "its layers is" in message(capsys, 3, exits(train, ["--resume", tmp_path / "run", "--epochs", "3", "--quiet"]))


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("layer", r"no function 'layer'; did you mean layers?"),
        ("broken", "raised RuntimeError: no idea"),
        ("nothing", "must return a list of layers"),
        ("endless", "must be a loss"),
    ],
)
def test_a_function_that_makes_no_network_is_told(own, function, says, capsys):
    assert says in message(capsys, 2, exits(train, [*QUICK, "--model", f"{own}/my_model.py:{function}"]))


def test_a_file_or_module_that_is_not_there_is_named(capsys, tmp_path):
    assert "there is no file none.py" in message(capsys, 2, exits(train, [*QUICK, "--model", "none.py:layers"]))
    assert "no_such_package cannot be imported" in message(capsys, 2, exits(train, [*QUICK, "--model", "no_such_package:layers"]))
    assert "FILE.py:FUNCTION" in message(capsys, 2, exits(train, [*QUICK, "--model", "mine"]))
    assert "is none of autoencoder" in message(capsys, 2, exits(train, [*QUICK, "--model", "autoencode"]))
    assert exits(train, [*QUICK, "--model", "nbcnn.nn.models:mnist_cnn", "--explain"]) == 0


@pytest.mark.parametrize("model", ["none.py:layers", "no_such_package:layers", "my_model.py:layer"])
def test_what_is_no_model_is_told_before_any_data_is_read(own, model, capsys, monkeypatch):
    def read(*given):
        raise AssertionError("the data set is asked for")

    monkeypatch.chdir(own)
    monkeypatch.setattr(loading, "load", read)
    monkeypatch.setattr(loading, "reading", read)
    text = message(capsys, 2, exits(train, ["--mode", "cpu", "--model", model]))
    assert text.startswith(("nbcnn: error: --model: ", "nbcnn: error: my_model.py has no function"))


def test_a_file_of_a_model_is_run_once(own, tmp_path):
    file = tmp_path / "counted.py"
    file.write_text(f"open({str(tmp_path / 'runs')!r}, 'a').write('x')\n{MODEL_FILE}")
    assert exits(train, [*QUICK, "--model", f"{file}:layers", "--explain"]) == 0
    assert (tmp_path / "runs").read_text() == "x"


@pytest.mark.parametrize("model", ["my.py", "my.py:", "models/my.py:a-b"])
def test_a_file_without_its_function_is_told_the_form(model, capsys):
    text = message(capsys, 2, exits(train, [*QUICK, "--model", model]))
    assert f"{model!r} names no function: a custom network is FILE.py:FUNCTION" in text


def test_frozen_layers_and_patience(own, tmp_path, capsys, monkeypatch):
    flags = [*QUICK, "--model", f"{own}/my_model.py:layers", "--weights", own / "run"]
    assert exits(train, [*flags, "--freeze", "conv*", "--out", tmp_path / "run"]) == 0
    before, after = (checkpoint.load(folder / checkpoint.LAST)[0] for folder in (own / "run", tmp_path / "run"))
    assert (before["param.conv1.weight"] == after["param.conv1.weight"]).all()
    assert not (before["param.linear1.weight"] == after["param.linear1.weight"]).all()
    assert "no parameter matches 'conw*'" in message(capsys, 2, exits(train, [*flags, "--freeze", "conw*", "--out", tmp_path / "b"]))
    steep = [*QUICK, "--model", f"{own}/my_model.py:layers", "--epochs", "40", "--lr", "5", "--schedule", "constant", "--momentum", "0"]
    assert exits(train, [*steep, "--patience", "2", "--out", tmp_path / "stopped"]) == 0
    said = capsys.readouterr().out
    assert "ended early: the loss has not fallen for 2 epochs" in said
    run = RunFolder(tmp_path / "stopped")
    losses = [row["test_loss"] for row in run.rows()]
    assert len(losses) < 40
    best = min(range(len(losses)), key=losses.__getitem__)
    assert f"the weights are those of epoch {best + 1}, the best" in said
    assert f"test accuracy {run.rows()[best]['test_accuracy']:.2%}" in said
    assert run.checkpoint() == run.best
    assert run.checkpoint("last") == run.last
    assert RunFolder(tmp_path / "run").checkpoint() == RunFolder(tmp_path / "run").last, "a run without --patience has its last weights"
    best_weights = checkpoint.load(run.best)[0]["param.linear1.weight"]
    with nbcnn.load(run.path, mode="cpu") as model:
        np.testing.assert_array_equal(model.weights()["linear1.weight"], best_weights)
    again = [*QUICK, "--model", f"{own}/my_model.py:layers", "--freeze", "linear1", "--weights", run.path, "--out", tmp_path / "again"]
    assert exits(train, again) == 0
    np.testing.assert_array_equal(checkpoint.load(tmp_path / "again" / checkpoint.LAST)[0]["param.linear1.weight"], best_weights)
    rows, last = RunFolder(tmp_path / "stopped").rows(), (tmp_path / "stopped" / checkpoint.LAST).read_bytes()
    assert len(rows) < 40

    # It has ended, also where it was killed before its callbacks were told of the last epoch.
    ask = callbacks.EarlyStopping._ask

    def killed(self, trainer):
        ask(self, trainer)
        if trainer._stopped:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(callbacks.EarlyStopping, "_ask", killed)
        assert exits(train, [*steep, "--patience", "2", "--out", tmp_path / "killed"]) == 130
    for name in ("stopped", "killed"):
        assert exits(train, ["--quiet", "--resume", tmp_path / name]) == 0
        assert "ended early: the loss has not fallen for 2 epochs" in capsys.readouterr().out
        assert [row["test_loss"] for row in RunFolder(tmp_path / name).rows()] == [row["test_loss"] for row in rows]
    assert (tmp_path / "stopped" / checkpoint.LAST).read_bytes() == last
    before = {path.name: path.read_bytes() for path in run.path.iterdir()}
    for resumed in (run.path, run.last):
        assert exits(train, ["--quiet", "--resume", resumed, "--epochs", "50"]) == 0
        assert {path.name: path.read_bytes() for path in run.path.iterdir()} == before
    assert exits(train, ["--quiet", "--resume", tmp_path / "stopped", "--patience", "3"]) == 0
    assert len(RunFolder(tmp_path / "stopped").rows()) == len(rows) + 1


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mine", "'mine' names no function: a custom callback is FILE.py:NAME"),
        ("none.py:Mine", "there is no file"),
        ("calls.py:Absent", "has no function 'Absent'"),
        ("calls.py:Other", "Other is no callback: write `class Other(nbcnn.Callback)`"),
        ("calls.py:Picky", "Picky() cannot be made without arguments: TypeError"),
        ("calls.py:Mine,calls.py:Other", "Other is no callback"),
    ],
)
def test_what_is_no_callback_is_refused_before_training(tmp_path, monkeypatch, capsys, name, words):
    monkeypatch.chdir(tmp_path)
    lines = [
        "import nbcnn",
        "class Mine(nbcnn.Callback): pass",
        "class Other: pass",
        "class Picky(nbcnn.Callback):",
        "    def __init__(self, a): pass",
    ]
    (tmp_path / "calls.py").write_text("\n".join(lines))
    assert words in message(capsys, 2, exits(train, [*QUICK, "--model", "small-autoencoder", "--callback", name, "--out", "run"]))
    assert not (tmp_path / "run").exists()


# -- settings from a file


def test_settings_come_from_a_file_and_the_command_line_goes_first(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('batch = 32\nlr = 1\n[optimisation]\nweight-decay = 1e-4\noptimizer = "adam"\n[output]\nquiet = true\nflip = false\n')
    given = train_flags.parse(["--config", str(file), "--batch", "8"])
    assert (given.batch, given.lr, given.weight_decay, given.optimizer, given.quiet, given.flip) == (8, 1.0, 1e-4, "adam", True, None)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("bacth = 3", "no setting 'bacth'; did you mean batch?"),
        ("batch = 0", "batch: 0 is below 1"),
        ("batch = [1]", "batch is one value"),
        ("quiet = 1", "quiet is true or false"),
        ("batch =", "is no TOML"),
        ('config = "a.toml"', "no setting 'config'"),
    ],
)
def test_a_wrong_setting_is_named(tmp_path, text, says, capsys):
    (tmp_path / "run.toml").write_text(text)
    assert says in message(capsys, 2, exits(train, ["--config", tmp_path / "run.toml"]))
    assert "cannot be read" in message(capsys, 2, exits(train, ["--config", tmp_path / "none.toml"]))


# -- predictions of files


def test_a_classifier_names_the_classes_of_files(own, images, tmp_path, capsys):
    words = [own / "run", images, "--mode", "cpu", "--top", "2", "--csv", tmp_path / "f.csv", "--picture", tmp_path / "f.png"]
    assert exits(predict.main, words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [str(images / f"{name}.png") for name in "abcde"]
    assert lines[0].count("%") == 2
    assert (tmp_path / "f.csv").read_text().splitlines()[0] == "image,class_1,probability_1,class_2,probability_2"
    assert (tmp_path / "f.png").stat().st_size > 1000
    assert exits(predict.main, [own / "run", images / "a.png", "--mode", "cpu", "--json"]) == 0
    said = capsys.readouterr()
    assert said.err.endswith("; 1 file\n")
    (found,) = json.loads(said.out)["images"]
    model = nbcnn.load(own / "run", mode="cpu")
    chances = model.predict_proba(pictures.read(images / "a.png", (3, 32, 32)))[0]
    assert found["classes"] == [{"class": model.classes[chances.argmax()], "probability": round(float(chances.max()), 6)}]


def test_an_autoencoder_reconstructs_files(finished, images, tmp_path, capsys):
    assert exits(predict.main, [finished, images / "a.png", "--mode", "cpu", "--quiet", "--picture", tmp_path / "f.png"]) == 0
    assert "mean squared error 0." in capsys.readouterr().out
    assert (tmp_path / "f.png").stat().st_size > 1000


def test_files_that_are_no_images_are_said_and_the_others_done(own, images, capsys):
    (images / "bad.png").write_bytes(b"no picture")
    assert exits(predict.main, [own / "run", images, "--mode", "cpu", "--quiet"]) == 3
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) == 5
    assert "bad.png: it is no image" in captured.err
    assert "there is no file or folder none" in message(capsys, 2, exits(predict.main, [own / "run", "none"]))
    (images.parent / "empty").mkdir()
    assert "no image in" in message(capsys, 2, exits(predict.main, [own / "run", images.parent / "empty"]))


def test_pictures_become_what_a_network_takes(images):
    colour = np.asarray(Image.open(images / "a.png"))
    np.testing.assert_array_equal(pictures.read(images / "a.png", (3, 40, 32)), colour.transpose(2, 0, 1))
    np.testing.assert_array_equal(pictures.read(images / "b.png", (3, 40, 32))[1], colour[..., 0])
    assert (pictures.read(images / "c.png", (3, 40, 32)) == 255).all(), "what is transparent is white"
    np.testing.assert_array_equal(pictures.read(images / "d.png", (1, 40, 32))[0], colour[..., 0])
    np.testing.assert_array_equal(pictures.read(images / "e.png", (3, 32, 40)), np.rot90(colour, -1).transpose(2, 0, 1))
    assert pictures.read(images / "a.png", (1, 8, 8)).shape == (1, 8, 8)


def test_pictures_are_fitted_as_a_data_set_of_them_is(tmp_path):
    """What a network was trained on and what it is asked about must be cut alike: scaled until it covers the size, never stretched."""
    wide = np.random.default_rng(2).integers(0, 256, (20, 60, 3)).astype(np.uint8)
    for name in ("a", "b"):
        Image.fromarray(wide).save(tmp_path / f"{name}.png")
    trained_on = datasets.load(f"folder:{tmp_path}?size=10x10").train_images[0]
    asked = pictures.read(tmp_path / "a.png", (3, 10, 10))
    np.testing.assert_array_equal(asked, trained_on)
    stripes = np.zeros((20, 60, 3), np.uint8)
    stripes[:, 20:40] = 200  # the centre alone is seen
    Image.fromarray(stripes).save(tmp_path / "a.png")
    assert (pictures.read(tmp_path / "a.png", (3, 10, 10))[:, :, 1:-1] == 200).all()


def test_features_of_files(finished, images, tmp_path, capsys):
    assert exits(extract, [finished, "--images", images, "--mode", "cpu", "--out", tmp_path / "f", "--quiet", "--batch", "2"]) == 0
    found = np.load(tmp_path / "f" / "features.npy")
    assert found.shape == (5, 8192)
    assert (tmp_path / "f" / "images.txt").read_text().splitlines() == [str(images / f"{name}.png") for name in "abcde"]
    model = nbcnn.load(finished, mode="cpu")
    picture = pictures.read(images / "b.png", (3, 32, 32))
    # Another batch size, another order of sums: a code of 1,152 terms of order 1.
    np.testing.assert_allclose(found[1], model.features(picture, at="pool2").reshape(-1), rtol=1e-4, atol=1e-5)
    capsys.readouterr()
    assert exits(extract, [finished, "--images", images / "a.png", "--mode", "cpu", "--out", tmp_path / "one"]) == 0
    said = capsys.readouterr()
    assert ", 1 file, " in said.err
    assert said.out.startswith("1 image × 8,192 features in ")
    assert "features of image files, which have no labels" in message(capsys, 3, exits(classify.main, [tmp_path / "one"]))


# -- what people met


def test_a_classifier_without_labels_is_told_a_set_that_has_some(capsys):
    text = message(capsys, 2, exits(train, ["--model", "mnist-cnn", "--dataset", "photos", "--mode", "cpu", "--limit", "4"]))
    assert "photos has no labels: --dataset digits" in text


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--lr", "inf"], "'inf' is not finite"),
        (["--warmup", "inf"], "'inf' is not finite"),
        (["--seed", "100000000000000000000000000"], "is not below 9,223,372,036,854,775,808"),
        (["--seed", "1e26"], "'1e26' is no whole number"),
    ],
)
def test_numbers_out_of_range(words, says, capsys):
    assert says in message(capsys, 2, exits(train, words))


def test_a_rate_that_diverges_in_its_only_step_says_where(capsys, tmp_path):
    words = [*TINY, "--batch", "4", "--lr", "1e10", "--warmup", "0", "--out", tmp_path / "run", "--quiet"]
    text = message(capsys, 6, exits(train, words))
    # Whether the state was kept after the step depends on how long it took.
    assert re.search(r"in the evaluation after training step 1|training step 1, first in|not in the training step 1, .*: in the evaluation", text)
    assert "steps 2 to 1" not in text


def test_a_single_step_is_one_step(capsys, tmp_path):
    assert exits(train, [*TINY, "--batch", "4", "--out", tmp_path / "run"]) == 0
    captured = capsys.readouterr()
    assert "1 training step per epoch" in captured.err
    assert "trained 1 step in" in captured.out


def test_a_disk_that_is_too_small_is_named_before_the_first_epoch(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer.shutil, "disk_usage", lambda path: SimpleNamespace(free=5_000_000))
    text = message(capsys, 1, exits(train, [*TINY, "--out", tmp_path / "run", "--quiet"]))
    assert "5,000,000 are free; nothing is trained yet" in text
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_commands_tell_their_version(capsys):
    assert exits(train, ["--version"]) == 0
    assert capsys.readouterr().out == f"{nbcnn.__version__}\n"


def test_what_ranks_do_not_share_is_not_launched(capsys):
    assert "'ls' is nothing that ranks share" in message(capsys, 2, exits(launch.main, ["--nproc", "2", "ls"]))
    with pytest.raises(UsageError, match="did you mean train"):
        launch.words(["trian"])
    assert launch.words(["train", "--seed", "1"])[1:] == ["-m", "nbcnn", "train", "--seed", "1"]
    assert launch.words(["./mine", "x"]) == ["./mine", "x"]


def test_a_mistyped_mode_is_not_told_that_there_is_no_gpu(capsys):
    assert "no mode 'cpuu'" in message(capsys, 2, exits(compare.main, ["cpu", "cpuu"]))


def test_a_run_of_the_library_is_not_for_train_py(tmp_path, capsys):
    model = nbcnn.Model([nbcnn.Conv2d(3, 3, padding=1)], loss="mse", mode="cpu")
    model.fit(np.zeros((4, 3, 8, 8), np.uint8), epochs=1, batch_size=4, run=tmp_path / "run", verbose=0)
    for command in ([train, "--resume", tmp_path / "run"], [extract, tmp_path / "run", "--out", tmp_path / "f"]):
        assert "was made by Model.fit with arrays" in message(capsys, 3, exits(command[0], command[1:]))


ELSEWHERE = """
import asyncio  # which filelock imports, and whose form for this system takes what goes here
import multiprocessing.popen_fork, os, pathlib, signal, sys, types

# How the standard library itself ends a process here is its own business: on Windows it does so without signals.
multiprocessing.popen_fork.signal = types.SimpleNamespace(**vars(signal))
for module, names in ((os, ("sysconf", "sched_getaffinity", "fork", "killpg", "getuid")), (signal, ("SIGKILL", "SIGHUP", "pthread_sigmask"))):
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
for name in ("fcntl", "resource", "pwd", "numba", "numba_cuda"):
    sys.modules[name] = None
# psutil itself takes what Linux has; elsewhere it takes what is there.
sys.modules["psutil"] = types.SimpleNamespace(virtual_memory=lambda: types.SimpleNamespace(available=1 << 32))
exists = pathlib.Path.exists
pathlib.Path.exists = lambda self, **more: not str(self).startswith("/proc") and exists(self, **more)
read = pathlib.Path.read_text
def read_text(self, *given, **more):
    if str(self).startswith(("/proc", "/sys")):
        raise FileNotFoundError(2, "not on this system", str(self))
    return read(self, *given, **more)
pathlib.Path.read_text = read_text
if __name__ == "__main__":  # a process that multiprocessing spawns loses the same, and does what it is told
    from nbcnn.__main__ import main
    sys.exit(main(sys.argv[1:]))
"""


def test_the_cpu_mode_needs_nothing_of_unix(tmp_path):
    """What macOS or Windows lack is taken away; a run is trained there, and its network applied."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def run(*words):
        command = [sys.executable, tmp_path / "elsewhere.py", *map(str, words)]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    (tmp_path / "elsewhere.py").write_text(ELSEWHERE)
    (tmp_path / "my_model.py").write_text(MODEL_FILE)
    run("train", *QUICK[:8], "--epochs", "1", "--quiet", "--model", "my_model.py:layers", "--out", "run")
    Image.fromarray(np.zeros((32, 32, 3), np.uint8)).save(tmp_path / "a.png")
    assert "%" in run("predict", "run", "a.png")


@pytest.mark.full
def test_features_svm_and_ladder_need_nothing_of_unix(tmp_path):
    """Without Unix's calls: the machine's pairs are trained in two processes, a rung is timed, and what ranks do not share is refused."""
    (tmp_path / "elsewhere.py").write_text(ELSEWHERE)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def run(*words, code=0):
        command = [sys.executable, tmp_path / "elsewhere.py", *map(str, words)]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == code, done.stderr[-2000:]
        return done.stdout if code == 0 else done.stderr

    run("train", *TINY, "--limit", "40", "--batch", "20", "--out", "run", "--quiet")
    run("extract", "run", "--mode", "cpu", "--out", "features", "--quiet")
    assert "40 training and 40 test images" in run("classify", "features", "--device", "cpu", "--jobs", "2", "--quiet")
    assert "report.html" in run("report", "run")
    assert "'ls' is nothing that ranks share" in run("launch", "--nproc", "2", "ls", code=2)
    lines = (
        "import sys; sys.modules['resource'] = None",
        "from nbcnn.gpu import memory; memory._STATUS = memory._STATUS / 'none'",
        "from nbcnn.lab.measure import rung; assert rung.memory.peak() is None",
    )
    subprocess.run([sys.executable, "-c", "\n".join(lines)], env=environment, check=True, timeout=120)


def test_a_study_without_a_gpu_names_its_assumed_ceilings(capsys):
    assert exits(study_dwconv.main, ["--no-step", "--no-times", "--shapes", "8x8x16x4"]) == 0
    said = "".join(capsys.readouterr())
    assert "ceilings assumed: 67 TFLOP/s, 4.3 TB/s (an H200's where no flag says otherwise: --tflops, --tbs)" in said
    assert exits(study_dwconv.main, ["--no-step", "--no-times", "--shapes", "8x8x16x4", "--tflops", "15.6", "--tbs", "1.5"]) == 0
    assert "15.6 TFLOP/s, 1.5 TB/s (as given)" in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("mode", "precision", "capability", "timed"),
    [
        ("tensorcore", "fp16", (8, 0), None),
        ("tensorcore", None, (7, 5), None),
        ("tensorcore", None, (8, 0), None),
        ("tensorcore", "tf32", (8, 0), "tf32"),
        ("tensorcore", "tf32", (7, 5), "fp32"),
        ("cudacore", None, (7, 5), "fp32"),
    ],
)
def test_a_step_is_beside_pytorchs_where_pytorchs_has_its_precision(monkeypatch, capsys, mode, precision, capability, timed):
    from nbcnn.lab.peers import forecast as peers
    from nbcnn.lab.studies import forecast_step

    monkeypatch.setattr("nbcnn.gpu.device.gpu_missing", lambda: None)
    monkeypatch.setattr("nbcnn.run.rows.capability_of_gpu", lambda: capability)
    monkeypatch.setattr(study_dwconv, "_torch", lambda flags: True)
    monkeypatch.setattr(forecast_step, "measure", lambda *_, forms, **__: forms)
    flags = study_dwconv.parser().parse_args(["--json", "--mode", mode, *(["--precision", precision] if precision else [])])
    flags.batch, flags.padding, flags.share = 4, "causal", 0.32
    assert study_dwconv._steps(flags, [], lambda steps: None) == (peers.FORMS if timed else ())
    assert not timed or timed in peers.TOLERANCE
    assert ("is timed alone" in capsys.readouterr().err) == (timed is None)


def test_a_checkpoint_of_an_earlier_version_is_loaded_by_its_config(copied, tmp_path):
    """Earlier checkpoints do not say which network they are of; the config.json beside them does."""
    whole = nbcnn.load(copied, mode="cpu")
    tensors, metadata = checkpoint.load(copied / checkpoint.LAST)
    checkpoint.save(copied / checkpoint.LAST, tensors, {name: value for name, value in metadata.items() if name != "network"})
    x = np.zeros((1, 3, 32, 32), np.uint8)
    np.testing.assert_array_equal(nbcnn.load(copied, mode="cpu").predict(x), whole.predict(x))
    assert exits(extract, [copied, "--out", tmp_path / "f", "--mode", "cpu", "--quiet"]) == 0
    assert exits(train, ["--resume", copied, "--epochs", "2", "--quiet"]) == 0
    assert nbcnn.load(copied, mode="cpu", checkpoint="best").layers == whole.layers
