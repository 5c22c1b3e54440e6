"""Tests that checkpoint, config.json and metrics belong together: what was edited, swapped or lost is noticed, or made whole, before a run goes
on."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from scripts import TINY, exits, extract, message, train

from nbcnn.cli.errors import message as message_of
from nbcnn.files import atomic
from nbcnn.nn.activations import ReLU
from nbcnn.nn.layers import Conv2d
from nbcnn.nn.losses import MSE
from nbcnn.nn.optim import SGD, learning_rates
from nbcnn.run import blas
from nbcnn.run.net import Net
from nbcnn.run.session import TrainingSession
from nbcnn.train import checkpoint
from nbcnn.train.checkpoint import BEST, LAST, CheckpointError
from nbcnn.train.events import Callback
from nbcnn.train.runlog import RunError, RunFolder
from nbcnn.train.trainer import Diverged, Trainer

RESUME = ["--quiet", "--resume"]
EPOCHS = 2


def made(folder, epochs=EPOCHS):
    """A trainer of a small network, two training steps per epoch."""
    images = np.random.default_rng(1).integers(0, 256, (4, 3, 6, 6), np.uint8)
    net = Net([Conv2d(4, 3, padding=1, in_channels=3), ReLU(), Conv2d(3, 3, padding=1, in_channels=4), MSE()], (3, 6, 6), mode="cpu")
    table = learning_rates("constant", 0.2, epochs * 2)
    session = TrainingSession(net, images, optimizer=SGD(), learning_rates=table, batch=2, test_images=images)
    return Trainer(session, folder, learning_rates=table, identity={"data": "noise"})


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The folder of a finished training of the small network; in it, first.safetensors is what checkpoint-last was after the first epoch."""
    folder = tmp_path_factory.mktemp("small") / "run"
    real = checkpoint.save

    def save(path, tensors, metadata):
        if metadata["epochs_done"] == "1":
            real(path.with_name("first.safetensors"), tensors, metadata)
        return real(path, tensors, metadata)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "save", save)
        made(folder).fit()
    return folder


@pytest.fixture
def run(small, tmp_path):
    """A copy of it, to be spoilt."""
    return shutil.copytree(small, tmp_path / "run")


@pytest.fixture
def stopped(run):
    """A copy of it as it was after its first epoch."""
    (run / "first.safetensors").rename(run / LAST)
    RunFolder(run).rewrite(RunFolder(run).rows()[:1])
    return run


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def ends(folder):
    """What must be the same at the end of two runs: tensors, and metrics without times."""
    tensors, _ = checkpoint.load(folder / LAST)
    rows = [(row["epoch"], row["step"], row["learning_rate"], row["train_loss"], row["test_loss"]) for row in RunFolder(folder).rows()]
    return {name: tensor.tobytes() for name, tensor in tensors.items()}, rows


def resumed(folder, **options):
    """Resume and go on to the end; what was told."""
    trainer = made(folder, **options)
    told = trainer.resume(trainer.run.last, new_epochs="epochs" in options)
    trainer.fit()
    return told


class Leaves(Callback):
    """Ends the program at the first reading of the loss."""

    def reading(self, trainer, reading):
        raise KeyboardInterrupt


class Ends(Callback):
    """Ends the training before it goes on."""

    def begin(self, trainer):
        trainer.stop("enough")


@pytest.mark.parametrize(("name", "epochs"), [(LAST, EPOCHS), (LAST, 3), ("first.safetensors", EPOCHS), ("first.safetensors", 3)])
def test_a_resumed_run_that_a_callback_ends_at_once_stays_as_it_is(run, name, epochs):
    before, trainer = contents(run), made(run, epochs)
    trainer.callbacks = (Ends(),)
    trainer.resume(run / name, new_epochs=True)
    assert not trainer.fit().interrupted
    assert contents(run) == before


def edit(folder, **flags):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"flags": config["flags"] | flags}))


# -- config.json


