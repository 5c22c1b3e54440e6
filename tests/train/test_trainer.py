"""Tests of the training loop: metrics, checkpoints, resume bit for bit, divergence. A small network on the CPU, and fakes where only order
matters."""

from __future__ import annotations

import csv
import json
import os
import signal
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from nbcnn.nn.activations import ReLU
from nbcnn.nn.layers import Conv2d
from nbcnn.nn.losses import MSE
from nbcnn.nn.optim import SGD, Adam, learning_rates
from nbcnn.nn.resampling import MaxPool2d, Upsample2d
from nbcnn.run.net import Net
from nbcnn.run.session import TrainingSession
from nbcnn.train import checkpoint
from nbcnn.train.callbacks import Plots, Progress, duration, rate
from nbcnn.train.checkpoint import BEST, LAST, CheckpointError
from nbcnn.train.events import Callback
from nbcnn.train.runlog import RunError, RunFolder
from nbcnn.train.trainer import CallbackError, Diverged, Trainer

LAYERS = [Conv2d(4, 3, padding=1, in_channels=3), ReLU(), MaxPool2d(2), Upsample2d(2), Conv2d(3, 3, padding=1, in_channels=4), MSE()]
EPOCHS, IMAGES, BATCH, STEPS = 3, 22, 8, 3


def make(tmp_path, name="run", optimizer=None, lr=0.2, layers=LAYERS, epochs=EPOCHS, **options):
    """A trainer of a small autoencoder on 22 images: two batches of 8 and one of 6 per epoch."""
    rng = np.random.default_rng(5)
    images = rng.integers(0, 256, (IMAGES, 3, 8, 8), np.uint8)
    net = Net(layers, (3, 8, 8), mode="cpu", seed=3)
    rates = learning_rates("cosine", lr, epochs * STEPS)
    session = TrainingSession(net, images, optimizer=optimizer or SGD(), learning_rates=rates, batch=BATCH, seed=3, flip=True, test_images=images[:5])
    return Trainer(session, tmp_path / name, learning_rates=rates, **options)


class StopAt(Callback):
    """Stops a run like a signal at a given training step."""

    def __init__(self, step):
        self.step = step

    def reading(self, trainer, reading):
        if trainer.step == self.step:
            os.kill(os.getpid(), 2)


def states_equal(one, other):
    assert set(one) == set(other)
    return all(one[name].tobytes() == other[name].tobytes() for name in one)


def test_an_epoch_learns_and_writes_its_files(tmp_path):
    trainer = make(tmp_path, callbacks=[Plots("noise", np.zeros((2, 3, 8, 8), np.uint8))])
    result = trainer.fit()
    assert (result.interrupted, result.epochs, result.step, result.exit_code) == (False, EPOCHS, EPOCHS * STEPS, 0)
    assert result.test_loss < 0.9 * trainer.rows[0]["train_loss"]
    assert result.best_loss == min(row["test_loss"] for row in trainer.rows)
    names = {path.name for path in trainer.run.path.iterdir()}
    assert names == {"metrics.csv", "metrics.jsonl", LAST, BEST, "curves.png", "reconstructions.png"}
    assert trainer.run.curves.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("where", ["in a folder", "in memory"])
def test_the_work_of_an_epoch_does_not_grow_with_the_number_of_epochs(tmp_path, monkeypatch, where):
    """Of 20 epochs each digests its own row, and early stopping looks at it, once."""
    from nbcnn.train import callbacks, runlog, trainer

    made = [0]
    for module in (runlog, trainer):
        monkeypatch.setattr(module, "line_of", lambda row, inner=runlog.line_of: made.append(made.pop() + 1) or inner(row))
    for module in (callbacks, trainer):
        monkeypatch.setattr(module, "loss_of", lambda row, inner=trainer.loss_of: made.append(made.pop() + 1) or inner(row))

    class Counts(Callback):
        def __init__(self):
            self.work = []

        def epoch(self, trainer, epoch):
            self.work.append(made[0])

    counts = Counts()
    training = make(tmp_path, epochs=20, callbacks=[callbacks.EarlyStopping(20, restore_best=False), counts])
    if where == "in memory":
        training.run = runlog.InMemory()
    training.fit()
    each = np.diff(counts.work)
    assert len(each) == 19
    assert each.min() == each.max() <= 5


