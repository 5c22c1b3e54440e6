"""Tests of training steps and epochs in a row: every one is run and timed once, whatever an epoch's end does to the count."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from nbcnn import __main__
from nbcnn.gpu.device import Host
from nbcnn.lab.measure import in_a_row, rung, sampling, steady, timing
from nbcnn.lab.measure.clocks import Watch
from nbcnn.lab.measure.steady import Warm

WARM = Warm(True, 0.1, 1.0, None, frozenset(), ())


class Session:
    """Epochs of five steps; it counts what is begun and run."""

    batch = 4

    def __init__(self, device):
        self.net = SimpleNamespace(device=device)
        self.ran, self.begun, self.steps_left = [], 0, 5

    def begin_epoch(self, number):
        self.begun, self.steps_left = self.begun + 1, 5

    def step(self, run=None):
        assert self.steps_left > 0
        self.ran.append(run)
        self.steps_left -= 1


def test_steps_go_on_where_an_epoch_ends():
    session = Session(Host())
    assert in_a_row.Steps(session).repeat(12) > 0
    assert (len(session.ran), session.begun, session.steps_left) == (12, 2, 3)
    in_a_row.Steps(session, launched=True).repeat(1)
    assert session.ran[-1] is in_a_row.one_by_one
    assert session.ran[0] is not session.ran[-1]


def test_a_gpu_runs_both_ways_in_turn_and_a_host_one(monkeypatch):
    monkeypatch.setattr(timing, "SIMULATOR", True)  # times are the host's here
    gpu = SimpleNamespace(name="gpu", synchronize=lambda: None)
    for device, forms in ((gpu, ["2 in a row", "2 in a row, launch by launch"]), (Host(), ["2 in a row"])):
        rows = in_a_row.in_a_row(Session(device), (2,), True, WARM, Watch(Host()), 0.01)
        assert [row["form"] for row in rows] == forms
        assert all(row["images_per_second"] > 0 and row["iterations"] == 2 for row in rows)
        assert all(("over_graph" in row) is (at == 1) for at, row in enumerate(rows))


@pytest.mark.parametrize(("warmup", "counts", "begun"), [(None, (1, 4), 2 + 7 + 3 * 4), (0.0, (2,), 4 * 2)])
def test_epochs_are_whole(warmup, counts, begun):
    session = Session(SimpleNamespace(name="gpu", synchronize=lambda: None))
    rows = in_a_row.epochs(session, counts, warmup, Watch(Host()))
    assert (session.begun, len(session.ran)) == (begun, 5 * begun)
    assert [row["iterations"] for row in rows] == list(counts)


def test_the_command_has_a_row_for_every_count(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(steady, "WINDOW", 1e-3)
    monkeypatch.setattr(sampling, "FEWEST", 2)
    monkeypatch.setattr(rung, "sgemm_gflops", lambda: 1.0)
    monkeypatch.setattr(rung, "time_pass", lambda *what: timing.summarise([1.0]))
    argv = ["bench", "step", "--mode", "cpu", "--batch", "1", "--iters", "1,2", "--cache", "rotate", "--graph", "--seconds", "0.01"]
    assert __main__.main([*argv, "--save", "--results", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    assert "nbcnn cpu, 2 in a row" in captured.out
    assert "a host captures no graph" in captured.err
    rows = json.loads((tmp_path / "cpu.json").read_text())["sections"]["step-cpu-1-in-a-row"]["rows"]
    assert [row.get("iterations") for row in rows] == [None, 1, 2]
    assert (rows[0]["form"], rows[0]["ratio"]) == ("nbcnn cpu", 1.0)