@pytest.mark.parametrize(
    ("flag", "value"),
    [("seed", 5), ("lr", 0.5), ("schedule", "constant"), ("loss", "rmsle"), ("flip", True), ("epochs", 3), ("batch", "2"), ("tune", True)],
)
def test_an_edited_flag_is_refused(copied, flag, value, capsys):
    edit(copied, **{flag: value})
    before = contents(copied)
    text = message(capsys, 3, exits(train, [*RESUME, copied]))
    assert f"does not belong to {copied / LAST}: it says {flag} " in text
    assert "does not belong to" in message(capsys, 3, exits(extract, [copied, "--mode", "cpu", "--limit", "2", "--out", copied / "f"]))
    assert contents(copied) == before


@pytest.mark.parametrize("name", ["photos", "shxpes"])
def test_another_data_set_in_the_config_is_refused(copied, name, capsys):
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"data": config["data"] | {"name": name}}))
    assert f"it says data {name}, the checkpoint shapes" in message(capsys, 3, exits(train, [*RESUME, copied]))
    for saved in (LAST, BEST):
        (copied / saved).unlink()
    says = "no description of a run: there is no data set" if name != "photos" else None
    if says:
        assert says in message(capsys, 3, exits(train, [*RESUME, copied]))


def test_another_runs_checkpoint_is_refused(copied, capsys):
    tensors, metadata = checkpoint.load(copied / LAST)
    flags = json.dumps(json.loads(metadata["flags"]) | {"seed": 1})
    checkpoint.save(copied / LAST, tensors, metadata | {"flags": flags})
    assert "it says seed 0, the checkpoint 1" in message(capsys, 3, exits(train, [*RESUME, copied]))
    checkpoint.save(copied / LAST, tensors, metadata | {"labels and test data": "CRC-32 00000000"})
    assert "its labels and test data is CRC-32 00000000, this run's is" in message(capsys, 3, exits(train, [*RESUME, copied]))
    checkpoint.save(copied / LAST, tensors, metadata | {"flags": "[" * 10_000})
    assert "its note of flags has lists or objects more than 64 deep" in message(capsys, 3, exits(train, [*RESUME, copied]))
    checkpoint.save(copied / LAST, tensors, metadata | {"flags": "[]"})
    assert "its flags are no JSON object" in message(capsys, 3, exits(train, [*RESUME, copied]))


# -- the checkpoint