def test_both_metrics_files_say_the_same(tmp_path):
    trainer = make(tmp_path)
    trainer.fit()
    rows = [json.loads(line) for line in (trainer.run.path / "metrics.jsonl").read_text().splitlines()]
    with open(trainer.run.path / "metrics.csv", newline="") as file:
        table = list(csv.DictReader(file))
    assert [row["epoch"] for row in rows] == [1, 2, 3]
    times = [row.pop("time") for row in rows]  # a table in itself, and only in the JSON lines
    assert [{name: float(value) for name, value in row.items()} for row in table] == rows
    assert all(found["step_ms"] >= sum(found["kernels_ms"].values()) - 1e-3 for found in times)
    assert rows[0]["learning_rate"] == float(trainer.learning_rates[STEPS - 1])
    assert rows[-1]["step"] == EPOCHS * STEPS


def test_the_logged_losses_are_means_over_all_images(tmp_path):
    trainer = make(tmp_path, lr=1e-30, epochs=1)
    trainer.fit()
    session = trainer.session
    # With weights that stay where they are, the epoch's mean is the loss of the data set (mirroring changes it a little).
    images = np.random.default_rng(5).integers(0, 256, (IMAGES, 3, 8, 8), np.uint8)
    reached = np.mean((session.reconstruct(images[:5]) - images[:5] / 255.0) ** 2)
    assert trainer.rows[0]["test_loss"] == pytest.approx(reached, rel=1e-5)


@pytest.mark.parametrize("optimizer", [SGD(), Adam()], ids=["sgd", "adam"])
@pytest.mark.parametrize("stop", range(1, 2 * STEPS + 1))
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(tmp_path, optimizer, stop):
    lr = 0.2 if isinstance(optimizer, SGD) else 0.003
    whole = make(tmp_path, "whole", optimizer, lr)
    whole.fit()
    first = make(tmp_path, "parts", optimizer, lr, log_every=1, callbacks=[StopAt(stop)])
    stopped = first.fit()
    assert (stopped.interrupted, stopped.step, stopped.exit_code) == (True, stop, 130)
    second = make(tmp_path, "parts", optimizer, lr)
    second.resume(second.run.last)
    assert second.step == stop
    result = second.fit()
    assert result.step == EPOCHS * STEPS
    assert states_equal(whole.session.state(), second.session.state())
    losses = [[(row["epoch"], row["train_loss"], row["test_loss"]) for row in trainer.rows] for trainer in (whole, second)]
    assert losses[0] == losses[1]
    ends = [checkpoint.load(trainer.run.last)[0] for trainer in (whole, second)]
    assert states_equal(*ends)


def test_resuming_from_the_best_drops_later_metrics(tmp_path):
    whole = make(tmp_path)
    whole.fit()
    checkpoint.save(whole.run.best, *one_epoch_earlier(tmp_path))
    again = make(tmp_path)
    again.resume(again.run.best)
    seen = []
    again.callbacks = (Watches(lambda: seen.append([row["epoch"] for row in again.run.rows()])),)
    again.fit()
    assert seen[0] == [1]
    assert [row["test_loss"] for row in again.rows] == [row["test_loss"] for row in whole.rows]
    assert states_equal(again.session.state(), whole.session.state())


class Watches(Callback):
    """Calls a function at every reading of the loss."""

    def __init__(self, function):
        self.reading = lambda trainer, reading: function()


@pytest.mark.parametrize("name", ["metrics.jsonl", "metrics.csv"])
def test_what_takes_the_place_of_metrics_in_mid_run_is_written_over(tmp_path, name):
    trainer = make(tmp_path)
    file = trainer.run.path / name

    def replaced(trainer, epoch):
        if epoch.epoch == 1:
            file.unlink()
            os.mkfifo(file)

    watch = Callback()
    watch.epoch = replaced
    trainer.callbacks = (watch,)
    trainer.fit()
    assert [row["epoch"] for row in trainer.run.rows()] == list(range(1, EPOCHS + 1))
    assert len((trainer.run.path / "metrics.csv").read_text().splitlines()) == EPOCHS + 1


def test_what_the_system_refuses_a_callback_is_told_without_its_number(tmp_path):
    error = IsADirectoryError(21, "Is a directory", "curves.png")
    with pytest.raises(CallbackError, match=r"Raises\.end raised IsADirectoryError: curves\.png: Is a directory; the checkpoints are in"):
        make(tmp_path, callbacks=[Raises("end", error)]).fit()


