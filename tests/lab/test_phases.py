"""Tests of the phases of the climb: what is trained, how long, and what is said of it."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import samples
from samples import phase as row
from scripts import exits

from nbcnn import __main__
from nbcnn.datasets import shapes
from nbcnn.lab.measure import phase, results, rung
from nbcnn.lab.report import phases as report
from nbcnn.lab.studies import phases
from nbcnn.nn.activations import ReLU
from nbcnn.nn.layers import Conv2d
from nbcnn.nn.losses import MSE
from nbcnn.nn.optim import SGD, learning_rates
from nbcnn.run.net import Net
from nbcnn.run.session import TrainingSession

SPEC = phase.Spec("cpu", "fp32", False, batch=2, images=7, epochs=3, seconds=60.0)


@pytest.fixture
def small(monkeypatch):
    """Sessions of a small network in the place of the autoencoder's."""

    def session_for(batch, images, **options):
        data = shapes.generate(images, seed=1, size=8)[0]
        rates = learning_rates("constant", 0.01, 3)
        layers = [Conv2d(4, 3, padding=1), ReLU(), Conv2d(3, 3, padding=1), MSE()]
        return TrainingSession(Net(layers, (3, 8, 8), **options), data, optimizer=SGD(), learning_rates=rates, batch=batch)

    for module in (phase, rung):
        monkeypatch.setattr(module, "session_for", session_for)


def test_a_phase_trains_whole_epochs_and_stops_at_its_end_or_at_its_time(small):
    found = phase.measure(SPEC)
    assert found["images"] == 3 * 7 - 2 * 2, "three epochs without the opening's two steps"
    assert found["epoch_seconds"] == pytest.approx(50_000 * found["seconds"] / found["images"])
    assert (found["fused"], found["algebra"]) == (False, "5 GEMM by BLAS")
    stopped = phase.measure(replace(SPEC, epochs=10_000, seconds=0.05))
    assert 0.05 <= stopped["seconds"] < 5
    assert 0 < stopped["images"] < 70_000
    assert stopped["opening_loss"] == found["opening_loss"] > 0


def test_the_serial_loops_train_like_numpy(small):
    pytest.importorskip("numba")
    found = phase.measure(replace(SPEC, mode="serial", batch=1, epochs=1))
    assert (found["mode"], found["algebra"], found["opening_loss"], found["images"]) == ("serial", "5 definition", None, 4)


def played(monkeypatch, rates, losses=None):
    def run(command, **options):
        spec = phase.Spec(**json.loads(command[3]))
        name = (spec.mode, spec.precision, spec.fused)
        if name not in rates:
            return SimpleNamespace(returncode=1, stdout="", stderr="Traceback\nRuntimeError: is not timed")
        made = row(spec.mode, rates[name], "fused" if spec.fused else "plain", spec.precision, batch=spec.batch)
        loss = None if spec.mode == "serial" else (losses or {}).get(name, 0.0625)
        return SimpleNamespace(returncode=0, stdout=json.dumps(made | {"opening_loss": loss}) + "\n", stderr="")

    monkeypatch.setattr(phases, "subprocess", SimpleNamespace(run=run))


def test_the_climb_compares_phases_and_leaves_out_what_trains_otherwise(monkeypatch):
    monkeypatch.setattr(phases, "gpu_missing", lambda: None)
    monkeypatch.setattr(phases, "Gpu", lambda: SimpleNamespace(capability=(7, 0)))
    rates = {("serial", "fp32", False): 40_000.0, ("cpu", "fp32", False): 500.0, ("naive", "fp32", False): 50.0, ("im2col", "fp32", True): 2.0}
    played(monkeypatch, rates, {("naive", "fp32", False): 0.07})
    said = []
    rows = list(phases.climb(said.append))
    assert [(one["mode"], one["batch"], one["over_before"], one["over_first"], one["total_seconds"]) for one in rows] == [
        ("serial", 1, None, None, 600_000.0),
        ("cpu", 64, 80.0, 80.0, 7_500.0),
        ("im2col", 64, 250.0, 20_000.0, 30.0),
    ]
    assert "naive fp32 plain: left out: its first steps have a mean loss of 0.070000, NumPy's have 0.062500" in said
    assert "tiled fp32 plain: failed: RuntimeError: is not timed" in said
    assert not any(text.startswith("tensorcore") for text in said)
    assert [phases.name_of(one) for one in rows] == ["serial loops", "cpu (NumPy)", "im2col fused"]
    text = phases.table(rows).splitlines()
    assert text[3].split()[:8] == ["im2col", "fused", "6,400", "2", "250.0", "20,000.0", "30.0", "s"]


@pytest.mark.parametrize(("seconds", "text"), [(2.34, "2.3 s"), (150, "2.5 min"), (7_500, "2.1 h"), (600_000, "6.9 days")])
def test_durations_are_short(seconds, text):
    assert phases.duration(seconds) == text


def test_the_command_saves_its_rows_and_the_page_shows_them(monkeypatch, tmp_path, capsys):
    played(monkeypatch, {("serial", "fp32", False): 40_000.0, ("cpu", "fp32", False): 500.0})
    monkeypatch.setattr(phases, "gpu_missing", lambda: "no GPU")
    monkeypatch.setattr("nbcnn.gpu.device.gpu_missing", lambda: "no GPU")
    assert exits(__main__.main, ["ladder", "--phases", "--save", "--results", tmp_path]) == 0
    assert "cpu (NumPy)" in capsys.readouterr().out
    kept = json.loads((tmp_path / "cpu.json").read_text())["sections"]["phases-64"]["rows"]
    assert [one["mode"] for one in kept] == ["serial", "cpu"]
    assert exits(__main__.main, ["ladder", "--phases", "--hopper"]) == 2


def test_a_page_without_results_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    samples.saved(tmp_path, {"other": [{}]})
    assert report.table() == "Not measured yet.\n"


def test_the_table_and_the_picture_are_of_the_results(monkeypatch, tmp_path):
    samples.saved(tmp_path, {"phases-64": samples.phases()})
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    found = report.table()
    assert "| cpu (NumPy) | 6,400 | 500 | 80.0 | 80.0 | 2.1 h | 0.06250 |  | 512 | 14 definition |" in found
    report.chart(tmp_path / "phases.svg")
    picture = (tmp_path / "phases.svg").read_text()
    assert all(text in picture for text in ("serial loops", "6.9 days", "2.1 h", "75.0 s"))
