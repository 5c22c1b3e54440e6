"""Tests of train.py --model s4convd --dataset energy: from flags to forecasts, resumed as if never interrupted."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from scripts import exits, message, train

from nbcnn.cli import recipes, train_flags
from nbcnn.datasets import energy
from nbcnn.datasets.series import Windows
from nbcnn.nn import models
from nbcnn.nn.layers import Linear
from nbcnn.nn.losses import ForecastMSE
from nbcnn.nn.optim import Adam, learning_rates
from nbcnn.nn.series_layers import LastStep, PointwiseConv1d
from nbcnn.run.net import Net
from nbcnn.run.session import TrainingSession
from nbcnn.train import checkpoint

TINY = ["--mode", "cpu", "--limit", "12", "--batch", "5", "--width", "4", "--blocks", "1", "--epochs", "2"]


@pytest.fixture(autouse=True)
def few_buildings(monkeypatch):
    monkeypatch.setattr(energy, "BUILDINGS", 3)
    made = energy.generate
    monkeypatch.setattr(energy, "generate", lambda: made(3))


def run(folder, *flags):
    return exits(train, ["--dataset", "energy", *TINY, "--out", folder, *flags])


@pytest.mark.parametrize("loss", ["log-mse", "rmsle"])
def test_a_run_ends_in_forecasts(tmp_path, capsys, loss):
    assert run(tmp_path / "run", "--loss", loss, "--json") == 0
    captured = capsys.readouterr()
    said = json.loads(captured.out)
    assert " windows/s" in captured.err
    names = {file.name for file in (tmp_path / "run").iterdir()}
    assert {"forecast.json", "forecast.png", "curves.png", "config.json", checkpoint.LAST} <= names
    scores = json.loads((tmp_path / "run" / "forecast.json").read_text())["rmsle"]
    assert said["rmsle"] == scores
    assert set(scores) == {"network", "last value", "day before", "weekly mean", "ridge"}
    assert all(np.isfinite(score) for score in scores.values())


def test_a_run_resumes_in_its_folder_on_its_data(tmp_path, capsys, monkeypatch):
    assert run(tmp_path / "run", "--quiet") == 0
    state, _ = checkpoint.load(tmp_path / "run" / checkpoint.LAST)
    assert exits(train, ["--resume", tmp_path / "run", "--quiet"]) == 0
    for name, tensor in checkpoint.load(tmp_path / "run" / checkpoint.LAST)[0].items():
        np.testing.assert_array_equal(state[name], tensor)
    three = energy.generate()
    monkeypatch.setattr(energy, "generate", lambda: (three[0] + 1, *three[1:]))
    code = exits(train, ["--resume", tmp_path / "run", "--quiet"])
    assert "belongs to another run: its data" in message(capsys, code, code)


def test_a_state_taken_in_the_middle_goes_on_bit_for_bit():
    data = energy.load(Path("nowhere")).cut(11)
    windows = data.windows("train")

    def session():
        net = Net([PointwiseConv1d(3, in_channels=4), LastStep(), Linear(1, in_features=3), ForecastMSE()], windows.shape, mode="cpu")
        return TrainingSession(net, windows, optimizer=Adam(), learning_rates=learning_rates("constant", 0.01, 3), batch=4, test_images=windows)

    first, second = session(), session()
    for _ in range(3):
        first.step()
    second.step()
    third = session()
    third.load_state(second.state())
    third.step()
    third.step()
    for name, tensor in first.state().items():
        np.testing.assert_array_equal(third.state()[name], tensor)
    assert first.evaluate() == third.evaluate()


@pytest.mark.parametrize("mode", ["naive", "im2col", "cudacore"])
def test_training_steps_of_a_gpu_land_where_numpy_does(mode, device):
    windows = energy.load(Path("nowhere")).cut(3).windows("train")
    rows = windows.rows[: windows.starts[0] + 60]
    windows = Windows(rows, np.ascontiguousarray(rows[:, 0]), windows.starts[:1] - np.arange(3, dtype=np.int32), length=6)
    states = []
    for each in ("cpu", mode):
        net = Net(models.s4convd(wide=4, blocks=1, taps=6, states=2), (4, 6), mode=each)
        session = TrainingSession(net, windows, optimizer=Adam(), learning_rates=learning_rates("constant", 0.01, 2), batch=2, test_images=windows)
        session.step()
        session.step()
        states.append((session.state(), session.evaluate()))
    (want, want_loss), (got, got_loss) = states
    assert got_loss == pytest.approx(want_loss, rel=1e-4)
    for name, tensor in want.items():
        if name.startswith("param."):
            # Adam's first steps are lr·sign(g) where |g| ≫ ε: rounding shows as a part of the step of 0.01.
            np.testing.assert_allclose(got[name], tensor, atol=2e-4, err_msg=name)


def test_model_and_data_imply_each_other():
    for argv in (["--model", "s4convd"], ["--dataset", "energy"]):
        flags = recipes.fill(train_flags.parse(argv))
        assert (flags.model, flags.dataset, flags.optimizer, flags.batch) == ("s4convd", "energy", "adam", 1024)
    assert recipes.fill(train_flags.parse([])).model == "autoencoder"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--model", "s4convd", "--dataset", "digits"], "does not go with"),
        (["--model", "autoencoder", "--dataset", "energy"], "does not go with"),
        (["--dataset", "digits", "--width", "8"], "belongs to --model s4convd"),
        (["--dataset", "energy", "--flip"], "for images"),
        (["--dataset", "energy", "--mode", "cpu", "--data-dir", "no-such-folder"], "is no folder"),
    ],
)
def test_what_does_not_go_together_is_said(argv, words, capsys):
    code = exits(train, argv)
    assert code in (2, 3)
    assert words in message(capsys, code, code)