def one_epoch_earlier(tmp_path):
    """The checkpoint of the same run after its first epoch."""
    first = make(tmp_path, "first", callbacks=[StopAt(STEPS + 1)], log_every=1)
    first.fit()
    again = make(tmp_path, "first")
    again.resume(again.run.best)
    assert again.step == STEPS
    return checkpoint.load(again.run.best)


def test_a_torn_metrics_line_is_dropped_on_resume(tmp_path):
    first = make(tmp_path, callbacks=[StopAt(STEPS + 1)], log_every=1)
    first.fit()
    with open(first.run.path / "metrics.jsonl", "a") as file:
        file.write('{"epoch": 2, "st')
    second = make(tmp_path)
    second.resume(second.run.last)
    second.fit()
    assert [row["epoch"] for row in second.run.rows()] == [1, 2, 3]


def test_resuming_a_finished_run_changes_nothing(tmp_path):
    whole = make(tmp_path)
    whole.fit()
    before = whole.run.last.read_bytes()
    again = make(tmp_path)
    again.resume(again.run.last)
    result = again.fit()
    assert (result.interrupted, result.step) == (False, EPOCHS * STEPS)
    assert whole.run.last.read_bytes() == before


def test_a_second_run_does_not_write_over_the_first(tmp_path):
    make(tmp_path).fit()
    before = (tmp_path / "run" / "metrics.csv").read_bytes()
    with pytest.raises(FileExistsError, match="another run"):
        make(tmp_path).fit()
    assert (tmp_path / "run" / "metrics.csv").read_bytes() == before


def test_save_every_saves_within_the_epoch(tmp_path, monkeypatch):
    steps = []
    real = checkpoint.save
    monkeypatch.setattr(checkpoint, "save", lambda path, tensors, metadata: steps.append(int(metadata["step"])) or real(path, tensors, metadata))
    make(tmp_path, save_every=2, epochs=2).fit()
    assert sorted(set(steps)) == [2, 3, 4, 6]


def test_readings_do_not_change_the_result(tmp_path):
    often, rarely = make(tmp_path, "often", log_every=1), make(tmp_path, "rarely", log_every=1000)
    often.fit()
    rarely.fit()
    assert states_equal(often.session.state(), rarely.session.state())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"param.conv1.weight": np.zeros((4, 3, 5, 5), np.float32)}, "'conv1.weight'"),
        ({"param.conv1.weight": np.zeros((4, 3, 3, 3))}, "'conv1.weight' is float64"),
        ({"param.conv1.bias": None}, "'conv1.bias' is missing"),
        ({"param.conv9.bias": np.zeros(3, np.float32)}, "'conv9.bias'"),
        ({"optim.m.conv2.bias": None}, "optimizer state 'm'.*'conv2.bias' is missing"),
        ({"step_state": np.zeros(8, np.int32)}, "'step_state' is int32"),
        ({"step_state": np.array([5, 0, -3, 0, 0, 0, 0, 0])}, "position -3"),
        ({"step_state": np.array([77, 1, 0, 3, 0, 0, 0, 0])}, "contradicts itself"),
        ({"sums": None}, "'sums' is missing"),
    ],
)
def test_a_checkpoint_that_does_not_fit_names_the_tensor(tmp_path, change, says):
    trainer = make(tmp_path)
    trainer.fit()
    tensors, metadata = checkpoint.load(trainer.run.last)
    changed = {name: tensor for name, tensor in (tensors | change).items() if tensor is not None}
    checkpoint.save(trainer.run.last, changed, metadata)
    with pytest.raises(CheckpointError, match=says):
        make(tmp_path).resume(trainer.run.last)


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    trainer = make(tmp_path, identity={"data": "noise"})
    trainer.fit()
    with pytest.raises(CheckpointError, match="its data is noise, this run's is sound"):
        make(tmp_path, identity={"data": "sound"}).resume(trainer.run.last)
    with pytest.raises(CheckpointError, match="its epochs is 3, this run's is 4"):
        make(tmp_path, epochs=4).resume(trainer.run.last)
    checkpoint.save(trainer.run.last, {"w": np.zeros(3)}, {})
    with pytest.raises(CheckpointError, match="not written by a training run"):
        make(tmp_path).resume(trainer.run.last)


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("log_every", [1, 1000])
@pytest.mark.parametrize("bad", [STEPS + 1, STEPS + 2, 2 * STEPS])
def test_divergence_keeps_the_last_good_checkpoint_and_names_step_and_layer(tmp_path, bad, log_every):
    trainer = make(tmp_path, log_every=log_every)
    rates = trainer.learning_rates.copy()
    # The update of step `bad` leaves absurd but finite weights; the next step overflows.
    rates[bad - 1] = 1e35
    trainer.session._held.upload("rates", rates)
    epoch, saved = bad // STEPS + 1, bad // STEPS * STEPS
    where = rf"epoch {epoch}, training step {bad + 1}, first in \w+\.\w+ \(.*\); the last good checkpoint is .*{LAST}"
    with pytest.raises(Diverged, match=where) as error:
        trainer.fit()
    assert error.value.exit_code == 6
    tensors, metadata = checkpoint.load(trainer.run.last)
    assert metadata["step"] == str(saved)
    assert all(np.isfinite(tensor).all() for tensor in tensors.values())