def rewritten(path, change):
    """The file with its header changed by `change`, and nothing else."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header, content[8 + length :])
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


def swap_names(header, _):
    header["param.conv2.bias"], header["optim.m.conv2.bias"] = header["optim.m.conv2.bias"], header["param.conv2.bias"]


@pytest.mark.parametrize(
    "change", [swap_names, lambda header, _: header["__metadata__"].update(step="0"), lambda header, _: header["__metadata__"].pop("row")]
)
def test_a_changed_header_is_noticed(run, change):
    rewritten(run / LAST, change)
    with pytest.raises(CheckpointError, match="the checksum in its header is not that of the file"):
        resumed(run)


def test_a_checkpoint_without_its_seal_is_refused(run):
    rewritten(run / LAST, lambda header, _: header["__metadata__"].pop("seal"))
    with pytest.raises(CheckpointError, match="it has no checksum"):
        resumed(run)


def test_tensors_of_something_else_are_refused(run):
    tensors, metadata = checkpoint.load(run / LAST)
    checkpoint.save(run / LAST, tensors | {"optim.v.conv1.bias": tensors["optim.m.conv1.bias"]}, metadata)
    with pytest.raises(CheckpointError, match=r"'optim\.v\.conv1\.bias' is no tensor of this training"):
        resumed(run)


def as_before_the_seal(header, data):
    """The header as earlier versions wrote it: a checksum of the tensors alone, no metrics and no flags."""
    old = {name: text for name, text in header["__metadata__"].items() if name not in ("seal", "metrics", "row", "flags", "data")}
    header["__metadata__"] = old | {"sha256": hashlib.sha256(data).hexdigest()}


def test_a_checkpoint_of_an_earlier_version_resumes_with_a_warning(stopped, small):
    rewritten(stopped / LAST, as_before_the_seal)
    (told,) = resumed(stopped)
    assert told.startswith(f"{stopped / LAST} is of an earlier version of nbcnn: it does not say whether data are this run's")
    assert ends(stopped) == ends(small)
    assert resumed(stopped) == [], "it was saved again, with everything"


def test_a_run_that_diverges_from_an_unbound_checkpoint_says_that_it_may_have_been_changed(stopped):
    tensors, notes = checkpoint.load(stopped / LAST)
    tensors["param.conv1.weight"][...] = 1e38
    checkpoint.save(stopped / LAST, tensors, notes)
    rewritten(stopped / LAST, as_before_the_seal)
    with np.errstate(all="ignore"), pytest.raises(Diverged, match="has no checksum of its names and notes: they may have been changed"):
        resumed(stopped)


def test_train_tells_the_warning_also_when_quiet(copied, capsys):
    rewritten(copied / LAST, as_before_the_seal)
    assert exits(train, [*RESUME, copied]) == 0
    text = capsys.readouterr().err
    assert text.startswith(f"nbcnn: warning: {copied / LAST} is of an earlier version of nbcnn: it does not say whether data, flags are")


# -- metrics


@pytest.mark.parametrize("lost", [b"", b'{"epoch": 2, "st', b"3\n", b"\xff\n", b'{"epoch": 2}\n', None])
def test_a_lost_last_line_is_explained_and_rebuilt(run, lost):
    path, before = run / "metrics.jsonl", contents(run)
    first, last = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + (last.replace(b'"test_loss": 0.', b'"test_loss": 9.') if lost is None else lost))
    (run / "metrics.csv").unlink()
    (told,) = resumed(run)
    assert told == f"{path} had lost what epoch 2 wrote; the checkpoint knows it, and the line is written again"
    assert contents(run) == before


@pytest.mark.parametrize("line", [b"", b'{"epoch": 1}\n', b"[" * 100_000 + b"\n", None])
def test_metrics_that_were_edited_are_refused(run, line):
    path = run / "metrics.jsonl"
    first, last = path.read_bytes().splitlines(keepends=True)
    path.write_bytes((first.replace(b'"test_loss": 0.', b'"test_loss": 9.') if line is None else line) + last)
    before = contents(run)
    with pytest.raises(RunError, match=f"{path} is not the one that the checkpoint counts on"):
        resumed(run)
    assert contents(run) == before


def test_metrics_are_on_the_disk_before_the_checkpoint_that_counts_on_them(tmp_path, monkeypatch):
    from nbcnn.train import runlog

    order, folder = [], RunFolder(tmp_path / "run")
    folder.path.mkdir()
    rows = [{"epoch": epoch, "step": 2 * epoch, "train_loss": 1.0, "test_loss": 1.0, "seconds": 1.0} for epoch in (1, 2)]
    folder.append(rows[:1])  # which makes both files, whole
    real = runlog.os.fsync
    monkeypatch.setattr(runlog.os, "fsync", lambda number: order.append((folder.path / "metrics.jsonl").read_text().count("\n")) or real(number))
    monkeypatch.setattr(atomic, "replace", lambda *_: order.append("checkpoint"))
    folder.append(rows)
    checkpoint.save(folder.last, {}, {})
    assert order == [2, "checkpoint"]


@pytest.mark.parametrize("names", [["metrics.jsonl"], ["metrics.csv", "config.json"]])
def test_files_that_somebody_removes_while_a_run_goes_on_are_written_again(tmp_path, names, monkeypatch, capsys):
    run, real = tmp_path / "run", checkpoint.save

    def save(path, tensors, metadata):
        if path.name == LAST and metadata["epochs_done"] == "1":
            for name in names:
                (path.parent / name).unlink()
        return real(path, tensors, metadata)

    monkeypatch.setattr(checkpoint, "save", save)
    assert exits(train, [*TINY, "--epochs", "2", "--quiet", "--out", run]) == 0
    rows = RunFolder(run).rows()
    assert [row["epoch"] for row in rows] == [1, 2]
    capsys.readouterr()
    assert exits(train, [*RESUME, run]) == 0
    assert "warning" not in capsys.readouterr().err
    assert RunFolder(run).rows() == rows
    config = RunFolder(run).read_config()
    assert (config["flags"]["epochs"], "used_bytes" in config) == (2, True)
    assert (run / "metrics.csv").read_text().count("\n") == 3


@pytest.mark.parametrize(("name", "number"), [("fsync", errno.EIO), ("replace", errno.EROFS), ("replace", errno.ENOSPC)])
def test_a_file_that_can_no_longer_be_saved_is_named_and_the_run_goes_on_from_the_one_before(tmp_path, name, number, monkeypatch):
    real = getattr(os, name)

    def call(*given):
        if RunFolder(tmp_path).rows():  # from the end of the first epoch on
            raise OSError(number, os.strerror(number))
        return real(*given)

    with monkeypatch.context() as patched:
        patched.setattr(os, name, call)
        with pytest.raises(OSError, match=rf"{tmp_path}") as raised:
            made(tmp_path).fit()
    assert isinstance(raised.value, atomic.DiskFull) == (number == errno.ENOSPC)
    assert ".tmp" not in message_of(raised.value)
    assert not list(tmp_path.glob(".*"))


# -- going on


def test_a_run_killed_before_its_first_checkpoint_starts_again(copied, finished, capsys):
    for name in (LAST, BEST, "curves.png"):
        (copied / name).unlink()
    # The first epoch's line comes before its checkpoint, so it may be there.
    assert exits(train, [*RESUME, copied]) == 0
    assert ends(copied) == ends(finished)
    for name in (LAST, BEST):
        (copied / name).unlink()
    lines = (copied / "metrics.jsonl").read_text()
    (copied / "metrics.jsonl").write_text(lines + lines)
    before = contents(copied)
    assert "has the metrics of 2 epochs, but no checkpoint" in message(capsys, 3, exits(train, [*RESUME, copied]))
    assert contents(copied) == before


def test_epochs_may_be_added(copied, capsys):
    assert exits(train, [*RESUME, copied, "--epochs", "2"]) == 0
    assert [row["epoch"] for row in RunFolder(copied).rows()] == [1, 2]
    assert json.loads((copied / "config.json").read_text())["flags"]["epochs"] == 2
    assert "1 epochs would have 2" in message(capsys, 2, exits(train, [*RESUME, copied, "--epochs", "1"]))


def test_a_run_with_more_epochs_says_so_at_once(run):
    trainer = made(run, epochs=3)
    with pytest.raises(CheckpointError, match="its epochs is 2, this run's is 3"):
        trainer.resume(trainer.run.last)
    trainer.resume(trainer.run.last, new_epochs=True)
    trainer.callbacks = (Leaves(),)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit()
    assert checkpoint.load(run / LAST)[1]["epochs"] == "3"
    resumed(run, epochs=3)
    assert len(RunFolder(run).rows()) == 3


def test_after_resuming_from_another_checkpoint_the_folder_stands_there(run, small):
    trainer = made(run)
    trainer.resume(run / "first.safetensors")
    trainer.callbacks = (Leaves(),)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit()
    assert checkpoint.load(run / LAST)[1]["step"] == "2"
    resumed(run)
    assert ends(run) == ends(small)


def test_a_new_run_starts_from_the_weights_of_another(copied, tmp_path, capsys):
    new = tmp_path / "new"
    assert exits(train, [*TINY, "--weights", copied, "--lr", "1e-30", "--out", new, "--quiet"]) == 0
    old, found = (checkpoint.load(folder / LAST)[0] for folder in (copied, new))
    for name in old:
        if name.startswith("param."):
            np.testing.assert_array_equal(old[name], found[name])
    assert found["step_state"][0] == 2
    # Killed before its first checkpoint it begins with the same weights, or not at all.
    for name in (LAST, BEST):
        (new / name).unlink()
    checkpoint.save(copied / LAST, *checkpoint.load(copied / BEST))
    assert exits(train, [*RESUME, new]) == 0
    for name in (LAST, BEST):
        (new / name).unlink()
    checkpoint.save(copied / LAST, old | {"sums": old["sums"] + 1}, {})
    assert "has changed since the run" in message(capsys, 3, exits(train, [*RESUME, new]))


def test_weights_of_another_network_are_refused(finished, tmp_path, capsys):
    words = [*TINY, "--model", "mnist-cnn", "--weights", finished, "--out", tmp_path / "new", "--quiet"]
    assert "is of another network than --model mnist-cnn; it is of --model autoencoder" in message(capsys, 3, exits(train, words))
    assert not (tmp_path / "new").exists()


# -- any checkpoint

NAMES = st.text(max_size=20).filter(lambda name: name != "__metadata__")
DTYPES = st.sampled_from([*checkpoint.DTYPES.values(), np.dtype(">f4"), np.dtype(">i8")])
TENSORS = st.dictionaries(
    NAMES,
    DTYPES.flatmap(
        lambda dtype: arrays.arrays(
            dtype,
            arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=3),
            elements=arrays.from_dtype(dtype, allow_nan=False, allow_infinity=False),
        )
    ),
    max_size=5,
)
METADATA = st.dictionaries(st.text(max_size=10).filter(lambda name: name not in ("seal", "sha256")), st.text(max_size=20), max_size=4)


@settings(max_examples=25, deadline=None)
@given(TENSORS, METADATA)
def test_any_checkpoint_comes_back_bit_for_bit(tmp_path_factory, tensors, metadata):
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    checkpoint.save(path, tensors, metadata)
    found = checkpoint.read(path)
    assert found.metadata == metadata
    assert found.checked == "all"
    assert set(found.tensors) == set(tensors)
    for name, tensor in tensors.items():
        assert found.tensors[name].shape == tensor.shape
        assert found.tensors[name].tobytes() == tensor.astype(tensor.dtype.newbyteorder("<")).tobytes()


@settings(max_examples=25, deadline=None)
@given(TENSORS, METADATA, st.data())
def test_any_changed_byte_is_noticed(tmp_path_factory, tensors, metadata, data):
    path = tmp_path_factory.getbasetemp() / "changed.safetensors"
    checkpoint.save(path, tensors, metadata)
    content = bytearray(path.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    try:
        found = checkpoint.read(path)
    except CheckpointError:
        return
    # A letter of the word "seal" was hit: everything else is as it was, and a training does not resume from it.
    assert found.checked == ""


@pytest.mark.parametrize(
    ("tensors", "metadata"), [({"__metadata__": np.zeros(2)}, {}), ({"w": np.zeros((1,) * 9)}, {}), ({}, {"seal": ""}), ({}, {"n": "x" * (1 << 24)})]
)
def test_what_could_not_be_read_is_not_written(tmp_path, tensors, metadata):
    with pytest.raises(ValueError, match=r"no place|own|header"):
        checkpoint.save(tmp_path / LAST, tensors, metadata)
    assert not list(tmp_path.iterdir())


def test_a_resume_with_another_number_of_blas_threads_says_so(copied, capsys, monkeypatch):
    threads = blas.threads()
    assert checkpoint.load(copied / LAST)[1]["blas_threads"] == str(threads)
    assert exits(train, [*RESUME, copied]) == 0
    assert "BLAS" not in capsys.readouterr().err
    monkeypatch.setattr(blas, "threads", lambda: threads + 5)
    assert exits(train, [*RESUME, copied]) == 0
    said = capsys.readouterr().err
    assert f"trained with '{threads}' threads of BLAS, here it has {threads + 5}: the last bits may differ" in said
    assert f"OPENBLAS_NUM_THREADS={threads} has them again" in said
