"""Tests of `nbcnn pipeline`: features in memory give the results of three commands, and a pipeline that is started again continues."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
from scripts import ROOT, exits, extract, message

from nbcnn.classify import classifier, kept
from nbcnn.classify.features import Origin, read_features
from nbcnn.cli import classify, part, pipeline, pipeline_job, train
from nbcnn.datasets import DataMissing
from nbcnn.files import lock
from nbcnn.gpu.language import SIMULATOR
from nbcnn.train import checkpoint, plots
from nbcnn.train.trainer import Trainer

TINY = ["--dataset", "shapes", "--model", "small-autoencoder", "--mode", "cpu", "--limit", "8", "--batch", "4"]


def run(out, *words):
    return exits(pipeline.main, [*TINY, "--epochs", "1", "--out", out, *words])


@pytest.fixture
def undrawn(monkeypatch):
    """Pictures are not drawn: they take most of the time of so small a pipeline."""
    for name in ("curves", "reconstructions", "confusion"):
        monkeypatch.setattr(plots, name, lambda *_: None)


def not_again(*_, **__):
    pytest.fail("this part was done before")


@pytest.fixture(scope="module")
def piped(tmp_path_factory):
    """The folder of a pipeline that has ended, with mirrored images and without files of features."""
    out = tmp_path_factory.mktemp("pipeline") / "out"
    assert run(out, "--mirror", "--quiet") == 0
    assert {path.name for path in (out / "run").glob("*.png")} == {"curves.png", "reconstructions.png"}
    assert (out / "features" / "classify" / "confusion.png").is_file()
    return out


def test_what_killed_pipelines_have_left_is_removed_at_the_next_start(piped, tmp_path, undrawn):
    out = shutil.copytree(piped, tmp_path / "out")
    begun = json.loads((out / "pipeline.json").read_text())
    begun.pop("report")  # as where it was killed in the last of its parts
    (out / "pipeline.json").write_text(json.dumps(begun))
    for place in (".pipeline.json", "run/.config.json", "features/classify/.classifier.safetensors"):
        (out / f"{place}.99-0a1b2c3d.tmp").write_text("half")
    with lock.writing(out), pytest.raises(lock.Held):
        pipeline_job.Job([], [], None, [], out).claim()
    assert exits(pipeline.main, ["--resume", out, "--quiet"]) == 0
    assert not list(out.rglob(".*"))


def test_what_a_pipeline_has_left_that_was_killed_behind_its_features_is_removed(tmp_path, undrawn, monkeypatch):
    out, real = tmp_path / "out", classify.run
    monkeypatch.setattr(classify, "run", lambda *_: (_ for _ in ()).throw(MemoryError("no room")))
    assert run(out, "--keep-features", "--quiet") == 5
    (out / "features" / f"{lock.WRITER}.lock").touch()
    owner = json.dumps({**lock._myself(), "pid": 1 << 30})
    (out / "features" / lock.WRITER).write_text(owner)
    monkeypatch.setattr(classify, "run", real)
    assert exits(pipeline.main, ["--resume", out, "--quiet"]) == 0
    assert not list(out.rglob(".*"))


def results(out):
    return json.loads((out / "features" / "classify" / "classify.json").read_text())


def test_results_are_those_of_the_three_commands(piped, tmp_path, capsys, undrawn):
    found = results(piped)
    assert not list((piped / "features").glob("*.json")) + list((piped / "features").glob("*.npy"))
    with pytest.raises(classifier.ClassifierError, match="needs the features"):
        classifier.load(found["model"])
    # The same files on demand.
    assert exits(extract, [piped / "run", "--out", piped / "features", "--mirror", "--mode", "cpu", "--quiet"]) == 0
    features = read_features(piped / "features")
    assert found["features_sha256"] == features.sha256
    loaded = classifier.load(found["model"])
    assert exits(classify.main, [str(piped / "features"), "--out", str(tmp_path), "--device", "cpu", "--quiet"]) == 0
    again = json.loads((tmp_path / "classify.json").read_text())
    for row in (found["classifiers"]["encoder"], again["classifiers"]["encoder"]):
        row.pop("seconds")
    differing = {name for name in found if found[name] != again[name]}
    assert differing == {"model", "confusion_matrix"}
    assert loaded.mirrored
    assert (loaded.predict(features.test, features.test_mirrored) == loaded.classes[0]).mean() < 1
    for path in (piped / "features").glob("*.*"):
        path.unlink()


def test_a_pipeline_that_has_ended_tells_its_report_again(piped, capsys, monkeypatch):
    for module, name in ((train, "train"), (classify, "run")):
        monkeypatch.setattr(module, name, not_again)
    assert run(piped, "--mirror") == 0
    out = capsys.readouterr().out
    assert "16 images × 256, and as many of the mirrored images, not kept on disk" in out
    assert "true class" in out
    assert f"next: python -m nbcnn report {piped / 'run'} --features {piped / 'features'}" in out
    assert exits(pipeline.main, ["--resume", piped, "--json", "--quiet"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    told = json.loads(line)
    assert told["train"]["epochs"] == 1
    assert told["features"]["sha256"] == results(piped)["features_sha256"] == told["classify"]["features_sha256"]
    assert told["seconds"]["total"] >= told["seconds"]["train"] > 0


@pytest.mark.full
def test_features_that_are_there_are_taken_if_their_hashes_fit(tmp_path, capsys, monkeypatch, undrawn):
    out, ran = tmp_path / "out", classify.run
    monkeypatch.setattr(classify, "run", lambda *_: (_ for _ in ()).throw(MemoryError("no room")))
    assert run(out, "--keep-features", "--baselines") == 5
    err = capsys.readouterr().err
    assert f"continue with\n  python -m nbcnn pipeline --resume {out}" in err
    assert "1 of 3: training" in err
    sha256 = read_features(out / "features").sha256
    content = (out / "features" / "test_features.npy").read_bytes()
    monkeypatch.setattr(classify, "run", ran)
    monkeypatch.setattr(train, "train", not_again)
    assert exits(pipeline.main, ["--resume", out, "--verbose"]) == 0
    told = capsys.readouterr()
    assert f"the features in {out / 'features'} are those of this checkpoint" in told.err
    assert "where the time went\n  train " in told.err
    assert "raw pixels" in told.out
    assert results(out)["features_sha256"] == sha256
    # Changed bytes are noticed, and the features are extracted again; the baselines are asked for no more, so there is another report.
    (out / "features" / "test_features.npy").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert run(out, "--keep-features") == 0
    assert "they are extracted again" in capsys.readouterr().err
    assert (out / "features" / "test_features.npy").read_bytes() == content
    # Another flag of the training is another pipeline.
    assert "--lr 0.5 cannot change in a resumed run" in message(capsys, 2, run(out, "--lr", "0.5"))
    assert "--lr" not in json.loads((out / "pipeline.json").read_text())["words"]


@pytest.mark.full
def test_an_interrupted_training_continues(tmp_path, capsys, monkeypatch, undrawn):
    words = ["--epochs", "2", "--quiet"]
    monkeypatch.setattr(classify, "run", lambda args, team, mine, given: mine.results({"features_sha256": given[-1]()}, "", False) or 0)
    assert exits(pipeline.main, [*TINY, *words, "--out", tmp_path / "whole"]) == 0
    finish = Trainer._finish_epoch
    monkeypatch.setattr(Trainer, "_finish_epoch", lambda self, interrupts: signal.raise_signal(signal.SIGINT) or finish(self, interrupts))
    assert exits(pipeline.main, [*TINY, *words, "--out", tmp_path / "out"]) == 130
    assert f"continue with\n  python -m nbcnn pipeline --resume {tmp_path / 'out'}" in capsys.readouterr().out
    monkeypatch.setattr(Trainer, "_finish_epoch", finish)
    assert exits(pipeline.main, [*TINY, *words, "--out", tmp_path / "out"]) == 0
    whole, resumed = (checkpoint.load(tmp_path / name / "run" / checkpoint.LAST)[0] for name in ("whole", "out"))
    for name, tensor in whole.items():
        np.testing.assert_array_equal(resumed[name], tensor)


@pytest.mark.parametrize(
    ("words", "code", "reason"),
    [
        (["--dataset", "photos"], 3, "photos has no labels"),
        (["--baselines", "--at", "conv1"], 2, "--baselines are of the code"),
        (["--search", "lambda"], 2, "--search lambda is not of --machine svm"),
        (["--explain"], 2, "--explain is of train alone"),
        (["--resume", "nowhere"], 2, "exclude each other"),
    ],
)
def test_what_could_not_be_finished_is_not_begun(tmp_path, words, code, reason, capsys):
    assert reason in message(capsys, code, run(tmp_path / "out", *words))
    assert not (tmp_path / "out").exists()


def test_a_folder_without_a_pipeline_is_neither_resumed_nor_overwritten(tmp_path, capsys):
    assert "holds no pipeline to resume" in message(capsys, 3, exits(pipeline.main, ["--resume", tmp_path]))
    (tmp_path / "pipeline.json").write_text('{"format": "another"}')
    assert "holds no pipeline to resume" in message(capsys, 3, exits(pipeline.main, ["--resume", tmp_path]))
    (tmp_path / "pipeline.json").unlink()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("mine")
    assert "is there already" in message(capsys, 2, run(tmp_path, "--quiet"))
    assert (tmp_path / "run" / "config.json").read_text() == "mine"


# On a GPU

COMPILED_AHEAD = """
import sys
from pathlib import Path
from types import SimpleNamespace
import numpy as np
import played_driver