def fake(**changes):
    """A session that only counts."""
    state = {"w": np.zeros(2, np.float32)}
    session = SimpleNamespace(
        steps_per_epoch=2, count=4, taken=0, has_tests=True, repeats=True, first_nonfinite=lambda: "conv3.conv_wgrad (conv3.weight)", optimizer=SGD()
    )
    session.begin_epoch = lambda epoch: None

    def step():
        session.taken += 1

    session.step = step
    session.step_watched = lambda: step() or (lambda: None)
    session.status = lambda: SimpleNamespace(step=session.taken, loss_mean=0.5, last_loss=0.5, nonfinite=False)
    session.evaluate_share = lambda: np.array([0.25, 1.0])
    session.averaged, session.take_average = nullcontext, lambda: None
    session.load_state = lambda tensors: None
    session.state = lambda: {name: tensor.copy() for name, tensor in state.items()}
    vars(session).update(changes)
    return session


def fit(tmp_path, session, **options):
    return Trainer(session, tmp_path / "run", learning_rates=np.zeros(4, np.float32), **options).fit()


NAN = float("nan")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"status": lambda: SimpleNamespace(step=1, loss_mean=0.5, last_loss=0.5, nonfinite=True)}, "step 1, first in conv3.conv_wgrad"),
        ({"status": lambda: SimpleNamespace(step=1, loss_mean=NAN, last_loss=NAN, nonfinite=True)}, "step 1, first in conv3.conv_wgrad"),
        ({"state": lambda: {"w": np.array([1, NAN], np.float32)}}, "finite when repeated"),
        ({"evaluate_share": lambda: np.array([NAN, 1.0])}, "in the evaluation"),
    ],
    ids=["flag", "loss", "weights", "test loss"],
)
def test_nothing_that_is_not_finite_is_saved(tmp_path, changes, says):
    with pytest.raises(Diverged, match=rf"{says}.*no checkpoint had been saved yet"):
        fit(tmp_path, fake(**changes))
    assert not list((tmp_path / "run").iterdir())


def test_the_state_is_copied_before_the_evaluation(tmp_path):
    order = []
    session = fake(evaluate_share=lambda: order.append("evaluate") or np.array([0.25, 1.0]))
    real = session.state
    session.state = lambda: order.append("state") or real()
    fit(tmp_path, session)
    assert order[-2:] == ["state", "evaluate"]
    assert order.count("evaluate") == 2


def test_training_works_outside_the_main_thread(tmp_path):
    results = []
    thread = threading.Thread(target=lambda: results.append(fit(tmp_path, fake())))
    thread.start()
    thread.join()
    assert results[0].epochs == 2


def test_callbacks_are_closed_when_training_raises(tmp_path):
    closed = []

    class Watch(Callback):
        def close(self):
            closed.append(True)

    with pytest.raises(Diverged):
        fit(tmp_path, fake(evaluate_share=lambda: np.array([np.nan, 1.0])), callbacks=[Watch()])
    assert closed == [True]


class Raises(Callback):
    """Raises in one of its methods."""

    def __init__(self, what, error):
        def fail(*_):
            raise error

        setattr(self, what, fail)


