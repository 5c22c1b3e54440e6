"""Tests of two commands and one folder: the second is refused, default names differ, and what is recorded is what was read."""

from __future__ import annotations

import hashlib
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
from scripts import TINY, exits, extract, message, train

from nbcnn.classify.features import read_features
from nbcnn.cli import train_run
from nbcnn.files import lock
from nbcnn.train import checkpoint
from nbcnn.train.checkpoint import BEST, LAST
from nbcnn.train.trainer import Trainer


@pytest.mark.parametrize("words", [["--resume"], ["--resume", "--epochs", "2"], [*TINY, "--out"]])
def test_a_second_training_of_a_folder_is_refused(copied, tmp_path, words, capsys):
    folder = copied if "--resume" in words else tmp_path / "new"
    folder.mkdir(exist_ok=True)
    at = max(words.index(word) for word in ("--resume", "--out") if word in words) + 1
    with lock.writing(folder):
        before = {file.name: file.read_bytes() for file in folder.iterdir()}
        text = message(capsys, 2, exits(train, ["--quiet", *words[:at], folder, *words[at:]]))
        assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    assert f"is writing in {folder}; wait until it is done, or choose another folder" in text


def test_a_folder_that_was_taken_meanwhile_is_not_written_over(copied, tmp_path):
    start = train_run.Start(SimpleNamespace(), train_run.RunFolder(copied))
    with ExitStack() as held, pytest.raises(ValueError, match="is there already"):
        train_run.claimed(start, SimpleNamespace(name="shapes", short="shapes"), "cpu", held)


def test_default_folders_never_collide(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda _: "20260101-120000")

    def claim(_):
        with ExitStack() as held:
            return str(train_run.claimed(train_run.Start(SimpleNamespace()), SimpleNamespace(name="shapes", short="shapes"), "cpu", held).path)

    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(claim, range(8)))
    assert sorted(made) == [f"runs/20260101-120000-shapes-cpu{number}" for number in ("", *(f"-{n}" for n in range(2, 9)))]


def test_a_second_extraction_into_a_folder_is_refused(finished, tmp_path, capsys):
    out = tmp_path / "f"
    out.mkdir()
    with lock.writing(out):
        text = message(capsys, 2, exits(extract, [finished, "--limit", "2", "--out", out, "--mode", "cpu", "--quiet"]))
        assert sorted(file.name for file in out.iterdir()) == [lock.WRITER, f"{lock.WRITER}.lock"]
    assert f"is writing in {out}" in text


def test_features_name_the_checkpoint_that_they_were_made_from(copied, tmp_path, monkeypatch):
    loaded, real = hashlib.sha256((copied / LAST).read_bytes()).hexdigest(), checkpoint.read

    def read(path):
        saved = real(path)
        # As a training does that saves at this moment.
        checkpoint.save(copied / LAST, saved.tensors | {"sums": saved.tensors["sums"] + 1}, saved.metadata)
        return saved

    monkeypatch.setattr(checkpoint, "read", read)
    assert exits(extract, [copied, "--limit", "2", "--out", tmp_path / "f", "--mode", "cpu", "--quiet"]) == 0
    assert read_features(tmp_path / "f").origin.checkpoint_sha256 == loaded
    assert hashlib.sha256((copied / LAST).read_bytes()).hexdigest() != loaded
    assert (copied / BEST).exists()


def test_a_run_that_was_killed_between_the_two_checkpoints_of_its_first_epoch_is_continued(tmp_path, monkeypatch, capsys):
    words = [*TINY[:-1], "2", "--quiet", "--out"]
    assert exits(train, [*words, tmp_path / "whole"]) == 0
    real = Trainer._save

    def save(self, tensors, path):
        if path.name == LAST:
            raise MemoryError("no room")
        real(self, tensors, path)

    monkeypatch.setattr(Trainer, "_save", save)
    run = tmp_path / "run"
    assert exits(train, [*words, run]) == 5
    assert (run / BEST).exists()
    assert not (run / LAST).exists()
    monkeypatch.setattr(Trainer, "_save", real)
    assert exits(train, ["--resume", run, "--quiet"]) == 0
    found, wanted = (checkpoint.load(folder / LAST)[0] for folder in (run, tmp_path / "whole"))
    assert {name: tensor.tobytes() for name, tensor in found.items()} == {name: tensor.tobytes() for name, tensor in wanted.items()}
    # With more epochs behind the best one, nobody takes it for the last.
    (run / LAST).unlink()
    rows = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join([*rows, rows[-1]]) + "\n")
    assert exits(train, ["--resume", run, "--quiet"]) == 3
    assert "there is no checkpoint" in capsys.readouterr().err
