"""Tests of extract_features.py: what it writes, what it says, and what an interrupt leaves behind."""

from __future__ import annotations

import json
import signal
from types import SimpleNamespace

import numpy as np
import pytest
from scripts import TINY, exits, extract, message, train

from nbcnn import datasets
from nbcnn.classify.features import read_features
from nbcnn.cli import describe
from nbcnn.cli.extract import noted_precision
from nbcnn.nn.models import autoencoder, encoder
from nbcnn.run import rows
from nbcnn.run.net import Net
from nbcnn.train import checkpoint, saved_net
from nbcnn.train.checkpoint import BEST, LAST
from nbcnn.train.runlog import RunFolder


def test_extracted_features_are_those_of_the_trained_encoder(finished, tmp_path, capsys):
    assert exits(extract, [finished, "--limit", "3", "--out", tmp_path / "f", "--batch", "2", "--mode", "cpu"]) == 0
    captured = capsys.readouterr()
    assert "6 images × 8,192 features" in captured.out
    assert "without writing to disk" in captured.out
    features = read_features(tmp_path / "f")
    data = datasets.load("shapes", limit=3)
    net = Net(encoder(autoencoder(), "pool2"), (3, 32, 32), mode="cpu")
    tensors, _ = checkpoint.load(finished / LAST)
    net.params.load_dict({name: tensors[f"param.{name}"] for name in net.params.names})
    np.testing.assert_array_equal(features.test, net.predict(data.test_images, batch=2).reshape(3, -1))
    np.testing.assert_array_equal(features.train_labels, data.train_labels)
    assert (features.origin.dataset, features.origin.checkpoint, features.origin.code_shape) == ("shapes", LAST, (128, 8, 8))
    assert features.origin.model == "autoencoder"


def test_features_as_csv_and_json(finished, tmp_path, capsys):
    out = tmp_path / "f"
    assert (
        exits(extract, [finished, "--limit", "2", "--out", out, "--format", "csv", "--checkpoint", "best", "--mode", "cpu", "--json", "--quiet"]) == 0
    )
    captured = capsys.readouterr()
    assert captured.err == ""
    assert json.loads(captured.out)["images"] == 4
    assert len((out / "features_train.csv").read_text().splitlines()) == 2


def test_mirrored_images_have_features_of_their_own(finished, tmp_path, capsys):
    out = tmp_path / "f"
    words = [finished, "--limit", "3", "--out", out, "--batch", "2", "--mode", "cpu", "--quiet"]
    assert exits(extract, [*words, "--mirror"]) == 0
    assert "and as many of the mirrored images" in capsys.readouterr().out
    features, data = read_features(out), datasets.load("shapes", limit=3)
    saved = checkpoint.read(finished / LAST)
    net = saved_net.encoder(saved, "pool2", "cpu", None, None)
    for found, images in ((features.train_mirrored, data.train_images), (features.test_mirrored, data.test_images)):
        np.testing.assert_array_equal(found, net.predict(np.ascontiguousarray(images[..., ::-1]), batch=2).reshape(3, -1))
    # Damage of the second set is found like that of the first.
    content = bytearray((out / "test_mirrored.npy").read_bytes())
    content[-1] ^= 1
    (out / "test_mirrored.npy").write_bytes(content)
    with pytest.raises(datasets.DataCorrupt, match=r"test_mirrored\.npy.*SHA-256"):
        read_features(out)
    # Extracted again without them, the folder is what earlier versions wrote.
    assert exits(extract, words) == 0
    assert json.loads((out / "features.json").read_text())["version"] == 1
    assert not list(out.glob("*_mirrored.npy"))
    assert read_features(out).train_mirrored is None
    text = message(capsys, 2, exits(extract, [*words, "--mirror", "--format", "csv"]))
    assert "--mirror is for a run's data set, stored as npy" in text


def test_a_missing_checkpoint_names_the_other(copied, capsys):
    (copied / BEST).unlink()
    text = message(capsys, 3, exits(extract, [copied, "--checkpoint", "best", "--mode", "cpu", "--limit", "2"]))
    assert f"the last good one is {copied / LAST}" in text


