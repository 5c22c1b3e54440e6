"""Tests of the study of engines: which steps and ways it finds, that it times right results alone, and what it says of the choices."""

import json
from dataclasses import replace

import pytest

from nbcnn.cli import study_engines
from nbcnn.gpu import device as gpu_device
from nbcnn.gpu.target import H200
from nbcnn.lab.measure.nets import Network
from nbcnn.lab.measure.plans import Absent
from nbcnn.lab.studies import engine_nets, engines, tiles
from nbcnn.nn.activations import ReLU
from nbcnn.nn.layers import Conv2d, Flatten, Linear
from nbcnn.nn.losses import SoftmaxCrossEntropy


def small():
    return [Conv2d(8, 3, padding=1), ReLU(), Conv2d(16, 1), Flatten(), Linear(4), SoftmaxCrossEntropy()]


@pytest.fixture
def one(monkeypatch):
    """A network of two convolutions in place of those of the study."""
    monkeypatch.setattr(engines, "ALL", {"small": Network("small", "", small, (8, 4, 4), 2)})


def test_every_way_to_run_a_step_is_found_today_s_choice_first(one):
    found = engines.tasks(["small"], ["fp32"], Absent(), batches=(0,))
    assert len(found) > 8
    by_op = {task.step.op: task for task in found}
    names = [way.impl.engine for way in by_op["conv_wgrad"].ways]
    assert names == ["wgmma", "mma", "im2col"]
    assert by_op["conv_wgrad"].ways[0].tile == by_op["conv_wgrad"].ways[0].impl.tile(by_op["conv_wgrad"].call, H200)
    few = [way for way in by_op["conv_relu_fprop"].ways if way.impl.engine == "wgmma"]
    assert few == [] or few[0].slower, "which is offered, with the reason why the table leaves it out"
    assert [len(task.ways) > 1 for task in found] == sorted((len(task.ways) > 1 for task in found), reverse=True)
    more = engines.tasks(["small"], ["fp32"], Absent(), most_tiles=3, batches=(0,))
    assert sum(len(task.ways) for task in more) > sum(len(task.ways) for task in found)


def test_the_networks_of_the_study_can_be_planned():
    for name in ("lenet", "inverted"):
        assert engines.tasks([name], ["im2col"], Absent(), batches=(2,))
    assert set(engine_nets.OWN) < set(engine_nets.ALL)


def test_a_step_is_found_again_in_its_row(one):
    rows = [
        task.named | {"ways": [way.named | {"us": 2.0} for way in task.ways]} for task in engines.tasks(["small"], ["im2col"], Absent(), batches=(0,))
    ]
    rows = json.loads(json.dumps(rows))
    for row in engines.judged(rows):
        assert "why" not in row["ways"][0], row
    first = next(row for row in rows if len(row["ways"]) > 1)
    first["ways"][1]["us"] = 1.0
    assert engines.regret(first) == 1.0
    text = engines.lines([first])
    assert "100.0% at most" in text[-1].replace(" %", "%")


@pytest.mark.skipif(not gpu_device.SIMULATOR, reason="times are stubs here, kernels run in the simulator")
def test_ways_are_timed_if_their_results_are_right(one, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(tiles, "milliseconds", lambda device, launches, sets: 0.001 * len(launches) / sets)
    monkeypatch.setattr(tiles, "EVICTED", 1)
    out = tmp_path / "rows.json"
    assert study_engines.main(["--rows", "im2col", "--networks", "small", "--out", str(out), "--json"]) == 0
    rows = json.loads(out.read_text())
    assert json.loads(capsys.readouterr().out) == rows
    timed = [way for row in rows for way in row["ways"]]
    assert timed
    assert [way["why"] for way in timed if "why" in way] == []
    assert all(way["us"] == way["launches"] == len(way.get("traffic", [0] * way["launches"])) for way in timed)


def test_a_wrong_result_gets_no_time(one):
    (task, *_) = engines.tasks(["small"], ["fp32"], Absent(), batches=(0,))
    assert replace(task, ways=()).named["op"] == task.step.op
    assert engines.fastest({"ways": [{"why": "wrong"}]}) == {}
    assert engines.regret({"ways": [{"why": "wrong"}, {"us": 1.0}]}) is None