@pytest.mark.parametrize("what", ["reading", "epoch", "end", "close"])
@pytest.mark.parametrize(("error", "code"), [(ValueError("of no use"), 1), (MemoryError("of no use"), 5)], ids=["ValueError", "MemoryError"])
def test_a_callback_that_raises_loses_nothing(tmp_path, what, error, code):
    whole, closed = make(tmp_path, "whole"), []
    whole.fit()
    watch = Callback()
    watch.close = lambda: closed.append(True)
    first = make(tmp_path, log_every=2, callbacks=[Raises(what, error), watch])
    with pytest.raises(
        CallbackError, match=rf"the callback Raises.{what} raised {type(error).__name__}: of no use; the checkpoints are in"
    ) as raised:
        first.fit()
    assert (raised.value.exit_code, raised.value.__cause__) == (code, error)
    assert closed == [True]
    second = make(tmp_path)
    second.resume(second.run.last)
    assert second.step == {"reading": 2, "epoch": STEPS}.get(what, EPOCHS * STEPS)
    second.fit()
    assert states_equal(whole.session.state(), second.session.state())


def test_what_ended_the_training_counts_more_than_a_callback_that_cannot_be_closed(tmp_path):
    with pytest.raises(Diverged):
        fit(tmp_path, fake(evaluate_share=lambda: np.array([np.nan, 1.0])), callbacks=[Raises("close", ValueError())])


def test_a_step_in_the_simulator_is_abandoned_for_a_signal(tmp_path, monkeypatch):
    whole = make(tmp_path, "whole")
    whole.fit()
    monkeypatch.setattr("nbcnn.train.trainer.SIMULATOR", True)
    first = make(tmp_path)
    step, taken = first.session.step, []

    def slow(*watched):
        taken.append(step(*watched))
        if len(taken) == 2:
            signal.raise_signal(signal.SIGTERM)
            pytest.fail("nobody waits for hours")

    first.session.step = slow
    assert first.fit().exit_code == 143
    second = make(tmp_path)
    second.resume(second.run.last)
    assert second.step <= 2
    second.fit()
    assert states_equal(whole.session.state(), second.session.state())


def test_a_learning_rate_table_must_end_with_an_epoch(tmp_path):
    with pytest.raises(ValueError, match="3 learning rates are no whole number of epochs of 2"):
        Trainer(fake(), tmp_path, learning_rates=np.zeros(3, np.float32))


class Stream:
    """Stderr, a terminal or not."""

    def __init__(self, terminal):
        self.text, self.terminal = "", terminal

    def write(self, text):
        self.text += text

    def flush(self):
        pass

    def isatty(self):
        return self.terminal


def test_progress_prints_lines_without_a_terminal_and_a_bar_on_one(tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    plain, bar = Stream(False), Stream(True)
    make(tmp_path, "plain", callbacks=[Progress(plain, every_reading=True)], log_every=2).fit()
    make(tmp_path, "bar", callbacks=[Progress(bar)], log_every=1).fit()
    lines = plain.text.splitlines()
    assert lines[0].startswith("epoch 1/3  step 2/3  loss 0.")
    assert lines[0].endswith(" left")
    assert sum("test loss" in line for line in lines) == EPOCHS
    assert plain.text.count("where the time went") == 1
    assert "where the time went" in lines[-1]
    assert "\r" not in plain.text
    assert "67%" in bar.text
    assert "\x1b[3" not in bar.text, "NO_COLOR means no colour"


def test_progress_says_after_every_epoch_where_the_time_went_if_asked(tmp_path):
    stream = Stream(False)
    make(tmp_path, "run", callbacks=[Progress(stream, every_time=True)]).fit()
    assert stream.text.count("where the time went") == EPOCHS


@pytest.mark.parametrize(("seconds", "text"), [(0.4167, "0.42 s"), (12.34, "12.3 s"), (59.96, "60.0 s"), (245, "4 min 05 s"), (7620, "2 h 07 min")])
def test_durations_read_well(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(("per_second", "text"), [(2.612, "2.61"), (61.44, "61.4"), (1109.3, "1,109")])
def test_rates_read_well(per_second, text):
    assert rate(per_second) == text


def test_a_folder_without_a_config_is_no_run(tmp_path):
    with pytest.raises(RunError, match="no run folder"):
        RunFolder(tmp_path).read_config()
    (tmp_path / "config.json").write_text("[")
    with pytest.raises(RunError, match="no JSON"):
        RunFolder(tmp_path).read_config()


@pytest.mark.parametrize("command", [3.5, {"a": 1}, ["train", 7]])
def test_a_config_whose_command_is_neither_text_nor_a_list_of_texts_is_damaged(tmp_path, command):
    config = {"flags": {"model": "autoencoder", "data_dir": "data"}, "data": {"name": "digits"}, "command": command}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(RunError, match=r"command(\[1\])? must be .*damaged"):
        RunFolder(tmp_path).read_config()