def test_a_folder_that_cannot_be_made_is_exit_1(finished, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    words = [finished, "--limit", "2", "--mode", "cpu", "--quiet", "--out", tmp_path / "file" / "out"]
    assert "cannot make this folder (Not a directory); choose another with --out" in message(capsys, 1, exits(extract, words))


def test_the_last_words_fit_the_data(finished, tmp_path, capsys):
    assert exits(extract, [finished, "--limit", "2", "--out", tmp_path / "f", "--mode", "cpu"]) == 0
    assert f"next: python -m nbcnn classify {tmp_path / 'f'} --baselines\n" in capsys.readouterr().out
    assert exits(extract, [finished, "--limit", "2", "--out", tmp_path / "g", "--mode", "cpu", "--at", "pool1"]) == 0
    assert f"next: python -m nbcnn classify {tmp_path / 'g'}\n" in capsys.readouterr().out, "controls are known at the model's code alone"
    assert exits(train, ["--dataset", "photos", *TINY[2:], "--out", tmp_path / "run", "--quiet"]) == 0
    assert exits(extract, [tmp_path / "run", "--limit", "2", "--out", tmp_path / "f", "--mode", "cpu"]) == 0
    assert capsys.readouterr().out.endswith("photos has no labels to classify by\n")


def test_termination_leaves_no_temporary_file(finished, tmp_path, monkeypatch):
    from nbcnn.cli import extract as module

    monkeypatch.setattr(module, "write_split", lambda *_: signal.raise_signal(signal.SIGTERM))
    assert exits(module.main, [finished, "--limit", "2", "--out", tmp_path / "f", "--mode", "cpu", "--quiet"]) == 143
    assert not list((tmp_path / "f").iterdir())


def test_a_gpu_mode_says_that_it_compiles_first():
    assert describe.compiling(SimpleNamespace(mode="cpu")) == ""
    assert "compiling them at the first start" in describe.compiling(SimpleNamespace(mode="cudacore"))


@pytest.mark.parametrize(
    ("config", "missing"),
    [
        ("{}", "'model' is missing in its 'flags'"),
        ("[]", "'model' is missing in its 'flags'"),
        ('{"flags": {"model": "autoencoder", "data_dir": "data"}, "data": {}}', "'name' is missing in its 'data'"),
    ],
)
def test_a_damaged_config_exits_3(copied, config, missing, capsys):
    (copied / "config.json").write_text(config)
    assert missing in message(capsys, 3, exits(extract, [copied, "--limit", "2", "--mode", "cpu"]))
    assert missing in message(capsys, 3, exits(train, ["--resume", copied]))


@pytest.mark.parametrize(
    ("part", "name", "value", "says"),
    [
        ("flags", "model", "autoencodes", 'it says model "autoencodes", the checkpoint "autoencoder"'),
        ("flags", "model", ["autoencoder"], "flags.model must be string"),
        ("flags", "data_dir", 3, "flags.data_dir must be string"),
        ("data", "name", "shapez", "it says data shapez, the checkpoint shapes"),
        ("data", "name", {}, "data.name must be string"),
    ],
)
def test_a_config_with_another_value_exits_3(copied, part, name, value, says, capsys):
    config = json.loads((copied / "config.json").read_text())
    config[part][name] = value
    (copied / "config.json").write_text(json.dumps(config))
    assert says in message(capsys, 3, exits(extract, [copied, "--limit", "2", "--mode", "cpu"]))
    assert says in message(capsys, 3, exits(train, ["--resume", copied]))


def test_a_deeply_nested_config_exits_3(copied, capsys):
    (copied / "config.json").write_text('{"flags":' * 50_000)
    assert "more than 64 deep" in message(capsys, 3, exits(extract, [copied, "--limit", "2", "--mode", "cpu"]))


def test_a_model_without_a_code_is_refused(copied, capsys):
    config = json.loads((copied / "config.json").read_text())
    config["flags"]["model"] = "s4convd"
    (copied / "config.json").write_text(json.dumps(config))
    tensors, metadata = checkpoint.load(copied / LAST)
    flags = json.dumps(json.loads(metadata["flags"]) | {"model": "s4convd"})
    checkpoint.save(copied / LAST, tensors, metadata | {"model": "s4convd", "flags": flags})
    text = message(capsys, 2, exits(extract, [copied, "--limit", "2", "--mode", "cpu"]))
    assert "which layer of model 's4convd' makes a code is not known" in text


@pytest.mark.parametrize("saved", ["fp32", "bf16", None])
def test_features_are_made_in_a_precision_that_the_mode_has(finished, saved):
    config = RunFolder(finished).read_config()
    config = {name: value for name, value in config.items() if name != "precision"} | ({"precision": saved} if saved else {})
    shape = tuple(config["data"]["image_shape"])
    saved = checkpoint.read(RunFolder(finished).last)
    net = saved_net.encoder(saved, "pool2", "cpu", None, noted_precision(saved, config), shape)
    assert net.precision == "fp32"


def test_the_checkpoint_knows_the_precision_of_a_resumed_run(finished, monkeypatch):
    asked, config = [], RunFolder(finished).read_config()
    choose = rows.choose_mode
    monkeypatch.setattr(rows, "choose_mode", lambda mode, precision, *rest, **more: asked.append(precision) or choose(mode, precision, *rest, **more))
    saved = checkpoint.read(RunFolder(finished).last)
    saved_net.encoder(saved, "pool2", "cpu", None, noted_precision(saved, config | {"precision": "bf16"}))
    assert set(asked) == {"fp32"}


def test_a_precision_that_the_mode_lacks_is_refused_when_asked_for(finished, capsys):
    assert exits(extract, [finished, "--mode", "cpu", "--precision", "bf16"]) == 2
    assert "mode cpu has no precision 'bf16'" in capsys.readouterr().err