played_driver.install()
together, alone = played_driver.compile_nothing()
from nbcnn.cli import pipeline, train_flags
from nbcnn.cli.part import Behind
from nbcnn.nn import models
from nbcnn.run.net import Net

layers = models.MODELS["autoencoder"](3, 32, 32)
net = Net(layers, (3, 32, 32), mode="tensorcore")
images = np.zeros((600, 3, 32, 32), np.uint8)
data = SimpleNamespace(layers=layers, shape=images.shape[1:], train=images, test=images[:100], labels=np.arange(600) % 10)
own, rest = pipeline.parser().parse_known_args(["--mirror"])
behind = Behind()
for compiled in (0, 1):
    pipeline._compile_ahead(pipeline.Job(own, rest, train_flags.parse(rest), [], Path("out")), behind, net, data, compiled)
    behind.wait()
    print(len(together))
encoder = Net(models.encoder(layers, "pool2"), images.shape[1:], mode="tensorcore")
for part in (data.train, data.test):
    for block in encoder.predict_batches(part):
        pass
print(len(together), *alone)
"""


@pytest.mark.full  # plans for a GPU, which is played
@pytest.mark.skipif(SIMULATOR, reason="the simulator compiles nothing")
def test_what_the_next_parts_launch_is_compiled_beside_a_training_that_had_to_compile(tmp_path):
    tmp_path.chmod(0o700)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]), "NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", COMPILED_AHEAD], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    warm, cold, extracted = done.stdout.splitlines()
    assert warm == "0"
    assert int(cold) >= 15
    assert extracted == cold, "the encoder launches a kernel that was not compiled before"


# What the parts share

ORIGIN = Origin("run", "c", "0" * 64, "digits", "here", ("a", "b"), (1, 2, 2), (3,), "cpu", None)


def test_rows_in_memory_come_in_order_and_are_given_out_once():
    rows = [kept.Rows(name, 3, 2) for name in ("train", "test")]
    with pytest.raises(ValueError, match="row 0 of"):
        rows[0].write(1, np.zeros((1, 2), np.float32))
    for each in rows:
        each.write(0, np.ones((2, 2), np.float32))
        each.write(2, np.zeros((1, 2), np.float32))
    with pytest.raises(ValueError, match="row 3 of"):
        rows[0].write(3, np.zeros((1, 2), np.float32))
    with kept.Kept(ORIGIN, (np.arange(3, dtype=np.int32), np.zeros(3, np.int32)), rows) as features:
        (arrays,), *_ = features.opened()
        np.testing.assert_array_equal(arrays[0], [[1, 1], [1, 1], [0, 0]])
        with pytest.raises(AssertionError, match="taken out"):
            features.opened()
    with pytest.raises(DataMissing, match="no labels"):
        kept.Kept(ORIGIN, (None, None), rows).opened()


def test_work_behind_is_done_in_order_and_its_error_waits():
    done, gate, behind = [], threading.Event(), part.Behind()
    behind.do(gate.wait, 30)
    behind.do(done.append, 1)
    behind.do(lambda: (_ for _ in ()).throw(OSError("disk full")))
    behind.do(done.append, 2)
    assert done == []
    gate.set()
    with pytest.raises(OSError, match="disk full"):
        behind.wait()
    assert done == [1, 2]
